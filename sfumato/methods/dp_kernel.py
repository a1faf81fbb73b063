"""DP-kernel: a generator trained on a noisy function ("Functional Rényi Differential Privacy for Generative Modeling").

The idea: the mean of k(x, .) over a class is a function that says how like the class a point is. Release it with the
noise of a Gaussian process, and let a generator climb it while its images keep apart: that minimises the kernel
distance (MMD) to the private images.

Released: the noisy class sums of random Fourier features, once for each of a few `paths`; such a sum is a whole noisy
path of the function (`functional/release.py` has the proof), so that its derivatives are post-processing, and so is
every step of the training. With `common_share`, the same sums over all classes beside. Noisy class counts unless sizes
are declared.
Public: image shape, class names; frequencies and initial weights, from the user's seed; networks named in `encoder`
and `autoencoder`.
Events: Gaussian sums over all the images (or Poisson samples of them); classes are blocks of one vector.

What is ours: the kernels. Frequencies look through windows, so that parts of images are learned from all that share
them. The first path is on pixels and wavelet scattering coefficients. Each later one is on the features of a network
that is taught, without any private image, to tell the classes of what the generator makes by then: what classifiers
look at, the generator learns to get right. The generator follows all paths at once. Large images are painted as the
maps of a public autoencoder: what is said of pixels then holds for these, and scattering, which is for images, is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional

from sfumato.data import DataError, PublicFacts
from sfumato.encoders import Perceptual, load_perceptual
from sfumato.encoders import autoencoder as autoencoders
from sfumato.encoders.autoencoder import REACH, load_autoencoder, maps_shape
from sfumato.engine import Vault, calibrate
from sfumato.functional import Frequencies, Gaussian, Part, Points, Windowed
from sfumato.methods.generating import GeneratorMethod, Latent, Training, warm_cosine
from sfumato.methods.seeing import Encoded, Maps, Taught, Vectors, scaled_maps, untaught
from sfumato.nets.graph import Graph
from sfumato.privacy import Release

COUNTS_WEIGHT = 4.0  # noise of the counts over that of all sums together
LARGEST_SIDE = 64  # of what is painted: larger images go through an autoencoder
LEAST_SIDE = 4  # of an autoencoder's maps
ASSUMED = 30_000  # images, where nobody says how many there are
INDUCING = 200  # points of the one-shot form
NEAR = 4  # images per class whose derivatives the exact form releases in a step
CALMER = 0.7  # times the learning rate, from path to path
EVEN = 1e-2  # a slope that is none
PIXEL_NORM, CORRELATION_LENGTH = math.sqrt(0.35), 0.25  # the public model of images: norm of the vector; in sides
VARIANTS = ("conditional", "parallel")
FORMS = ("pathwise", "gp", "nystrom", "published")
PUBLISHED_BANDWIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0)
PUBLISHED_BATCH = 60
LEAK = (
    "the noise never reaches the gradient: training differentiates the exact mean of k(x, .), of which only values are "
    "noised. The update's direction is that of the un-noised gradient, at every noise level; no finite epsilon holds"
)


@dataclass(kw_only=True, eq=False)
class KernelGenerator(GeneratorMethod):
    """A generator that follows a noisy function, step by step.

    form: `pathwise`, a few noisy functions that are known everywhere; `gp`, exact derivatives at a few generated images
    of each class, at each step (slow; the reference); `nystrom`, one release at public points; `published`, the paper's
    training, which is not private: its certificate says so.

    variant: one generator that knows all classes, or `parallel`, one for each. paths: releases of the pathwise form.
    pixels, scattering, taught: bandwidths of the Gaussian kernels on pixels, on scattering coefficients and on taught
    features, all of norm one (`gp` and `nystrom` take the first two as one vector, and the second's bandwidths).
    scattering_share: part of the first path's frequencies, the others are on pixels. encoder: a public network, as
    `load_perceptual` takes it, whose last maps are looked at by half of the first path's frequencies, with bandwidths
    as for taught features; none by default. autoencoder: `taef2`, to paint its maps in place of pixels; for images of
    more than 64 pixels a side. window: sizes of windows, in image sides. features: number of frequencies of a path;
    features_per_step: how many of each a step looks at. lessons: generated images that a network is taught on.
    common_share: part of the sums' budget for sums over all images, whatever their class: what images have in common
    is then known with much less noise than what sets a class apart. common_above: there is no such release where the
    noise of the whole budget, for each image of a class, is less than that. smoothness: what roughness (total
    variation) costs an image where the noise in a mean is as large as the mean can be, else in proportion to the
    noise's square: noise asks for specks. steps: in all. sampling_prob: q. network, latent, hidden, width, batch_size,
    learning_rate, ema: of the generator.
    """

    key: ClassVar[str] = "dp-kernel"
    paper: ClassVar[str] = "Functional Renyi Differential Privacy for Generative Modeling (Jiang et al., NeurIPS 2023)"
    summary: ClassVar[str] = "a generator that follows noisy kernel means of pixels, wavelets and taught features"
    may_be_zero: ClassVar[frozenset[str]] = frozenset(
        {"seed", "scattering_share", "common_share", "common_above", "smoothness"}
    )
    on_cpu: ClassVar[dict[str, Any]] = {
        "steps": 1800,
        "features_per_step": 500,
        "batch_size": 200,
        "scattering_share": 0.0,
    }

    form: str = "pathwise"
    variant: str = "conditional"
    paths: int = 3
    steps: int = 4500
    sampling_prob: float = 1.0
    features: int = 4000
    features_per_step: int = 1000
    pixels: tuple[float, float] = (0.2, 0.8)
    scattering: tuple[float, float] = (0.3, 1.0)
    taught: tuple[float, float] = (0.3, 1.0)
    scattering_share: float = 0.5
    encoder: str = ""
    autoencoder: str = ""
    window: tuple[float, float] = (0.05, 1.0)
    lessons: int = 12_000
    common_share: float = 0.0
    common_above: float = 0.0
    smoothness: float = 0.0
    batch_size: int = 600
    learning_rate: float = 5e-3
    ema: float = 0.99

    @property
    def claimed(self) -> dict[str, Any] | None:  # type: ignore[override]
        if self.form != "published" or not self._budget().private:
            return None
        return {"epsilon": self.epsilon, "delta": self.delta, "by": self.paper, "why": LEAK}

    @property
    def _protected(self) -> bool:
        return self.form != "published"

    def validate(self) -> Self:
        super().validate()
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        if self.encoder and self.form != "pathwise":
            raise ValueError(f"encoder is for the pathwise form, not for {self.form}")
        if self.autoencoder not in ("", *autoencoders.NAMES):
            raise ValueError(f"autoencoder must be one of {', '.join(autoencoders.NAMES)}, got {self.autoencoder!r}")
        if self.autoencoder and (self.encoder or self.form != "pathwise"):
            raise ValueError("autoencoder is for the pathwise form, and without encoder, which looks at images")
        if self.smoothness and (self.autoencoder or self.form != "pathwise"):
            raise ValueError("smoothness is for the pathwise form, and for images, not for an autoencoder's maps")
        if self.common_share and self.form != "pathwise":
            raise ValueError(f"common_share is for the pathwise form, not for {self.form}")
        if not self.common_share < 1:
            raise ValueError(f"common_share must be at least 0 and less than 1, got {self.common_share!r}")
        if not self.scattering_share <= 1:
            raise ValueError(f"scattering_share must lie between 0 and 1, got {self.scattering_share!r}")
        return self

    @property
    def _per_class(self) -> bool:
        return self.variant == "parallel"

    def _releases(self, public: PublicFacts) -> list[Release]:
        sides = self._canvas(public).shape[1:]
        if max(sides) > LARGEST_SIDE:
            raise DataError(
                f"{self.key} is for images of up to {LARGEST_SIDE} pixels a side, or eight times that with "
                "autoencoder='taef2'; pass a smaller size (--size)"
            )
        if self.autoencoder and min(sides) < LEAST_SIDE:
            raise DataError("the autoencoder's maps are an eighth of an image, here too small to paint; leave it out")
        if self.form == "published":
            return []
        times = {"pathwise": self._stages, "gp": self.steps, "nystrom": 1}[self.form]
        q = 1.0 if self.form == "nystrom" else self.sampling_prob
        weight = COUNTS_WEIGHT / (q * math.sqrt(times))
        counts = [] if public.sizes else [Release("counts", weight=weight, nonnegative=True)]
        share = self._common(public)
        common = [Release("common", times, q, weight=share**-0.5)] if share else []
        return [*counts, Release("sums", times, q, weight=(1 - share) ** -0.5), *common]

    def _common(self, public: PublicFacts) -> float:
        """`common_share`, or nothing: where noise is small, or where there is one class, and one release says all."""
        if len(public.classes) == 1 or not self.common_share:
            return 0.0
        loud = self.common_above == 0 or self._class_noise(public) >= self.common_above
        return self.common_share if loud else 0.0

    def _class_noise(self, public: PublicFacts) -> float:
        """Noise of a single release with the whole budget, for each image of a class."""
        return len(public.classes) * self._whole_noise(public)

    def _whole_noise(self, public: PublicFacts) -> float:
        """Noise of a single release with the whole budget, for each image: known from public facts."""
        return calibrate([Release("all")], self._budget()).releases[0].noise / (sum(public.sizes or ()) or ASSUMED)

    def _canvas(self, public: PublicFacts) -> PublicFacts:
        """The facts of what is painted: images, or an autoencoder's maps."""
        return replace(public, shape=maps_shape(public.shape)) if self.autoencoder else public

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        if self.autoencoder:
            network = load_autoencoder(self.torch_device)
            self._confirm(vault, network.facts, "autoencoder")
            vault = vault.map(lambda images: scaled_maps(network, images))
        self._learn(vault, self._canvas(public))

    def _learn(self, vault: Vault, public: PublicFacts) -> None:
        """Learns to paint; vault and facts are those of the canvas."""
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        training = Following(self, public, generator)
        if self.form == "published":
            self.counts_ = torch.ones(len(public.classes), device=self.torch_device)
            self._train_as_published(vault, training)
        else:
            counts = torch.tensor(public.sizes, device=self.torch_device) if public.sizes else vault.counts()
            self.counts_ = counts.float().clamp_min(1)
            trains = {"pathwise": self._train_pathwise, "gp": self._train_exactly, "nystrom": self._train_once}
            trains[self.form](vault, training)
        self.generator_ = training.averaged()

    # -- the sound forms --------------------------------------------------------------------------------------

    def _train_pathwise(self, vault: Vault, training: Following) -> None:
        """Release a path, follow all there are; again, on features taught by what that made."""
        expected, stages = (self.sampling_prob * self.counts_)[:, None], self._stages
        training.parts = expected / expected.sum()
        encoder = self._perceptual() if self.encoder else None
        if encoder is not None:
            self._confirm(vault, encoder.facts)
        noise = self._smoothing(vault.plan["sums"].noise / expected)
        starts = [-(-stage * self.steps // stages) for stage in range(stages + 1)]
        for stage in range(stages):
            training.add(*self._path(vault, training, stage, encoder, expected), noise)
            steps = starts[stage + 1] - starts[stage]
            for step in self._checkpoints.loop(f"generator {stage + 1}/{stages}", steps, training=training):
                place = ((starts[stage] + step) * stages - stage * self.steps) // stages
                training.set_rate(CALMER**stage * self.learning_rate * warm_cosine(place, self.steps // stages))
                training.follow(self.features_per_step)

    def _path(
        self, vault: Vault, training: Following, stage: int, encoder: Perceptual | None, expected: torch.Tensor
    ) -> tuple[Frequencies, torch.Tensor]:
        """Release a path: its features, and noisy class means in them; or read it from a checkpoint."""
        drawn: list[Frequencies] = []

        def make() -> dict[str, torch.Tensor]:
            network = training.taught(self.lessons) if self._looks_at_taught(training, stage) else None
            features = self._frequencies(training, network, encoder)
            drawn.append(features)
            sums = vault.sum(features, release="sums", bound=1.0, by_class=True)
            if training.share:
                sums = reconciled(sums, vault.sum(features, release="common", bound=1.0), training.share)
            held = {f"frequencies.{number}": part for number, part in enumerate(features.tensors())}
            held |= {} if network is None else {f"network.{name}": part for name, part in network.state_dict().items()}
            return {"means": sums / expected, "random": training.generator.get_state(), **held}

        saved = self._checkpoints.once(f"path {stage}", make)
        if not drawn:
            network = None
            if self._looks_at_taught(training, stage):
                network = untaught(training.shape, training.classes).to(self.torch_device)
                own = {name: part for name, part in saved.items() if name.startswith("network.")}
                network.load_state_dict({name.removeprefix("network."): part for name, part in own.items()})
            like = self._frequencies(training, network, encoder)
            count = len(like.tensors())
            drawn = [like.like([saved[f"frequencies.{number}"].to(self.torch_device) for number in range(count)])]
            training.generator.set_state(saved["random"])
        return drawn[0], saved["means"].to(self.torch_device)

    def _looks_at_taught(self, training: Following, stage: int) -> bool:
        return stage > 0 and training.classes > 1

    def _smoothing(self, noise: torch.Tensor) -> torch.Tensor:
        """What roughness costs, class by class: in proportion to the square of the noise in a mean, counted to 1."""
        return self.smoothness * (2 * self.features * noise.square()).clamp_max(1)

    @property
    def _stages(self) -> int:
        return min(self.paths, self.steps)

    def _frequencies(self, training: Following, taught: Maps | None, encoder: Perceptual | None) -> Frequencies:
        """Of a path: the first looks at pixels and scattering coefficients, others at what a network was taught."""
        vectors, like = training.vectors, torch.zeros(1, *training.shape, device=self.torch_device)
        if taught is not None:
            parts = [self._seen(taught, like)]
        else:
            share = 0.0 if self.autoencoder else self.scattering_share
            scattering = Windowed(vectors.maps, self.scattering, self.window)
            pixels = Windowed(training.shape, self.pixels, self.window, PIXEL_NORM, CORRELATION_LENGTH)
            parts = [
                Part(vectors.scattering, scattering, share),
                Part(vectors.pixels, pixels, 1 - share),
            ]
            if encoder is not None:
                parts.append(self._seen(Encoded(encoder, training.shape), like))
        return Frequencies([part for part in parts if part.weight > 0], self.features, like, training.generator)

    def _seen(self, maps: Maps, like: torch.Tensor) -> Part:
        """A kernel on what a network sees."""
        channels, height, width = maps.maps(like).shape[1:]
        return Part(maps, Windowed((channels, height, width), self.taught, self.window))

    def _perceptual(self) -> Perceptual:
        return load_perceptual(self.encoder, self.torch_device)

    def _facts(self, public: PublicFacts) -> dict[str, Any]:  # noqa: ARG002
        facts = {"encoder": self._perceptual().facts} if self.encoder else {}
        return {**facts, "autoencoder": load_autoencoder().facts} if self.autoencoder else facts

    def _train_exactly(self, vault: Vault, training: Following) -> None:
        """At each step the function's derivatives at some generated images, exact in their joint law."""
        kernel, classes = Gaussian(self.scattering), len(self.counts_)
        vault, expected = vault.map(training.vectors), self.sampling_prob * self.counts_
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            made = training.vectors(training.images(training.latent()))
            near = training.by_class(made)[:, :NEAR]
            points = [Points(kernel, some) for some in near.detach()]
            rows = _rows_by_class(points)  # traced at each step: the points' span, and so its shape, may change
            released = vault.sum(rows, release="sums", bound=1.0, by_class=True, with_labels=True)
            climb = torch.stack([points[c].coloured(released[c])[1] / expected[c] for c in range(classes)])
            towards = (climb.to(near.dtype) * near).sum() / NEAR
            self._descend(training, _crowding(kernel, training.by_class(made)) - towards, step)

    def _train_once(self, vault: Vault, training: Following) -> None:
        """One release of the function's values at public points; between them it is what the kernel makes of these."""
        kernel = Gaussian(self.scattering)
        with torch.no_grad():
            inducing = training.vectors(smooth_images(INDUCING, training.shape, training.generator))
        points = Points(kernel, inducing, derivatives=False)
        released = vault.map(training.vectors).sum(points.rows, release="sums", bound=1.0, by_class=True)
        weights = torch.stack([points.interpolation(row) for row in released]).float() / self.counts_[:, None]
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            made = training.by_class(training.vectors(training.images(training.latent())))
            values = (kernel(made.flatten(0, 1), inducing).unflatten(0, made.shape[:2]) * weights[:, None]).sum(2)
            self._descend(training, _crowding(kernel, made) - values.mean(1).sum(), step)

    def _descend(self, training: Following, loss: torch.Tensor, step: int) -> None:
        training.set_rate(self.learning_rate * warm_cosine(step, self.steps))
        training.descend(loss)

    # -- samples ----------------------------------------------------------------------------------------------

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        painted = self._paint(labels, generator)
        if not self.autoencoder:
            return painted
        return load_autoencoder(self.torch_device).decode(REACH * painted, self._fitted().shape)

    def _paint(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """What the generator makes: images, or an autoencoder's maps."""
        return super()._sample(labels, generator)

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        super()._restore(self._canvas(public), state)

    # -- as published -----------------------------------------------------------------------------------------

    def _train_as_published(self, vault: Vault, training: Following) -> None:
        """The paper's loop, for comparison: Poisson batches, noise on values, gradients through the exact function."""
        images, labels = vault.unprotected(f"as published: {LEAK}")
        pixels = images.float() / 127.5 - 1
        labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        q = min(1.0, PUBLISHED_BATCH / max(len(images), 1))
        noise = 0.0
        if self._budget().private:
            noise = calibrate([Release("claimed", self.steps, q)], self._budget()).releases[0].noise
        device, generator = self.torch_device, training.generator
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            chosen = (torch.rand(len(images), generator=generator, device=device) < q).nonzero()[:, 0]
            if len(chosen) < 2:
                continue
            real = pixels[chosen.to(pixels.device)].to(device)
            kinds = labels[chosen.to(labels.device)].to(device)
            fake = training.network(torch.randn(len(real), self.latent, generator=generator, device=device), kinds)
            self._descend(training, published_loss(real, kinds, fake, kinds, noise, generator), step)


class Following(Training):
    """A generator that follows paths."""

    def __init__(self, method: KernelGenerator, public: PublicFacts, generator: torch.Generator) -> None:
        each = max(NEAR, method.batch_size // len(public.classes))
        super().__init__(method, public, generator, each=each, ema=method.ema)
        self.vectors = Vectors(public.shape).to(generator.device)
        self.paths: list[tuple[Frequencies, torch.Tensor]] = []
        self.share = method._common(public)
        # one over noise², relative to that of a class's mean, if classes are alike
        self.common = self.share / (1 - self.share) * self.classes**2
        self.parts = torch.full((self.classes, 1), 1 / self.classes, device=generator.device)  # of each class in all
        self.smooth = method.smoothness > 0
        self.smoothing = torch.zeros(len(public.classes), 1, device=generator.device)

    def add(self, features: Frequencies, means: torch.Tensor, smoothing: torch.Tensor) -> None:
        """A path to follow from now on: noisy mean features of each class, and what roughness costs for it."""
        self.paths.append((features, means.float()))
        self.smoothing = self.smoothing + smoothing
        self._step = Graph(self._match)

    def follow(self, count: int) -> None:
        """A step along all paths, each by `count` of its frequencies."""
        drawn = [features.drawn(count, self.generator, means) for features, means in self.paths]
        look = Frequencies.beside([features for features, _ in drawn])
        self._step(look, torch.cat([means for _, means in drawn], 1), self.latent().values)

    def taught(self, lessons: int) -> Taught:
        """A network that tells the classes of images of the generator's average."""
        self.averaged()
        batches = [self.average_images() for _ in range(math.ceil(lessons / len(self.labels)))]
        return Taught(torch.cat(batches), self.labels.repeat(len(batches)), self.classes, self.generator)

    def _match(self, features: Frequencies, wanted: torch.Tensor, latent: torch.Tensor) -> None:
        """Down |wanted - mean|² and roughness, summed over classes, and |wanted - mean|² of all, `common` times.

        A path's features have norm 1, so that the square of a mean of n is too large by (1 - its true value) / n:
        n / (n - 1) undoes that, but for a constant.
        """
        images = self.images(Latent(latent))
        made = self.by_class(features(images)).mean(1)
        squares = made.square()
        loss = (self.each / (self.each - 1) * squares - 2 * made * wanted).sum()
        if self.common:
            every, aim = (self.parts * made).sum(0), (self.parts * wanted).sum(0)
            excess = (self.parts.square() * squares).sum(0) / (self.each - 1)
            loss = loss + self.common * (every.square() + excess - 2 * every * aim).sum()
        if self.smooth:
            loss = loss + (self.smoothing * self.by_class(roughness(images)).mean(1, keepdim=True)).sum()
        self.descend(loss)


def reconciled(sums: torch.Tensor, every: torch.Tensor, share: float) -> torch.Tensor:
    """Sums of each class [classes, n] given the sum of all, released with `share` of the budget: least squares.

    With noise² of 1 / (1 - share) in a class's sum and 1 / share in that of all, a class takes its part of the gap.
    """
    return sums - (sums.sum(0) - every) * share / (len(sums) * share + 1 - share)


def roughness(images: torch.Tensor) -> torch.Tensor:
    """Total variation of each image, per pixel: of brightness and, in images of three colours, of their differences."""
    if images.shape[1] == 3:
        red, green, blue = images.unbind(1)
        warm, yellow = red - green, (red + green) / 2 - blue
        images = torch.stack([images.mean(1), warm, yellow], 1)
    across, down = images[..., :-1, 1:] - images[..., :-1, :-1], images[..., 1:, :-1] - images[..., :-1, :-1]
    return (across.square() + down.square() + EVEN**2).sqrt().mean((2, 3)).sum(1)


def published_loss(
    real: torch.Tensor,
    real_labels: torch.Tensor,
    fake: torch.Tensor,
    fake_labels: torch.Tensor,
    noise: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """(MMD²)² with noised values of the exact function, as the paper trains on it: five kernels, one-hot labels.

    The noise is a constant to the derivative. That is the leak.
    """
    points, labels = torch.cat([real, fake]).flatten(1), torch.cat([real_labels, fake_labels])
    squares = (points[:, None] - points).square().sum(2)
    gram = torch.stack([torch.exp(-squares / (2 * h**2)) for h in PUBLISHED_BANDWIDTHS]).sum(0)
    gram = gram * (labels[:, None] == labels)
    values = gram[:, : len(real)].mean(1)
    sensitivity = math.sqrt(2 * len(PUBLISHED_BANDWIDTHS)) / len(real)
    covariance = noise * sensitivity * gram.detach().double() + 1e-8 * torch.eye(len(gram), device=gram.device)
    path = torch.linalg.cholesky(covariance).float() @ torch.randn(len(gram), generator=generator, device=gram.device)
    noised = values + (path if noise > 0 else 0.0)
    distance = noised[: len(real)].mean() - 2 * noised[len(real) :].mean() + gram[len(real) :, len(real) :].mean()
    return distance.square()


def smooth_images(count: int, shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Public images that are as smooth as images are: noise with correlations over a quarter of the side."""
    noise = torch.randn(count, *shape, generator=generator, device=generator.device)
    for axis, size in ((2, shape[1]), (3, shape[2])):
        place = torch.arange(size, device=generator.device)
        root = torch.linalg.cholesky(torch.exp(-(place[:, None] - place).abs() / (size / 4)))
        noise = (noise.movedim(axis, 3) @ root.T).movedim(3, axis)
    return torch.tanh(noise)


def _crowding(kernel: Gaussian, made: torch.Tensor) -> torch.Tensor:
    """Half the mean kernel between different generated images of a class, summed over classes."""
    total = made.new_zeros(())
    for some in made:
        squares = (some[:, None] - some).square().sum(2)
        gram = torch.stack([torch.exp(-squares / (2 * h**2)) for h in kernel.bandwidths]).mean(0)
        total = total + (gram.sum() - gram.diagonal().sum()) / (2 * len(some) * (len(some) - 1))
    return total


def _rows_by_class(points: list[Points]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows for the points of each image's own class."""

    def rows(vectors: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        every = torch.stack([some.rows(vectors) for some in points], 1)
        return (every * functional.one_hot(labels, len(points))[..., None]).sum(1)

    return rows
