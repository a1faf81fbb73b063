"""DP-MEPF: mean embeddings of perceptual features (Harder, Jalali Asadabadi, Sutherland, Park; TMLR 2023).

Idea: all activations of a public network describe images better than random features of pixels. Release the noisy means
of these activations, and of their squares, once for each class; train a generator whose images have the same means.
Everything after the release is post-processing.

Released, once: the sums over each class of phi_1, all activations divided by their norm, and of phi_2, their squares
divided by theirs (Eq. 5 and 6); with `early_stopping`, of the same for the last layer, pooled, at ten times the noise
(section 3.2); noisy class counts unless sizes are declared public. The moments are one row with a tenth of the pooled
ones at its end. That costs what separate releases would, in one pass over the images.
Public: image shape, class names; the encoder, whose checksum and training data the certificate names.
Events: one Gaussian release on all the data, and that of the counts, composed exactly; classes are blocks of a vector.
No entry of a row is negative, so replacing an image moves a sum by sqrt(2) times its bound, not by the paper's 2.

All classes are divided by the same number m of images, as in Eq. 6, and a class's generated mean is multiplied by its
share of m. That is the kernel distance between labelled images. As all sums have the same noise, each class is weighted
by how well its mean is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.engine import GradientVault
from sfumato.engine.cuda_graph import Graph, NoBundle
from sfumato.features import load_perceptual
from sfumato.features.moments import class_means, moment
from sfumato.features.scattering import Scattering
from sfumato.methods.base import constant
from sfumato.methods.checkpoints import check_public_files
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.generator_method import GeneratorMethod, GeneratorSizes, GeneratorTraining
from sfumato.nets.training import warm_cosine
from sfumato.privacy import Release

STOPPING_NOISE = 10.0  # noise of the last layer's moments over that of all layers': the paper's sigma_stop
MAX_SIDE = 128
MIN_PER_CLASS = 4  # generated images of a class in a step
SNAPSHOT_BATCHES = 10  # of images, on which the distance of a snapshot is measured
SCATTERING = "scattering"
PIXEL, FIRST_ORDER, SECOND_ORDER = 0.25, 3.0, 10.0  # relative weights for `scattering`
SHIPPED_ENCODERS = {1: "small_cifar10", 3: "small_tinyimagenet"}  # by number of channels
TYPICAL_SIZES = (1_000, 10_000, 100_000)  # for the explanation of a plan, where sizes are not declared
CONFIDENCE = 0.95


@dataclass(kw_only=True, eq=False)
class PerceptualEmbedding(GeneratorMethod):
    """Noisy moments of a public network's activations, matched by a conditional generator.

    - encoder: text; name, path or checksum as `load_perceptual` takes it; `auto` (default), a network of this package;
      `scattering`, pixels and wavelet coefficients, without training data.
    - layers: `balanced` (default), all layers have equal weight; `paper`, each has the weight of its activations.
    - moments: 1 or 2 (default; means and squares).
    - early_stopping: bool, True; keep the snapshot of the generator that is nearest to the last layer's part of
      `moments`.
    - loss: `square` (default), the squared distance, unbiased in the batch; `moving`, along a moving average of the
      difference (GFMN).
    - steps: int, 3000; training steps of the generator.
    - batch_size: int, 300; generated images in a step.

    Presets: `cpu`; `paper`, the authors' layers, loss and generator.
    """

    key: ClassVar[str] = "dp-mepf"
    paper: ClassVar[str] = "Harder et al., TMLR 2023"
    summary: ClassVar[str] = "match noisy mean embeddings in the activations of a public network"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"encoder": SCATTERING, "steps": 1500, "batch_size": 100},
        "paper": {"layers": "paper", "loss": "moving", "generator": GeneratorSizes("mepf", 90, 500, 16)},
    }

    encoder: str = "auto"
    layers: Literal["balanced", "paper"] = "balanced"
    moments: Literal[1, 2] = 2
    early_stopping: bool = True
    loss: Literal["square", "moving"] = "square"
    steps: int = 3000
    batch_size: int = 300
    generator: GeneratorSizes = constant(GeneratorSizes("residual"))
    snapshots: int = constant(10)  # of the generator, for early stopping
    learning_rate: float = constant(2e-3)
    moving_rate: float = constant(1e-4)  # learning rate of the moving average
    ema: float = constant(0.99)

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape[1:]) > MAX_SIDE:
            raise DataError(f"dp-mepf takes images of up to {MAX_SIDE} pixels a side; pass a smaller size (--size 64)")
        return [*counts_release(public, self._bound), Release("moments", nonnegative=True)]

    @property
    def _bound(self) -> float:
        """Return the norm of a row; each moment has norm one."""
        return math.sqrt(self.moments * (1 + self.early_stopping / STOPPING_NOISE**2))

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return {"encoder": self._embedding(public).facts}

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:
        found: dict[str, tuple[Any, str] | None] = {}
        if self.encoder == "auto":
            found["encoder"] = SHIPPED_ENCODERS[public.shape[0]], "by the number of channels"
        off = {"layers": self.encoder == SCATTERING, "snapshots": not self.early_stopping}
        off["moving_rate"] = self.loss == "square"
        return found | dict.fromkeys(name for name in off if off[name])

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        embedding = self._embedding(public)
        check_public_files(vault, {"encoder": embedding.facts})
        self.counts_ = class_counts(vault, public)
        total, shares = self.counts_.sum(), (self.counts_ / self.counts_.sum())[:, None]
        rows = partial(embedding.rows, powers=self._powers, pooled=self.early_stopping)
        sums = vault.sum(rows, release="moments", bound=self._bound, by_class=True) / total
        means = [sums[:, embedding.dimension * place :][:, : embedding.dimension] for place in range(self.moments)]
        stopping: EarlyStopping | None = None
        if self.early_stopping:
            last = sums[:, embedding.dimension * self.moments :] * STOPPING_NOISE
            stopping = EarlyStopping(partial(embedding.pooled, powers=self._powers), last, shares)
        self._fit_generator(public, embedding, means, shares, stopping)

    def _fit_generator(
        self,
        public: PublicFacts,
        embedding: Embedding,
        means: list[torch.Tensor],
        shares: torch.Tensor,
        stopping: EarlyStopping | None,
    ) -> None:
        each = max(MIN_PER_CLASS, self.batch_size // len(public.classes))
        matching = MomentMatching(means, shares, self.moving_rate if self.loss == "moving" else None)

        def loss(images: torch.Tensor) -> torch.Tensor:
            maps = embedding.network(images)
            return matching(class_means(maps, len(public.classes), self.moments, embedding.balanced), each)

        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        network = self._new_generator(public)
        training = GeneratorTraining(network, public, generator, each=each, ema=self.ema, latent=self.generator.latent)
        descend = Graph(lambda _, latent: training.trainer.descend(loss(training.images(latent))))
        due = {self.steps * number // self.snapshots for number in range(1, self.snapshots + 1)}
        parts: dict[str, Any] = {"training": training, "matching": matching}
        if stopping:
            parts["stopping"] = stopping.begin(training)
        for step in self._checkpoints.loop("generator", self.steps, **parts):
            training.trainer.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            descend(NoBundle(), training.latent())
            if stopping and step + 1 in due:
                stopping.measure(training, step + 1)
        self.generator_ = stopping.best(training) if stopping else training.averaged()

    @property
    def _powers(self) -> range:
        return range(1, self.moments + 1)

    def _embedding(self, public: PublicFacts) -> Embedding:
        """Return the chosen encoder. Raise `DataError` if there is none."""
        if self.encoder == SCATTERING:
            return _scattering(public.shape, self.torch_device)
        name = SHIPPED_ENCODERS[public.shape[0]] if self.encoder == "auto" else self.encoder
        precision = torch.bfloat16 if self.torch_device.type == "cuda" else torch.float32
        encoder = load_perceptual(name, self.torch_device, precision)
        return Embedding(encoder, encoder.dimension(public.shape), encoder.facts, self.layers == "balanced")

    def explain_plan(self, public: PublicFacts) -> list[str]:
        """Return Propositions 4.1 to 4.3, in their finite form (appendix A), for declared or typical sizes."""
        used = self._resolved(public)
        noise, dimension = self.plan(public)["moments"].noise * used._bound, used._embedding(public).dimension
        coordinates = used.moments * len(public.classes) * dimension
        lines = [
            f"noise moves {coordinates:,} coordinates of the mean embedding by {noise:.4g} / m each, for m images; "
            f"squared distances (MMD²) are at most {2 * used.moments}"
        ]
        for m in (sum(public.sizes),) if public.sizes else TYPICAL_SIZES:
            expected, at_worst, at_best = shift_bounds(noise / m, coordinates, used.moments)
            lines.append(
                f"m = {m:,}: MMD² of a generator shifts by {expected:.3g} at most on average (Prop. 4.1); with "
                f"probability {CONFIDENCE:g} the best generator under noise is worse by {at_worst:.3g} at most (4.2), "
                f"by {at_best:.3g} if a perfect one exists (4.3)"
            )
        return lines


@dataclass(frozen=True)
class Embedding:
    """An encoder: images in [-1, 1] to maps [N, c, h, w] without negative entries.

    - dimension: number of all entries.
    - facts: for the certificate.
    - balanced: each map is divided by its own norm and all by the root of their number; else all by their joint norm.
    """

    network: Callable[[torch.Tensor], list[torch.Tensor]]
    dimension: int
    facts: dict[str, Any]
    balanced: bool

    def rows(self, images: torch.Tensor, powers: range, pooled: bool) -> torch.Tensor:
        """Return phi_1 and phi_2, each of norm one (or zero), then a tenth of those of the last map's means."""
        maps = self.network(images)
        parts = [moment(maps, power, self.balanced) for power in powers]
        return torch.cat([*parts, _pooled(maps, powers) / STOPPING_NOISE] if pooled else parts, 1)

    def pooled(self, images: torch.Tensor, powers: range) -> torch.Tensor:
        """Return the moments of the last map's means, concatenated."""
        return _pooled(self.network(images), powers)


