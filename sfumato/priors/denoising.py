"""Training of a prior on public images: denoising score matching, with an exponential moving average of the weights."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional

from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine.compiled import Compiled
from sfumato.engine.state import entries_below, flat, read_tensors, restore, state_of, write_tensors
from sfumato.features.embedding import ImageEmbedding
from sfumato.features.public_autoencoder import NAMES
from sfumato.nets.samplers import dpm_solver, karras_levels
from sfumato.nets.score import ScoreNetwork, denoising_loss
from sfumato.nets.training import Trainer, warm_cosine
from sfumato.priors.continuation import embedding_of, expand_state, joined_description, same_architecture
from sfumato.priors.data_parallel import Workers, batch_gradients, embed_parts
from sfumato.priors.latent_space import DrawingSpace, PublicAutoencoderMaps
from sfumato.priors.prior import FILE, Prior, PriorCard, load_prior, save_prior
from sfumato.progress import bar, track

CHECKPOINT, PICTURE = "checkpoint.safetensors", "samples.png"
CHECKPOINTS = 20  # of a training
HELD_OUT, MAX_HELD_OUT = 0.02, 1000  # part of the images, and at most so many, that measure the loss
CONDITION_DROPOUT = 0.1  # part of the conditions that are dropped in training, for guidance
LABEL_DROPOUT = 0.5  # part of the labels that are dropped in training
LEVEL_CENTRE, LEVEL_SPREAD = 0.45, 1.2  # median of the noise levels, standard deviation of their logarithm
LOWEST, HIGHEST = 0.002, 80.0  # noise levels
SAMPLER_LOWEST, SAMPLER_HIGHEST, SAMPLER_LEVELS = 0.02, 40.0, 18
GUIDANCE_LEVELS = (0.2, 6.0)  # noise levels with guidance
GPU_BATCH, CPU_BATCH = 2000, 50  # images drawn at once; more would not fit into the caches of a CPU
EMA, BETAS = 0.9995, (0.9, 0.99)
SHOWN = 100  # images in the picture
EMBEDDED_AT_ONCE, ENCODED_AT_ONCE = 500, 100  # images
MIN_IMAGES, MIN_SIDE, MAX_SIDE = 50, 16, 64
MIN_ENCODED_SIDE, MAX_ENCODED_SIDE = 64, 256  # with an autoencoder


@dataclass(frozen=True)
class PriorTraining:
    """Settings of a training.

    - steps: number of training steps of Adam.
    - batch_size: images in a step.
    - learning_rate: highest learning rate; it rises, then falls as a cosine.
    - widths: channels of the U-Net (`nets/unet.py`) at each resolution.
    - context: width of its embedding of noise level and class.
    - attention: number of lowest resolutions with self-attention.
    - flip: mirror images at random; not for text or other images with a direction.
    """

    steps: int = 20_000
    batch_size: int = 256
    learning_rate: float = 4e-4
    widths: tuple[int, ...] = (128, 256, 256, 256)
    context: int = 128
    attention: int = 3
    flip: bool = False


def train_prior(
    images: ImageSet,
    folder: str | Path,
    *,
    name: str,
    trained_on: str,
    licence: str = "not stated",
    encoder: str = "",
    autoencoder: str = "",
    start: Prior | None = None,
    settings: PriorTraining = PriorTraining(),  # noqa: B008  (frozen)
    resume: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
    workers: Workers | None = None,
) -> Prior:
    """Train a prior on public images; write it, a picture of samples and checkpoints to `folder`.

    The network is conditioned on labels and on an embedding of the image (`features/embedding.py`), so that a method
    can ask for images whose embedding it has learned about.

    - images: public images of one size, grey or colour, 16 to 64 pixels a side, with an autoencoder 64 to 256. Labels
      serve as conditions.
    - name, trained_on, licence: for the card.
    - encoder: public network of the embedding, as `load_perceptual` takes it; default: scattering coefficients.
    - autoencoder: `taef2`, to learn its maps in place of pixels; default none.
    - start: a prior with a network of the same widths, whose training is continued with these images; default none.
    - settings: of the training and the network.
    - resume: continue an interrupted training in that folder, default False.
    - seed: of initial weights, order and noise, default 0.
    - device: default "cpu".
    - workers: compute embeddings and gradients there (`cluster.connect`), with one part of each batch for each worker;
      default: in this process. The prior is the same up to rounding.
    """
    target, place = Path(folder), torch.device(device)
    _check_images(images, autoencoder)
    _check_folder(target, resume)
    channels, height, _ = images.shape
    classes = len(images.classes) if images.labels is not None else 1
    shape = settings.widths, settings.context, settings.attention
    card = PriorCard(name, channels, height, classes, *shape, trained_on, licence, encoder, autoencoder=autoencoder)
    if start is not None:
        card = _continued(card, start)
    network_of_embedding = card.load_encoder(place)
    if network_of_embedding is not None:
        card = replace(card, encoder_sha256=network_of_embedding.sha256)
    space = card.space(card.shape, place)
    if isinstance(space, PublicAutoencoderMaps):
        card = replace(card, autoencoder_sha256=space.autoencoder.sha256)
    embedding = embedding_of(card, network_of_embedding, start, images, seed, place)
    card = replace(card, condition=embedding.condition_width)
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = card.new_network()
        if start is not None:
            network.load_state_dict(expand_state(start, card, dict(network.state_dict())))
        network = network.to(place, memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = Trainer(network, ema=EMA, betas=BETAS, warm_up=True)
    batches = PublicBatches(images, embedding, settings, seed, place, space, workers)
    began = "" if start is None else start.sha256
    identity = f"{card}, {settings}, seed {seed}, {_digest(images)}, {began}"
    _train(trainer, batches, settings, target / CHECKPOINT, identity, card, workers)
    average = cast(ScoreNetwork, trainer.average.eval())
    notes = {
        "held_out_loss": round(batches.held_out_loss(average), 4),
        "held_out_loss_conditioned": round(batches.held_out_loss(average, conditioned=True), 4),
        "images": len(images),
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "images_seen": settings.steps * settings.batch_size + (start.card.notes.get("images_seen", 0) if start else 0),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        **({} if start is None else {"start_sha256": start.sha256}),
    }
    _picture(average, space, batches.held_out_conditions(SHOWN), seed, target / PICTURE)
    save_prior(target, replace(card, notes=notes), average.state_dict(), embedding.state_dict())
    (target / CHECKPOINT).unlink(missing_ok=True)
    return load_prior(target)


def _continued(card: PriorCard, start: Prior) -> PriorCard:
    """Return the card of a prior that continues another one's training."""
    if not same_architecture(card, start.card):
        raise DataError(
            f"the prior {start.card.name} has a network of other channels, widths, context or attention, or another "
            "autoencoder"
        )
    trained_on = joined_description(card.trained_on, start.card.trained_on)
    return replace(card, trained_on=trained_on, licence=joined_description(card.licence, start.card.licence))


