"""DP-MEPF: mean embeddings of perceptual features (Harder, Jalali Asadabadi, Sutherland, Park; TMLR 2023).

The idea: what a public network sees in images, all of its activations, describes them better than random features of
pixels. Release the noisy means of these activations, and of their squares, once for each class; fit a generator whose
images have the same means. Everything after the release is post-processing.

Released, once: the sums over each class of phi_1, all activations divided by their norm, and of phi_2, their squares
divided by theirs (Eq. 5 and 6); with `stopping`, of the same for the last layer alone, pooled, at ten times the noise
(section 3.2); noisy class counts unless sizes are declared public. The moments are one row, with a tenth of the pooled
ones at its end: the privacy of that is what the parts would cost as releases of their own, in one pass over the images.
Public: image shape, class names; the encoder, whose checksum and training data the certificate names. Or the encoder
learns from the private images (`encoder="dp"`); then the gradients of its loss are released, too.
Events: one Gaussian release on all the data, and that of the counts, composed exactly; classes are blocks of a vector;
for `dp`, gradients over Poisson samples.
No entry of a row is negative, so that replacing an image moves a sum by sqrt(2) times its bound, not by the paper's 2.

All classes are divided by the same number m of images, as in Eq. 6, and a class's generated mean is multiplied by its
share of m. That is the kernel distance between images with labels; and as the noise is the same in all sums, it weighs
each class by how well its mean is known, where means of their own would let the noise of a rare class speak loudest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.encoders import load_perceptual
from sfumato.encoders.private import FACTS, PrivateEncoder
from sfumato.encoders.scattering import Scattering
from sfumato.engine import Vault
from sfumato.methods.generating import GeneratorMethod, Training, warm_cosine
from sfumato.nets.graph import Graph
from sfumato.nets.moments import class_means, moment
from sfumato.privacy import Release

COUNTS_WEIGHT = 4.0  # noise of the counts over that of a moment
STOPPING = 10.0  # noise of the last layer's moments over that of all layers': the paper's sigma_stop
LARGEST_SIDE = 128
LEAST_PER_CLASS = 4  # generated images of a class in a step
SNAPSHOT_BATCHES = 10  # of images, on which the distance of a snapshot is measured
LOSSES = ("square", "moving")
LAYERS = ("balanced", "paper")
NO_WEIGHTS, PRIVATE = "scattering", "dp"
ENCODER_SAMPLING = 0.1  # part of the images in a gradient of a private encoder
PIXEL, FIRST_ORDER, SECOND_ORDER = 0.25, 3.0, 10.0  # weights beside each other, for `scattering`
ENCODERS = {1: "small_cifar10", 3: "small_tinyimagenet"}  # by colours
TYPICAL = (1_000, 10_000, 100_000)  # images, where nobody says how many there are
CONFIDENCE = 0.95


@dataclass(kw_only=True, eq=False)
class PerceptualEmbedding(GeneratorMethod):
    """Noisy moments of a public network's activations, matched by a conditional generator.

    encoder: a name, path or checksum as `load_perceptual` takes it; `auto`, one that this package brings; `scattering`,
    pixels and wavelet coefficients, which nobody trained; `dp`, one that learns from the private images, by
    `encoder_steps` noisy gradients for `encoder_share` of the budget. layers: `balanced`, all of a network's layers
    weigh the same; `paper`, each by its activations, of which the first layers have most. tones: so many levels of
    brightness, by pixel and colour, are a further layer, which says how light an image is where. moments: 1, or 2 with
    squares. stopping: keep the snapshot of the generator, out of `snapshots`, that is nearest to another
    release. loss: `square`, the distance itself, unbiased in the batch; `moving`, along a moving average of the
    difference (GFMN) with rate `moving_rate`.
    steps, batch_size, learning_rate, ema: of the generator.
    """

    key: ClassVar[str] = "dp-mepf"
    paper: ClassVar[str] = "Harder et al., TMLR 2023"
    summary: ClassVar[str] = "noisy mean embeddings in a public network's activations, matched by a generator"
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed", "tones"})
    on_cpu: ClassVar[dict[str, Any]] = {"encoder": "scattering", "steps": 1500, "batch_size": 100}

    encoder: str = "auto"
    encoder_share: float = 0.5
    encoder_steps: int = 200
    layers: str = "balanced"
    tones: int = 0
    moments: int = 2
    stopping: bool = True
    snapshots: int = 10
    loss: str = "square"
    steps: int = 3000
    batch_size: int = 300
    learning_rate: float = 2e-3
    moving_rate: float = 1e-4
    network: str = "residual"
    ema: float = 0.99

    def validate(self) -> Self:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.layers not in LAYERS:
            raise ValueError(f"layers must be one of {', '.join(LAYERS)}, got {self.layers!r}")
        if self.encoder_steps < 2:
            raise ValueError(f"encoder_steps must be at least 2, got {self.encoder_steps}")
        if not self.encoder_share < 1:
            raise ValueError(f"encoder_share must lie between 0 and 1, got {self.encoder_share!r}")
        if self.tones and (self.tones < 2 or self.layers != "balanced" or self.encoder == NO_WEIGHTS):
            raise ValueError("tones must be 0, or at least 2 beside a network's balanced layers")
        if self.moments not in (1, 2):
            raise ValueError(f"moments must be 1 or 2, got {self.moments!r}")
        return super().validate()

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape[1:]) > LARGEST_SIDE:
            raise DataError(
                f"dp-mepf is for images of up to {LARGEST_SIDE} pixels a side; pass a smaller size (--size 64)"
            )
        counts = [] if public.sizes else [Release("counts", weight=COUNTS_WEIGHT * self._bound, nonnegative=True)]
        return [*counts, *self._lessons(public), Release("moments", nonnegative=True)]

    def _lessons(self, public: PublicFacts) -> list[Release]:
        """What a private encoder learns from."""
        if self.encoder != PRIVATE:
            return []
        if len(public.classes) < 2:
            raise DataError("encoder 'dp' learns to tell classes apart, and there are none; choose another encoder")
        share, times = self.encoder_share, self.encoder_steps
        weight = ENCODER_SAMPLING * math.sqrt(times * (1 - share) / share)
        return [Release("encoder", times, ENCODER_SAMPLING, weight=weight)]

    @property
    def _bound(self) -> float:
        """Norm of a row: a moment has norm one."""
        return math.sqrt(self.moments * (1 + self.stopping / STOPPING**2))

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return {"encoder": self._embedding(public).facts}

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        embedding = self._embedding(public)
        self._confirm(vault, embedding.facts)
        counts = torch.tensor(public.sizes, device=self.torch_device) if public.sizes else vault.counts()
        self.counts_ = counts.float().clamp_min(1)
        total, shares = self.counts_.sum(), (self.counts_ / self.counts_.sum())[:, None]
        if isinstance(embedding.network, PrivateEncoder):
            embedding.network.learn(vault, vault.plan["encoder"], float(total), self._checkpoints.loop)
        rows = partial(embedding.rows, powers=self._powers, stopping=self.stopping)
        sums = vault.sum(rows, release="moments", bound=self._bound, by_class=True) / total
        means = [sums[:, embedding.dimension * place :][:, : embedding.dimension] for place in range(self.moments)]
        nearest: Nearest | None = None
        if self.stopping:
            last = sums[:, embedding.dimension * self.moments :] * STOPPING
            nearest = Nearest(partial(embedding.pooled, powers=self._powers), last, shares)
        self._fit_generator(public, embedding, means, shares, nearest)

    def _fit_generator(
        self,
        public: PublicFacts,
        embedding: Embedding,
        means: list[torch.Tensor],
        shares: torch.Tensor,
        nearest: Nearest | None,
    ) -> None:
        each = max(LEAST_PER_CLASS, self.batch_size // len(public.classes))
        matching = Matching(means, shares, self.moving_rate if self.loss == "moving" else None)

        def loss(images: torch.Tensor) -> torch.Tensor:
            maps = embedding.maps(images)
            return matching(class_means(maps, len(public.classes), self.moments, embedding.balanced), each)

        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        training = Training(self, public, generator, each=each, ema=self.ema)
        descend = Graph(lambda latent: training.descend(loss(training.images(latent))))
        due = {self.steps * number // self.snapshots for number in range(1, self.snapshots + 1)}
        parts: dict[str, Any] = {"training": training, "matching": matching}
        if nearest:
            parts["nearest"] = nearest.begin(training)
        for step in self._checkpoints.loop("generator", self.steps, **parts):
            training.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            descend(training.latent())
            if nearest and step + 1 in due:
                nearest.look(training, step + 1)
        self.generator_ = nearest.chosen(training) if nearest else training.averaged()

    @property
    def _powers(self) -> range:
        return range(1, self.moments + 1)

    def _embedding(self, public: PublicFacts) -> Embedding:
        """The encoder that is asked for; raises `DataError` where there is none."""
        if self.encoder == NO_WEIGHTS:
            return _scattering(public.shape, self.torch_device)
        balanced, further = self.layers == "balanced", self.tones * math.prod(public.shape)
        if self.encoder == PRIVATE:
            network = PrivateEncoder(public.shape, len(public.classes), self.seed).to(self.torch_device)
            return Embedding(network, network.dimension(public.shape) + further, FACTS, balanced, self.tones)
        name = ENCODERS[public.shape[0]] if self.encoder == "auto" else self.encoder
        precision = torch.bfloat16 if self.torch_device.type == "cuda" else torch.float32
        encoder = load_perceptual(name, self.torch_device, precision)
        return Embedding(encoder, encoder.dimension(public.shape) + further, encoder.facts, balanced, self.tones)

    # -- what the noise does --------------------------------------------------------------------------------------

    def explain_plan(self, public: PublicFacts) -> list[str]:
        """Propositions 4.1 to 4.3, in their finite form (appendix A), for as many images as are declared or typical."""
        noise, dimension = self.plan(public)["moments"].noise * self._bound, self._embedding(public).dimension
        coordinates = self.moments * len(public.classes) * dimension
        lines = [
            f"noise moves {coordinates:,} coordinates of the mean embedding by {noise:.4g} / m each, for m images; "
            f"squared distances (MMD²) are at most {2 * self.moments}"
        ]
        for m in (sum(public.sizes),) if public.sizes else TYPICAL:
            expected, anyhow, at_best = shift_bounds(noise / m, coordinates, self.moments)
            lines.append(
                f"m = {m:,}: MMD² of a generator shifts by {expected:.3g} at most on average (Prop. 4.1); with "
                f"probability {CONFIDENCE:g} the best generator under noise is worse by {anyhow:.3g} at most (4.2), by "
                f"{at_best:.3g} if a perfect one exists (4.3)"
            )
        return lines


@dataclass(frozen=True)
class Embedding:
    """An encoder: images in [-1, 1] to maps [N, c, h, w] without negative entries; how many numbers; what it is.

    balanced: each map is divided by its own norm, and all by the root of their number; or all by the norm of them all.
    tones: levels of brightness that are a map before the network's.
    """

    network: Callable[[torch.Tensor], list[torch.Tensor]]
    dimension: int
    facts: dict[str, Any]
    balanced: bool
    tones: int = 0

    def maps(self, images: torch.Tensor) -> list[torch.Tensor]:
        seen = self.network(images)
        return [tones(images, self.tones).to(seen[0]), *seen] if self.tones else seen

    def rows(self, images: torch.Tensor, powers: range, stopping: bool) -> torch.Tensor:
        """phi_1, and phi_2, each of norm one (or zero); then a tenth of those of the last map's means."""
        maps = self.maps(images)
        parts = [moment(maps, power, self.balanced) for power in powers]
        return torch.cat([*parts, _pooled(maps, powers) / STOPPING] if stopping else parts, 1)

    def pooled(self, images: torch.Tensor, powers: range) -> torch.Tensor:
        """Moments of the last map's means, side by side."""
        return _pooled(self.maps(images), powers)


