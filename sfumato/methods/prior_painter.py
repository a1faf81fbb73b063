"""Base class of painters with a prior: the public networks, their releases, training by DP-SGD.

A prior (`priors/`) knows what images look like, which no private image has to pay for. `embedding_painter.py`
conditions it on embeddings of a class; `curriculum_painter.py` teaches it the classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.engine import GradientVault, Performance
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding
from sfumato.methods.checkpoints import Checkpoints, check_public_files
from sfumato.methods.teacher import EmbeddingTeacher
from sfumato.nets.low_rank import add_low_rank, merge_low_rank
from sfumato.nets.score import ScoreNetwork, denoising_loss
from sfumato.nets.training import Trainer, equal_batches, use_average, warm_cosine
from sfumato.priors import Prior
from sfumato.priors.denoising import draw_images
from sfumato.privacy import Release

Tune = Literal["few", "low-rank", "all"]
# Parts of the names of parameters that `few` trains.
FEW_PARAMETERS = (".context.", ".scale_shift.bias", "norm", ".last.", ".entry.", ".shortcut.")
FEW_PARAMETERS_LABELLED = (*FEW_PARAMETERS, ".scale_shift.weight")  # in a network that learns classes
CLASS_EMBEDDING = ("class_rows", "unet.context.0.weight")  # trained beside low-rank adapters
VIEWS_PER_BATCH = 512  # gradients that are computed at once on a GPU
CURRICULUM_FIELDS = ("practice_steps", "practice_batch", "practice_rate", "practice_ema", "practice_centre", "strength")
MINIMUM = {"pool": 2, "practice_steps": 1, "practice_batch": 1, "views": 1, "rank": 1, "levels": 2}
LARGE_SIDE = 64  # pixels
MAX_POOL_ABOVE_LARGE_SIDE = 8000  # images drawn in a round, limited by memory
GPU_SAMPLE_BATCH = 20_000  # labels in one call of `_sample` for images up to that side
MAX_MOMENTS_SHARE = 0.5  # of the budget
DROPPED_ABOVE = 1.28  # quantile of the normal distribution: drops a tenth of the conditions, for guidance


@dataclass(frozen=True)
class PainterTraining:
    """Settings of a painter with a prior.

    - pool: images that are drawn in a round.
    - rounds: rounds of the curriculum, or of the correction of class means; 0: none.
    - practice_steps: training steps in a round of the curriculum.
    - practice_batch: images in such a step.
    - practice_rate: learning rate of these steps.
    - practice_ema: decay of the exponential moving average over these steps.
    - practice_centre: median of the noise levels in these steps.
    - strength: strength of the tilt of the prior's images towards a class mean; larger: closer to the mean.
    - bound: clipping norm of a private gradient.
    - views: noise levels at which the gradient of an image is averaged before it is clipped.
    - learning_rate: learning rate of the private gradients.
    - ema: decay of the exponential moving average over the private gradients.
    - rank: rank of the low-rank adapters.
    - level_centre: median of the noise levels of private gradients.
    - levels: noise levels of the sampler.
    - guidance: weight of classifier-free guidance; 1: none.
    - tries: redraws of an image in which the teacher sees another class, at most.
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
    tries: int = 8

    def __post_init__(self) -> None:
        for each in fields(self):
            low, value = MINIMUM.get(each.name, 0), getattr(self, each.name)
            if not (value >= low and (value > 0 or each.name == "rounds")):
                raise ValueError(f"{each.name} of the adaptation must be at least {low} and positive, got {value!r}")


PRIOR_NOTE = "the guarantee does not cover the images that the prior was trained on: {trained_on}"
CPU_TRAINING = PainterTraining(
    pool=200,
    rounds=1,
    practice_steps=20,
    practice_batch=16,
    practice_rate=1e-4,  # with 1e-3 and so few images in a step, the images of a prior turn to noise
    views=1,
    levels=6,
    tries=1,
)