def _check_folder(target: Path, resume: bool) -> None:
    if (target / FILE).exists():
        raise DataError(f"{target} holds a finished prior; choose another folder")
    if (target / CHECKPOINT).exists() and not resume:
        raise DataError(
            f"{target} holds an interrupted training; continue it with resume (--resume) or use another folder"
        )


def _check_images(images: ImageSet, autoencoder: str) -> None:
    _, height, width = images.shape
    if autoencoder not in ("", *NAMES):
        raise DataError(f"there is no autoencoder {autoencoder!r}; available: {', '.join(NAMES)}")
    low, high = (MIN_ENCODED_SIDE, MAX_ENCODED_SIDE) if autoencoder else (MIN_SIDE, MAX_SIDE)
    if height != width or not low <= height <= high:
        hint = "" if autoencoder or height <= MAX_SIDE else "; larger ones need an autoencoder (--autoencoder taef2)"
        kind = f"a prior with the autoencoder {autoencoder}" if autoencoder else "a prior"
        raise DataError(
            f"{kind} needs square images of {low} to {high} pixels, not {height} × {width}; pass a size{hint}"
        )
    if len(images) < MIN_IMAGES:
        raise DataError(
            f"a prior needs at least {MIN_IMAGES} images, and should have thousands; there are {len(images)}"
        )


def _digest(images: ImageSet) -> str:
    """Return the SHA-256 of pixels and labels: a training is continued with the same images only."""
    digest = hashlib.sha256(images.images.numpy().tobytes())
    digest.update(b"" if images.labels is None else images.labels.numpy().tobytes())
    return digest.hexdigest()