class Matching:
    """The squared distance between means that are wanted and generated ones, over moments, as a loss.

    With a `rate`, the loss of GFMN: a vector `a` follows the difference, by Adam on their mean squared error, and the
    generator goes down <a, difference>. What one batch says of the difference is noise; `a` remembers many.
    """

    def __init__(self, wanted: list[torch.Tensor], shares: torch.Tensor, rate: float | None) -> None:
        self._wanted, self._shares = wanted, shares
        self._follow = [torch.zeros_like(mean) for mean in wanted if rate]
        on_gpu = shares.device.type == "cuda"
        self._adam = torch.optim.Adam(self._follow, rate, betas=(0.5, 0.999), capturable=on_gpu) if rate else None

    def state_parts(self) -> dict[str, Any]:
        """What a step changes, for checkpoints."""
        return {} if self._adam is None else {"follow": self._follow, "adam": self._adam}

    def __call__(self, made: list[torch.Tensor], count: int) -> torch.Tensor:
        """`made`: means for each moment, [classes, features], over `count` images of each class."""
        means = [self._shares * mean for mean in made]
        if self._adam is None:
            return torch.stack([distance(m, w, count) for m, w in zip(means, self._wanted, strict=True)]).sum()
        differences = [wanted - mean for wanted, mean in zip(self._wanted, means, strict=True)]
        for a, difference in zip(self._follow, differences, strict=True):
            a.grad = 2 * (a - difference.detach()) / a.shape[1]
        self._adam.step()
        return torch.stack([(a * d).sum() for a, d in zip(self._follow, differences, strict=True)]).sum()