def gpu_sample_batch(shape: tuple[int, int, int]) -> int:
    """Return how many images of a shape are drawn at once on a GPU."""
    return min(GPU_SAMPLE_BATCH, GPU_SAMPLE_BATCH * LARGE_SIDE**2 // (shape[1] * shape[2]))


def gradient_performance(device: torch.device, expected: float, largest: int, *, low: bool = True) -> Performance:
    """Return, on a GPU, equal batches of about `largest` images at most, and bfloat16 if `low`."""
    if device.type != "cuda":
        return Performance()
    return Performance(equal_batches(expected, max(8, largest)), precision=torch.bfloat16 if low else torch.float32)


class PriorPainter(ABC):
    """A prior for one data set: its releases, its adaptation, its samples.

    - prior: the prior.
    - settings: of the adaptation.
    - public: facts of the images.
    - steps, sampling_prob: of the private gradients; 0 steps: none.
    - tune: parameters that private gradients train: `few`, `low-rank` or `all`; None: `low-rank` for a network of
      another library, otherwise `few`.
    - encoder: public encoder of the embedding; empty: the prior's own, or scattering coefficients.
    """

    moments_share: ClassVar[float] = 0.3  # of the budget of a method that also trains a teacher

    def __init__(
        self,
        prior: Prior,
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
        self.prior = prior
        self.prior.check_shape(public.shape)
        self.settings, self.public, self.steps, self.sampling_prob = settings, public, steps, sampling_prob
        if self.prior.foreign and tune not in (None, "low-rank"):
            raise DataError(f"the prior {self.prior.card.name} is adapted by low-rank adapters; set tune=low-rank")
        self.tune: Tune = tune or ("low-rank" if self.prior.foreign else "few")
        self.seed, self.device = seed, device
        name = encoder or self.prior.card.encoder
        self.encoder = load_perceptual(name, device) if name else None  # once, so that what is stated is what is used
        self.space = self.prior.space(self.drawn_shape, device)
        if max(public.shape[1:]) > LARGE_SIDE:
            self.settings = replace(settings, pool=min(settings.pool, MAX_POOL_ABOVE_LARGE_SIDE))

    @property
    def drawn_shape(self) -> tuple[int, int, int]:
        """Return the shape of the images that the network draws."""
        return self.public.shape

    # -- the plan -----------------------------------------------------------------------------------------

    @abstractmethod
    def moments(self, share: float) -> list[Release]:
        """Return the release of means, with this share of 1 / noise² of releases on all images."""

    def gradients(self) -> list[Release]:
        return [Release("gradients", self.steps, self.sampling_prob)] if self.steps else []

    def notes(self) -> list[str]:
        """Return what a user should know before a fit, from public facts."""
        return [PRIOR_NOTE.format(trained_on=self.prior.card.trained_on)]

    def facts(self) -> dict[str, Any]:
        """Return the public networks in use, for the certificate."""
        facts = {"prior": self.prior.facts}
        return facts if self.encoder is None else {**facts, "encoder": self.encoder.facts}

    def in_use(self) -> dict[str, tuple[Any, str] | None]:
        """Return the settings that a method with this painter uses otherwise; see `Parameterized._in_use`."""
        private = ("bound", "views", "learning_rate", "ema", "rank", "level_centre")
        unused = (*self.unused(), *(private if not self.steps else ("rank",) if self.tune != "low-rank" else ()))
        without = () if self.steps else ("sampling_prob",)
        pool = (self.settings.pool, f"at most {MAX_POOL_ABOVE_LARGE_SIDE} above {LARGE_SIDE} pixels a side")
        return {"adaptation.pool": pool, **dict.fromkeys((*without, *(f"adaptation.{name}" for name in unused)))}

    def unused(self) -> tuple[str, ...]:
        """Return the fields of `PainterTraining` that this painter does not use."""
        return CURRICULUM_FIELDS if not self.settings.rounds else ()

    def check_unchanged(self, vault: GradientVault) -> None:
        """Raise `DataError` if a public file differs from the one that the ledger names."""
        check_public_files(vault, self.facts())

    # -- adaptation ---------------------------------------------------------------------------------------

    @abstractmethod
    def new_embedding(self) -> ImageEmbedding:
        """Return the embedding, whose state is to be loaded or which has it from the prior."""

    @abstractmethod
    def embed(self, vault: GradientVault, checkpoints: Checkpoints) -> tuple[ImageEmbedding, GradientVault]:
        """Return the embedding, and a vault of the embedded private images."""

    @abstractmethod
    def adapt(
        self,
        vault: GradientVault,
        embedded: GradientVault,
        embedding: ImageEmbedding,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None = None,
    ) -> nn.Module:
        """Return the generator.

        - embedded: the vault of the embedded images.
        - counts: images of each class.
        - teacher: if there is one.
        """

    def draw(
        self, network: ScoreNetwork, labels: torch.Tensor, generator: torch.Generator, **options: Any
    ) -> torch.Tensor:
        """Draw images [N, C, H, W] in [-1, 1]; options are those of `draw_images`."""
        space, start = self.space, options.pop("start", None)
        if start is not None:
            options["start"] = space.encode(start)
        options["levels"] = self.settings.levels
        return space.decode(draw_images(network, space.maps, labels, generator, limit=space.limit, **options))

    @abstractmethod
    def paint(self, generator_network: nn.Module, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images for labels [N]."""

    @abstractmethod
    def vary(
        self,
        generator_network: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        level: float,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return variations of painted images [N, C, H, W]: noise of this level is added and removed."""

    @abstractmethod
    def new_generator(self) -> nn.Module:
        """Return a generator for the private classes, whose weights are to be loaded.

        Until then it draws the prior's images, whatever the class: zeros in place of a condition mean that nothing is
        known.
        """

    def decode(self, painted: torch.Tensor) -> torch.Tensor:
        """Return painted images in the shape of the private ones."""
        return painted

    def train_privately(
        self,
        vault: GradientVault,
        network: ScoreNetwork,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        loss: PrivateLoss,
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
                parameter.requires_grad_(any(part in name for part in loss.few))
        trainer = Trainer(network, ema=settings.ema, betas=(0.9, 0.99), warm_up=True)
        performance = gradient_performance(self.device, expected, VIEWS_PER_BATCH // settings.views)
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


class PrivateLoss:
    """Denoising score matching of one record's views; noise and noise level come from the vault's normal numbers.

    - shape: of the images.
    - centre: median of the noise levels.
    - condition: width of the embedding that follows the pixels in a record; 0: records are images, with labels.
    """

    def __init__(self, shape: tuple[int, int, int], centre: float, condition: int = 0) -> None:
        self._shape, self._centre, self._condition = shape, centre, condition
        self.few = FEW_PARAMETERS if condition else FEW_PARAMETERS_LABELLED
        self.draws = 2 + shape[0] * shape[1] * shape[2]

    def __call__(
        self, network: nn.Module, records: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor
    ) -> torch.Tensor:
        assert isinstance(network, ScoreNetwork)
        levels = (self._centre * torch.exp(1.2 * normals[:, 0])).clamp(0.01, 40.0)
        noise = normals[:, 2:].unflatten(1, self._shape)
        if not self._condition:
            return denoising_loss(network, records, noise, levels, labels)
        images, given = records[:, : -self._condition].unflatten(1, self._shape), records[:, -self._condition :]
        kept = normals[:, 1:2] < DROPPED_ABOVE
        return denoising_loss(network, images, noise, levels, torch.full_like(labels, -1), condition=kept * given)
