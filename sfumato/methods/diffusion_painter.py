"""The diffusion painter: a public prior, adapted to private classes. `dp-diffusion` is this; `atelier` adds a teacher.

Idea: a prior (`priors/`) knows what images look like, which no private image has to pay for. Three steps adapt it:

1. Ask for noisy class means of an embedding of the images (`features/embedding.py`).
2. Curriculum, free of charge: draw images from the prior, weight them so that their mean embedding approaches a class
   mean (exponential tilting; PrivImage selects whole public classes instead) and by a teacher's probabilities if there
   is one, and train the network on them under the class's label. Draw again, weight again, for a few rounds.
3. Train by DP-SGD on denoising score matching (DPDM), on few parameters, on low-rank adapters, or on all.

Released: the class means, once; at each of `steps` steps the noisy sum of clipped per-example gradients over a Poisson
sample, several noise levels of an image averaged before clipping.
Public: the prior and the encoder, named in the certificate with what they were trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine import GradientVault, Performance
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding, tilt
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.teacher import EmbeddingTeacher
from sfumato.nets.low_rank import add_low_rank, merge_low_rank
from sfumato.nets.score import ScoreNetwork, denoising_loss
from sfumato.nets.training import Trainer, equal_batches, use_average, warm_cosine
from sfumato.priors import Prior, load_prior
from sfumato.priors.denoising import DROPPED, compiled_denoising_loss, draw_images, draw_levels
from sfumato.privacy import Release

Tune = Literal["few", "low-rank", "all"]
FEW = (".context.", ".scale_shift.", "norm", ".last.", ".entry.", ".shortcut.")  # parameters of `few`
CLASS_EMBEDDING = ("class_rows", "unet.context.0.weight")  # trained beside low-rank adapters
SHARPNESS = 2.0  # factor on the teacher's logits where it chooses images to practise on
VIEWS_PER_BATCH = 512  # whose gradients are computed at once on a GPU
LEAST = {"pool": 2, "practice_steps": 1, "practice_batch": 1, "views": 1, "rank": 1, "levels": 2}
EMBEDDED_AT_ONCE, POOL_BATCH = 2000, 2000  # images
EMBEDDING_IMAGES = 10_000  # of the prior, from which the principal components come


@dataclass(frozen=True)
class PainterTraining:
    """Settings of the diffusion painter.

    - pool: images drawn in a round of the curriculum. rounds: how many; 0: no curriculum.
    - practice_steps, practice_batch, practice_rate, practice_ema: of the training in a round. practice_centre: median
      of its noise levels.
    - strength: of the tilt; the larger, the more a class mean decides.
    - bound: clipping norm. views: noise levels of an image. learning_rate, ema: of the private gradients.
    - rank: of low-rank adapters. level_centre: median of the noise levels of private gradients.
    - levels: noise levels of the sampler. guidance: of classifier-free guidance; 1: none.
    """

    pool: int = 30_000
    rounds: int = 2
    practice_steps: int = 700
    practice_batch: int = 512
    practice_rate: float = 3e-4
    practice_ema: float = 0.998
    practice_centre: float = 1.0
    strength: float = 100.0
    bound: float = 0.1
    views: int = 2
    learning_rate: float = 5e-4
    ema: float = 0.96
    rank: int = 4
    level_centre: float = 0.67
    levels: int = 16
    guidance: float = 2.0

    def __post_init__(self) -> None:
        for each in fields(self):
            low, value = LEAST.get(each.name, 0), getattr(self, each.name)
            if not (value >= low and (value > 0 or each.name == "rounds")):
                raise ValueError(f"{each.name} of the adaptation must be at least {low} and positive, got {value!r}")


PRIOR_NOTE = "the guarantee does not cover the images that the prior was trained on: {trained_on}"
CPU_NOTE = "without a GPU the preset adapts a prior by few steps only, and hardly; a GPU is advised"
CPU_TRAINING = PainterTraining(
    pool=200,
    rounds=1,
    practice_steps=20,
    practice_batch=16,
    practice_rate=1e-4,  # with 1e-3 and so few images in a step, the images of a prior turn to noise
    views=1,
    levels=6,
    guidance=1.5,
)


class DiffusionPainter:
    """A prior for one data set: its releases, its adaptation, its samples.

    - name: of the prior, or its path. settings: of the adaptation.
    - public: facts of the images.
    - steps, sampling_prob: of the private gradients; 0 steps: none.
    - tune: parameters that private gradients train: `few`, `low-rank` or `all`; None: `low-rank` for a network of
      another library, otherwise `few`.
    - encoder: public encoder of the embedding; empty: the prior's own, or scattering coefficients.
    """

    def __init__(
        self,
        name: str,
        settings: PainterTraining,
        public: PublicFacts,
        *,
        steps: int,
        sampling_prob: float,
        tune: Tune | None = None,
        encoder: str,
        seed: int,
        device: torch.device,
    ) -> None:
        self.prior: Prior = load_prior(name)
        self.prior.check_shape(public.shape)
        self.settings, self.public, self.steps, self.sampling_prob = settings, public, steps, sampling_prob
        if self.prior.foreign and tune not in (None, "low-rank"):
            raise DataError(f"the prior {self.prior.card.name} is adapted by low-rank adapters; set tune=low-rank")
        self.tune: Tune = tune or ("low-rank" if self.prior.foreign else "few")
        self.seed, self.device = seed, device
        name = encoder or self.prior.card.encoder
        self.encoder = load_perceptual(name, device) if name else None  # once, so that what is stated is what is used

    # -- the plan -----------------------------------------------------------------------------------------

    def means(self, share: float) -> list[Release]:
        """Return the release of the class means, with this share of 1 / noise² of releases on all images."""
        return [Release("means", weight=share**-0.5)] if self.settings.rounds else []

    def gradients(self) -> list[Release]:
        return [Release("gradients", self.steps, self.sampling_prob)] if self.steps else []

    def notes(self) -> list[str]:
        """Return what a user should know before a fit, from public facts."""
        slow = [CPU_NOTE] if self.device.type == "cpu" else []
        return [PRIOR_NOTE.format(trained_on=self.prior.card.trained_on), *slow]

    def facts(self) -> dict[str, Any]:
        """Return the public networks in use, for the certificate."""
        facts = {"prior": self.prior.facts}
        return facts if self.encoder is None else {**facts, "encoder": self.encoder.facts}

    def check_unchanged(self, vault: GradientVault) -> None:
        """Raise `DataError` if a public file differs from the one that the ledger names."""
        stated = (vault.ledger.opening or {}).get("public_facts", {})
        if any(name in stated and stated[name] != fact for name, fact in self.facts().items()):
            raise DataError("the file of a public network has changed since the run began; start again")

    # -- adaptation ---------------------------------------------------------------------------------------

    def public_pool(self, checkpoints: Checkpoints) -> torch.Tensor:
        """Draw images from the prior, equally many of each of its classes; uint8."""
        network = self._prior_network()
        classes = self.prior.card.classes
        labels = torch.arange(max(self.settings.pool, 1), device=self.device) % classes
        return checkpoints.once("public pool", partial(self._drawn, network, labels, 0))["images"]

    def new_embedding(self) -> ImageEmbedding:
        return ImageEmbedding(self.public.shape, self.encoder, self.device)

    def embed(
        self, vault: GradientVault, pool: torch.Tensor, checkpoints: Checkpoints
    ) -> tuple[ImageEmbedding, GradientVault]:
        """Fit an embedding to the prior's images; return it, and a vault of the embedded private images."""
        embedding = self.new_embedding()

        def make() -> dict[str, torch.Tensor]:
            embedding.fit(to_unit_range(pool[:EMBEDDING_IMAGES].to(self.device)), self.seed)
            return dict(embedding.state_dict())

        embedding.load_state_dict(checkpoints.once("embedding", make))
        return embedding, vault.map(embedding)

    def mixed_network(
        self,
        embedding: ImageEmbedding | None = None,
        pool: torch.Tensor | None = None,
        teacher: EmbeddingTeacher | None = None,
    ) -> ScoreNetwork:
        """Return the prior's network for the private classes: each starts as a mixture of the prior's classes.

        The mixture is what a teacher sees in the prior's images, `pool`; without a teacher it is uniform.
        """
        own, public = len(self.public.classes), self.prior.card.classes
        shares = torch.full((own, public), 1 / public, device=self.device)
        if teacher is not None and embedding is not None and pool is not None:
            seen = teacher.classify(self._embed(embedding, pool)).softmax(1)
            labels = torch.arange(len(pool), device=self.device) % public
            shares = torch.zeros(public, own, device=self.device).index_add_(0, labels, seen).T
            shares = shares / shares.sum(1, keepdim=True)
        return self._prior_network().with_classes(shares)

    def practise(
        self,
        network: ScoreNetwork,
        embedded: GradientVault,
        embedding: ImageEmbedding,
        pool: torch.Tensor,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None = None,
    ) -> ScoreNetwork:
        """Train on weighted images, first of the prior, then also on the network's own.

        - embedded: the vault of the embedded images, which releases their class means. pool: images of the prior.
        """
        if not self.settings.rounds:
            return network
        sums = checkpoints.once("means", lambda: {"sums": _release_means(embedded)})["sums"].to(self.device)
        means = sums / counts[:, None].clamp_min(1)
        settings, generator = self.settings, torch.Generator(self.device).manual_seed(self.seed)
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trainer = Trainer(network, ema=settings.practice_ema, warm_up=True)
        images, rows = pool, self._embed(embedding, pool)
        shares = (counts / counts.sum()).float()
        for number in range(settings.rounds):
            if number:
                labels = torch.arange(settings.pool, device=self.device) % len(self.public.classes)
                drawn = checkpoints.once(f"pool {number}", partial(self._drawn, network, labels, number))["images"]
                images = torch.cat([images, drawn])
                rows = torch.cat([rows, self._embed(embedding, drawn)])
            weights = tilt(rows, means, settings.strength)
            if teacher is not None:
                weights = weights * (SHARPNESS * teacher.classify(rows)).softmax(1)
                weights = weights / weights.sum(0)
            loop = checkpoints.loop(
                f"curriculum {number + 1}/{settings.rounds}", settings.practice_steps, trainer=trainer, random=generator
            )
            pixels = images.to(self.device)
            for step in loop:
                labels = torch.multinomial(shares, settings.practice_batch, replacement=True, generator=generator)
                chosen = _draw_rows(weights, labels, generator)
                batch = to_unit_range(pixels[chosen])
                noise = torch.randn(batch.shape, generator=generator, device=self.device)
                levels = draw_levels(len(batch), generator, settings.practice_centre)
                trainer.set_rate(settings.practice_rate * warm_cosine(step, settings.practice_steps))
                dropped = torch.rand(len(labels), generator=generator, device=self.device) < DROPPED
                labels = torch.where(dropped, -1, labels)  # for guidance
                trainer.descend(compiled_denoising_loss(network, batch, noise, levels, labels))
            use_average(trainer)
            trainer.reset()
        return network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]

    def train_privately(
        self, vault: GradientVault, network: ScoreNetwork, counts: torch.Tensor, checkpoints: Checkpoints
    ) -> ScoreNetwork:
        """Train by DP-SGD: noisy sums of clipped gradients, divided by the expected number of images."""
        if not self.steps:
            return network
        settings, expected = self.settings, self.sampling_prob * float(counts.sum())
        network = network.requires_grad_(self.tune == "all")
        if self.tune == "low-rank":
            add_low_rank(network.unet, settings.rank, self.seed)
            for name, parameter in network.named_parameters():
                if name.startswith(CLASS_EMBEDDING):
                    parameter.requires_grad_(True)
        elif self.tune == "few":
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(any(part in name for part in FEW))
        trainer = Trainer(network, ema=settings.ema, betas=(0.9, 0.99), warm_up=True)
        on_gpu = self.device.type == "cuda"
        batch_size = equal_batches(expected, max(8, VIEWS_PER_BATCH // settings.views)) if on_gpu else None
        performance = Performance(batch_size=batch_size, precision=torch.bfloat16 if on_gpu else torch.float32)
        loss = PrivateLoss(self.public.shape, settings.level_centre)
        for step in checkpoints.loop("gradients", self.steps, trainer=trainer):
            sums = vault.gradient(
                network,
                loss,
                release="gradients",
                bound=settings.bound,
                with_labels=True,
                views=settings.views,
                draws=loss.draws,
                performance=performance,
            )
            trainer.set_rate(settings.learning_rate * warm_cosine(step, self.steps))
            trainer.step({name: total / expected for name, total in sums.items()})
        use_average(trainer)
        return merge_low_rank(network) if self.tune == "low-rank" else network

    # -- samples ------------------------------------------------------------------------------------------

    def paint(self, network: nn.Module, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images for labels [N]."""
        assert isinstance(network, ScoreNetwork)
        settings, guidance = self.settings, self.settings.guidance if len(self.public.classes) > 1 else 1.0
        return draw_images(network, self.public.shape, labels, generator, levels=settings.levels, guidance=guidance)

    def new_generator(self) -> ScoreNetwork:
        """Return a network for the private classes, whose weights are to be loaded."""
        shares = torch.zeros(len(self.public.classes), self.prior.card.classes)
        return self._prior_network().with_classes(shares.to(self.device))

    def decode(self, painted: torch.Tensor) -> torch.Tensor:
        return painted

    def _prior_network(self) -> ScoreNetwork:
        return self.prior.network(self.public.shape[0]).to(self.device)

    def _drawn(self, network: ScoreNetwork, labels: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Draw images of a round for a checkpoint, uint8."""
        generator = torch.Generator(self.device).manual_seed(self.seed + number)
        shape, levels = self.public.shape, self.settings.levels
        parts = [draw_images(network, shape, part, generator, levels=levels) for part in labels.split(POOL_BATCH)]
        return {"images": torch.cat([to_bytes(part).cpu() for part in parts])}

    def _embed(self, embedding: ImageEmbedding, images: torch.Tensor) -> torch.Tensor:
        parts = images.split(EMBEDDED_AT_ONCE)
        return torch.cat([embedding(to_unit_range(part.to(self.device))) for part in parts])


class PrivateLoss:
    """Denoising score matching of one record's views; noise and noise level come from the vault's normal numbers."""

    def __init__(self, shape: tuple[int, int, int], centre: float) -> None:
        self._shape, self._centre = shape, centre
        self.draws = 1 + shape[0] * shape[1] * shape[2]

    def __call__(
        self, network: nn.Module, images: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(network, ScoreNetwork)
        levels = (self._centre * torch.exp(1.2 * normals[:, 0])).clamp(0.01, 40.0)
        return denoising_loss(network, images, normals[:, 1:].unflatten(1, self._shape), levels, labels)


def _draw_rows(weights: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one image for each label, with the probabilities of its column in `weights` [N, classes]."""
    cumulative = weights.double().cumsum(0)
    uniform = torch.rand(len(labels), generator=generator, device=labels.device, dtype=torch.float64)
    places = torch.searchsorted(
        cumulative.T.contiguous(), (uniform * cumulative[-1, labels])[None].expand(weights.shape[1], -1).contiguous()
    )
    return places[labels, torch.arange(len(labels), device=labels.device)].clamp_max(len(weights) - 1)


def _release_means(embedded: GradientVault) -> torch.Tensor:
    return embedded.sum(_identity, release="means", bound=1.0, by_class=True)


def _identity(rows: torch.Tensor) -> torch.Tensor:
    return rows * 1.0