class Nearest:
    """Keeps the snapshot of a generator whose pooled moments are nearest to the released ones."""

    def __init__(
        self, pooled: Callable[[torch.Tensor], torch.Tensor], wanted: torch.Tensor, shares: torch.Tensor
    ) -> None:
        self._pooled, self._wanted, self._shares = pooled, wanted, shares
        self.distances: dict[int, float] = {}  # by step
        self._best: dict[str, torch.Tensor] = {}
        self._least = torch.full((), math.inf)

    def begin(self, training: Training) -> Nearest:
        """Make room for a snapshot, so that a checkpoint can be read into it."""
        self._best = {name: value.clone() for name, value in training.average.state_dict().items()}
        return self

    def state_parts(self) -> dict[str, Any]:
        """What `look` changes, for checkpoints."""
        return {"least": self._least, "best": list(self._best.values())}

    def look(self, training: Training, step: int) -> None:
        """Measures the average of the weights as it is now."""
        network = training.averaged()
        rows = torch.cat([self._by_class(training.average_images()) for _ in range(SNAPSHOT_BATCHES)], 1)
        found = float(distance(self._shares * rows.mean(1), self._wanted, rows.shape[1]).nan_to_num(nan=math.inf))
        if found <= float(self._least):
            self._best = {name: value.clone() for name, value in network.state_dict().items()}
            self._least.fill_(found)
        self.distances[step] = found

    def chosen(self, training: Training) -> nn.Module:
        training.average.load_state_dict(self._best)
        return training.average

    def _by_class(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = self._pooled(images)
        return rows.view(len(self._shares), -1, rows.shape[1])


def distance(made: torch.Tensor, wanted: torch.Tensor, count: int) -> torch.Tensor:
    """|wanted - made|², less what does not depend on `made`, a mean over `count` rows of one norm.

    The square of a mean is biased by its variance; as the norm of a row is constant, count / (count - 1) undoes that.
    """
    return (count / (count - 1) * made.square() - 2 * made * wanted).sum()


def tones(images: torch.Tensor, count: int) -> torch.Tensor:
    """How near each pixel is to each of `count` levels from black to white: 1 at a level, 0 at the next; a sum of 1."""
    levels = torch.linspace(-1, 1, count, device=images.device).view(-1, 1, 1)
    near = 1 - (images[:, :, None].clamp(-1, 1) - levels).abs() * (count - 1) / 2
    return near.clamp_min(0).flatten(1, 2)


def shift_bounds(noise: float, coordinates: int, moments: int) -> tuple[float, float, float]:
    """How far noise n ~ N(0, noise² I) on the mean embedding moves MMD²: Propositions A.1, A.4 and A.5.

    The expected shift of any one generator's; with probability `CONFIDENCE`, by how much the generator that is best
    under noise is worse than the best; the same if that one is perfect. Rows have norm sqrt(moments) and no negative
    entry, so that an MMD is at most sqrt(2 moments), and nothing is worse than that. One bound on |n|², Eq. 14, serves
    the last two.
    """
    largest, tail = math.sqrt(2 * moments), -math.log(1 - CONFIDENCE)
    square = noise**2 * (coordinates + 2 * math.sqrt(coordinates * tail) + 2 * tail)
    expected = noise**2 * coordinates + 2 * math.sqrt(2 / math.pi) * noise * largest
    anyhow = min(2 * (square + 2 * largest * math.sqrt(square)), 2.0 * moments)
    return expected, anyhow, min(9 * square, anyhow)


def _pooled(maps: list[torch.Tensor], powers: range) -> torch.Tensor:
    last = maps[-1].float().mean((2, 3), keepdim=True)
    return torch.cat([moment([last], power, False) for power in powers], 1)


def _scattering(shape: tuple[int, int, int], device: torch.device) -> Embedding:
    """Light and dark pixels, then the moduli of both orders, with weights that make them about as long.

    The transform's own low-pass would be negative for dark places, and free of brightness once divided by its norm if
    black were zero: two parts, x and 1 - x of pixels in [0, 1], are neither. What a sub-sampled filter ripples below
    zero is cut off.
    """
    channels, height, width = shape
    transform = Scattering((height, width)).to(device)
    first = transform.scales * transform.angles  # so many of the first order, the others of the second
    weights = torch.full((transform.channels - 1, 1, 1), SECOND_ORDER, device=device)
    weights[:first] = FIRST_ORDER

    def maps(images: torch.Tensor) -> list[torch.Tensor]:
        light = (images + 1) / 2
        moduli = weights * transform(light)[:, :, 1:].clamp_min(0)
        return [PIXEL * light, PIXEL * (1 - light), moduli.flatten(1, 2)]

    dimension = channels * (2 * height * width + (transform.channels - 1) * (height // 4) * (width // 4))
    facts = {"name": NO_WEIGHTS, "network": "pixels and wavelet scattering, J = 2, L = 8", "trained_on": "nothing"}
    return Embedding(maps, dimension, facts, balanced=False)