class PublicBatches:
    """Batches of public images with noise, and held-out images with fixed noise.

    - space: what the network draws, default pixels.
    """

    def __init__(
        self,
        images: ImageSet,
        embedding: ImageEmbedding,
        settings: PriorTraining,
        seed: int,
        device: torch.device,
        space: DrawingSpace | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        held = min(MAX_HELD_OUT, math.ceil(HELD_OUT * len(images)))
        labels = images.labels if images.labels is not None else torch.zeros(len(images), dtype=torch.int64)
        pixels, self._labels = images.images[order], labels[order].to(device)
        self._held, self._settings = held, settings
        forms = [pixels, pixels.flip(3)] if settings.flip else [pixels]
        self._conditions = torch.stack([_conditions(form, embedding, workers) for form in forms])  # [forms, N, width]
        if space is None or not space.changes:
            self._forms = torch.stack(forms).to(device)  # [forms, N, ...]
        else:
            self._forms = torch.stack([_encoded(form, space, device) for form in forms])

    @property
    def state(self) -> torch.Generator:
        return self._generator

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return images, noise, noise levels, labels and conditions of a batch."""
        generator, count = self._generator, self._settings.batch_size
        device = generator.device
        chosen = torch.randint(self._held, len(self._labels), (count,), generator=generator, device=device)
        form = torch.randint(len(self._conditions), (count,), generator=generator, device=device)
        pixels, labels = self._maps(form, chosen), self._labels[chosen]
        kept = torch.rand(count, 1, generator=generator, device=device) >= CONDITION_DROPOUT
        unlabelled = torch.rand(count, generator=generator, device=device) < LABEL_DROPOUT
        noise = torch.randn(pixels.shape, generator=generator, device=device)
        levels = draw_levels(count, generator)
        return pixels, noise, levels, torch.where(unlabelled, -1, labels), kept * self._conditions[form, chosen]

    def _maps(self, form: torch.Tensor | int, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the network draws: pixels, or maps."""
        found = self._forms[form, chosen]
        return to_unit_range(found) if found.dtype == torch.uint8 else found.float()

    def held_out_conditions(self, count: int) -> torch.Tensor:
        """Return the embeddings of `count` held-out images, some of them repeated if there are fewer."""
        return self._conditions[0, torch.arange(count) % self._held]

    @torch.no_grad()
    def held_out_loss(self, network: ScoreNetwork, *, conditioned: bool = False) -> float:
        """Return the mean loss on held-out images, at noise levels and noise that do not change.

        - conditioned: whether their embedding is known; their labels are not.
        """
        generator, device = torch.Generator().manual_seed(0), self._forms.device
        levels = draw_levels(self._held, generator)
        noise = torch.randn(self._held, *self._forms.shape[2:], generator=generator)
        total = 0.0
        for part in torch.arange(self._held).split(250):
            here = part.to(device)
            pixels, none = self._maps(0, here), torch.full((len(part),), -1, device=device)
            condition = self._conditions[0, here] if conditioned else None
            given = noise[part].to(device), levels[part].to(device), none
            total += float(denoising_loss(network, pixels, *given, condition=condition).sum())
        return total / self._held


def _conditions(pixels: torch.Tensor, embedding: ImageEmbedding, workers: Workers | None = None) -> torch.Tensor:
    device = embedding.centre.device

    def rows(part: torch.Tensor) -> torch.Tensor:
        return embedding.condition(embedding(to_unit_range(part.to(device))))

    if workers is not None:
        return embed_parts(workers, rows, pixels, EMBEDDED_AT_ONCE).to(device)
    return torch.cat([rows(part) for part in pixels.split(EMBEDDED_AT_ONCE)])


def _encoded(pixels: torch.Tensor, space: DrawingSpace, device: torch.device) -> torch.Tensor:
    """Return maps of images, in half precision: those of 100,000 images of 256 pixels take 6.5 GB."""
    parts = pixels.split(ENCODED_AT_ONCE)
    encoded = [space.encode(to_unit_range(parts[number].to(device))).half() for number in track(len(parts), "encoding")]
    return torch.cat(encoded)


def draw_levels(count: int, generator: torch.Generator, centre: float = LEVEL_CENTRE) -> torch.Tensor:
    """Draw noise levels [count] for training, with this median."""
    normals = torch.randn(count, generator=generator, device=generator.device)
    return (centre * torch.exp(LEVEL_SPREAD * normals)).clamp(LOWEST, HIGHEST)


def mean_denoising_loss(
    network: ScoreNetwork,
    images: torch.Tensor,
    noise: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean loss of a batch; on a GPU networks compute in bfloat16."""
    device = images.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        pixels = images.contiguous(memory_format=torch.channels_last)
        return denoising_loss(network, pixels, noise, levels, labels, condition=condition).mean()


compiled_denoising_loss = Compiled(mean_denoising_loss)


def _train(
    trainer: Trainer,
    batches: PublicBatches,
    settings: PriorTraining,
    checkpoint: Path,
    identity: str,
    card: PriorCard,
    workers: Workers | None,
) -> None:
    """Train, with a checkpoint after each twentieth of the steps; continue one of the same `identity` that is there."""
    parts: dict[str, Any] = {"trainer": trainer, "batches": batches.state}
    start, interval = 0, max(1, settings.steps // CHECKPOINTS)
    if checkpoint.exists():
        tensors, note = read_tensors(checkpoint)
        if note.get("training") != identity:
            raise DataError(
                f"{checkpoint.parent} holds a training with other settings, seed or images; continue it with the same"
            )
        start = int(note["step"])
        for key, part in parts.items():
            restore(part, entries_below(tensors, key))
    network = cast(ScoreNetwork, trainer.network)
    with bar("training the prior") as advance:
        for step in range(start, settings.steps):
            trainer.set_rate(settings.learning_rate * warm_cosine(step, settings.steps))
            if workers is None:
                trainer.descend(compiled_denoising_loss(network, *batches.draw()))
            else:
                trainer.step(batch_gradients(workers, compiled_denoising_loss, card, network, batches.draw()))
            advance(step + 1, settings.steps)
            if (step + 1) % interval == 0:
                tensors = flat({key: state_of(part) for key, part in parts.items()})
                write_tensors(checkpoint, _on_cpu(tensors), {"step": step + 1, "training": identity})


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in tensors.items()}


@torch.no_grad()
def draw_images(
    network: ScoreNetwork,
    shape: tuple[int, int, int],
    labels: torch.Tensor,
    generator: torch.Generator,
    *,
    levels: int = SAMPLER_LEVELS,
    guidance: float = 1.0,
    condition: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    highest: float = SAMPLER_HIGHEST,
    limit: float = 1.0,
) -> torch.Tensor:
    """Draw images [N, C, H, W] in [-1, 1] for labels [N]; on a GPU compiled, in batches of one size.

    A network of an autoencoder's maps draws maps.

    - condition: embeddings [N, width] of the images, if the network is conditioned on them; default none.
    - levels: number of noise levels of the sampler.
    - guidance: of classifier-free guidance (Ho and Salimans 2022), at medium noise levels only (Kynkäänniemi et al.
      2024); 1: none.
    - start: images [N, C, H, W] to vary: noise of the level `highest` is added to them, and removed by the network. The
      higher the level, the less of an image is left. Default: no images, only noise.
    - highest: first noise level.
    - limit: largest absolute value; that of pixels is 1.
    """
    device, schedule = generator.device, karras_levels(levels, SAMPLER_LOWEST, highest)
    on_gpu, parts = device.type == "cuda", []
    network = copy.deepcopy(network).to(_precision(device), memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = GPU_BATCH if on_gpu else CPU_BATCH
    for begin in range(0, len(labels), size):
        part, given = labels[begin : begin + size], None
        missing = size - len(part) if on_gpu else 0  # a compiled network wants one size
        if condition is not None:
            given = functional.pad(condition[begin : begin + size], (0, 0, 0, missing))
        padded = functional.pad(part, (0, missing))
        noisy = schedule[0] * torch.randn(len(padded), *shape, generator=generator, device=device)
        if start is not None:
            noisy[: len(part)] += start[begin : begin + size]
        parts.append(_draw_batch(network, noisy, padded, given, schedule, guidance)[: len(part)])
    return torch.cat(parts).clamp(-limit, limit)


def _precision(device: torch.device) -> torch.dtype:
    """Return bfloat16 for devices that compute in it: GPUs, and CPUs with AVX-512 BF16, where it halves the time."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # private, but there is no other
    return torch.bfloat16 if device.type == "cuda" or supported() else torch.float32


def _draw_batch(
    network: ScoreNetwork,
    noisy: torch.Tensor,
    labels: torch.Tensor,
    condition: torch.Tensor | None,
    schedule: Sequence[float],
    guidance: float,
) -> torch.Tensor:
    device, none = noisy.device, torch.full_like(labels, -1)
    nothing = None if condition is None else torch.zeros_like(condition)

    def denoise(x: torch.Tensor, level: float) -> torch.Tensor:
        levels = torch.full((len(x),), level, device=device)
        score = _compiled_score(network, x, levels, labels, condition)
        if guidance != 1 and GUIDANCE_LEVELS[0] < level < GUIDANCE_LEVELS[1]:
            plain = score.clone()
            score = torch.lerp(_compiled_score(network, x, levels, none, nothing), plain, guidance)
        return x + level**2 * score

    return dpm_solver(denoise, noisy, schedule)


def _score(
    network: ScoreNetwork,
    x: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    condition: torch.Tensor | None,
) -> torch.Tensor:
    pixels = x.contiguous(memory_format=torch.channels_last)
    score: torch.Tensor = network(pixels, levels, labels, condition=condition)
    return score


_compiled_score = Compiled(_score)


def _picture(network: ScoreNetwork, space: DrawingSpace, conditions: torch.Tensor, seed: int, path: Path) -> None:
    """Write a grid of samples with the embeddings of held-out images."""
    device = conditions.device
    none, generator = torch.full((len(conditions),), -1, device=device), torch.Generator(device).manual_seed(seed)
    maps = draw_images(network, space.maps, none, generator, condition=conditions, limit=space.limit)
    contact_sheet(ImageSet(to_bytes(space.decode(maps)).cpu()), path, per_class=SHOWN)