class MomentMatching:
    """The squared distance between wanted and generated means, over moments, as a loss.

    With a `rate`, the loss of GFMN: a vector `a` follows the difference, by Adam on their mean squared error, and the
    generator descends on <a, difference>. One batch gives a noisy difference; `a` averages many.
    """

    def __init__(self, wanted: list[torch.Tensor], shares: torch.Tensor, rate: float | None) -> None:
        self._wanted, self._shares = wanted, shares
        self._average = [torch.zeros_like(mean) for mean in wanted if rate]
        on_gpu = shares.device.type == "cuda"
        self._adam = torch.optim.Adam(self._average, rate, betas=(0.5, 0.999), capturable=on_gpu) if rate else None

    def state_parts(self) -> dict[str, Any]:
        """Return what a step changes, for checkpoints."""
        return {} if self._adam is None else {"average": self._average, "adam": self._adam}

    def __call__(self, made: list[torch.Tensor], count: int) -> torch.Tensor:
        """Return the loss of means `made` for each moment, [classes, features], over `count` images of each class."""
        means = [self._shares * mean for mean in made]
        if self._adam is None:
            return torch.stack([distance(m, w, count) for m, w in zip(means, self._wanted, strict=True)]).sum()
        differences = [wanted - mean for wanted, mean in zip(self._wanted, means, strict=True)]
        for a, difference in zip(self._average, differences, strict=True):
            a.grad = 2 * (a - difference.detach()) / a.shape[1]
        self._adam.step()
        return torch.stack([(a * d).sum() for a, d in zip(self._average, differences, strict=True)]).sum()


class EarlyStopping:
    """Keeps the snapshot of a generator whose pooled moments are nearest to the released ones."""

    def __init__(
        self, pooled: Callable[[torch.Tensor], torch.Tensor], wanted: torch.Tensor, shares: torch.Tensor
    ) -> None:
        self._pooled, self._wanted, self._shares = pooled, wanted, shares
        self.distances: dict[int, float] = {}  # by step
        self._best: dict[str, torch.Tensor] = {}
        self._least = torch.full((), math.inf)

    def begin(self, training: GeneratorTraining) -> EarlyStopping:
        """Allocate a snapshot, so that a checkpoint can be read into it. Return self."""
        self._best = {name: value.clone() for name, value in training.average.state_dict().items()}
        return self

    def state_parts(self) -> dict[str, Any]:
        """Return what `measure` changes, for checkpoints."""
        return {"least": self._least, "best": list(self._best.values())}

    def measure(self, training: GeneratorTraining, step: int) -> None:
        """Measure the EMA network and keep it if it is the nearest so far."""
        network = training.averaged()
        rows = torch.cat([self._by_class(training.average_images()) for _ in range(SNAPSHOT_BATCHES)], 1)
        found = float(distance(self._shares * rows.mean(1), self._wanted, rows.shape[1]).nan_to_num(nan=math.inf))
        if found <= float(self._least):
            self._best = {name: value.clone() for name, value in network.state_dict().items()}
            self._least.fill_(found)
        self.distances[step] = found

    def best(self, training: GeneratorTraining) -> nn.Module:
        training.average.load_state_dict(self._best)
        return training.average

    def _by_class(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = self._pooled(images)
        return rows.view(len(self._shares), -1, rows.shape[1])


def distance(made: torch.Tensor, wanted: torch.Tensor, count: int) -> torch.Tensor:
    """Return |wanted - made|², up to a constant, for `made` a mean over `count` rows of equal norm.

    The square of a mean is biased by its variance; as rows have equal norms, count / (count - 1) corrects it.
    """
    return (count / (count - 1) * made.square() - 2 * made * wanted).sum()


def shift_bounds(noise: float, coordinates: int, moments: int) -> tuple[float, float, float]:
    """Return how far noise n ~ N(0, noise² I) on the mean embedding moves MMD²: Propositions A.1, A.4 and A.5.

    The expected shift for any one generator; with probability `CONFIDENCE`, by how much the generator that is best
    under noise is worse than the best; the same if the best is perfect. Rows have norm sqrt(moments) and no negative
    entry, so an MMD is at most sqrt(2 moments). One bound on |n|², Eq. 14, serves the last two.
    """
    largest, tail = math.sqrt(2 * moments), -math.log(1 - CONFIDENCE)
    square = noise**2 * (coordinates + 2 * math.sqrt(coordinates * tail) + 2 * tail)
    expected = noise**2 * coordinates + 2 * math.sqrt(2 / math.pi) * noise * largest
    at_worst = min(2 * (square + 2 * largest * math.sqrt(square)), 2.0 * moments)
    return expected, at_worst, min(9 * square, at_worst)


def _pooled(maps: list[torch.Tensor], powers: range) -> torch.Tensor:
    last = maps[-1].float().mean((2, 3), keepdim=True)
    return torch.cat([moment([last], power, False) for power in powers], 1)


def _scattering(shape: tuple[int, int, int], device: torch.device) -> Embedding:
    """Return light and dark pixels and the scattering moduli of both orders, with weights that balance their norms.

    The transform's own low-pass would be negative for dark places. Two parts, x and 1 - x of pixels in [0, 1], keep
    the brightness and are not. Negative ripples of the sub-sampled filters are cut off.
    """
    channels, height, width = shape
    transform = Scattering((height, width)).to(device)
    first = transform.scales * transform.angles  # channels of the first order; the others are of the second
    weights = torch.full((transform.channels - 1, 1, 1), SECOND_ORDER, device=device)
    weights[:first] = FIRST_ORDER

    def maps(images: torch.Tensor) -> list[torch.Tensor]:
        light = (images + 1) / 2
        moduli = weights * transform(light)[:, :, 1:].clamp_min(0)
        return [PIXEL * light, PIXEL * (1 - light), moduli.flatten(1, 2)]

    dimension = channels * (2 * height * width + (transform.channels - 1) * (height // 4) * (width // 4))
    facts = {"name": SCATTERING, "network": "pixels and wavelet scattering, J = 2, L = 8", "trained_on": "nothing"}
    return Embedding(maps, dimension, facts, balanced=False)
