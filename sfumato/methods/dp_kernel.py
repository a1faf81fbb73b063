"""DP-kernel: a generator trained on a noisy function ("Functional Rényi Differential Privacy for Generative Modeling").

The idea: the mean of k(x, .) over a class is a function that says how like the class a point is. Release it with the
noise of a Gaussian process, and let a generator climb it while its images keep apart: that minimises the kernel
distance (MMD) to the private images.

Released, at each step: for random frequencies that are drawn afresh, the noisy class sums of random Fourier features
over a Poisson sample; that is a whole noisy path of the function (`functional/release.py` has the proof), so that its
derivatives are post-processing. Noisy class counts unless sizes are declared.
Public: image shape, class names; frequencies and initial weights, from the user's seed.
Events: Gaussian sums over Poisson samples with probability q, composed by PLD; classes are blocks of one vector.

What is ours: the kernel, on wavelet scattering coefficients beside pixels; and rows that are differences from the
generated images' mean, which is public: for kernels as broad as these, most of a row is what all images have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, PublicFacts
from sfumato.encoders.scattering import Scattering
from sfumato.functional import Frequencies, Gaussian, Part, Points, Windowed
from sfumato.methods.generating import GeneratorMethod, warm_cosine
from sfumato.nets.generator import PerClass, refresh_batch_norm
from sfumato.nets.graph import Graph
from sfumato.privacy import Release, Vault, calibrate
from sfumato.progress import track

COUNTS_WEIGHT = 4.0  # noise of the counts over that of all sums together
GROUP = 3  # scattering channels that are normalised together
LARGEST_SIDE = 64
INDUCING = 200  # points of the one-shot form
NEAR = 4  # images per class whose derivatives the exact form releases in a step
RELEASED_BY = 0.6  # of the steps: all paths are there by then
SEEDS = 1_000_003  # apart, in seeds of frequencies
MEANS_BATCHES = 4
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

    form: `pathwise`, fresh random frequencies at each step; `gp`, exact derivatives at a few generated images of each
    class (slow; the reference); `nystrom`, one release at public points; `published`, the paper's training, which is
    not private: its certificate says so.

    pixels, scattering: bandwidths of the Gaussian kernels on pixels and on scattering coefficients, both of norm one;
    scattering_share: weight of the latter. (`gp` and `nystrom` take both as one vector, and the latter bandwidths.)
    features: random frequencies in a step. sampling_prob, steps: q and the number of releases. bound: rows of the
    pathwise form are clipped to it. batch_size, learning_rate, latent, hidden, width, ema: of the generator.
    """

    key: ClassVar[str] = "dp-kernel"
    paper: ClassVar[str] = "Functional Renyi Differential Privacy for Generative Modeling (Jiang et al., NeurIPS 2023)"
    summary: ClassVar[str] = "a generator that follows a noisy kernel mean of scattering coefficients"
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed", "scattering_share"})

    form: str = "pathwise"
    variant: str = "conditional"
    paths: int = 10
    steps: int = 2000
    sampling_prob: float = 1.0
    features: int = 2000
    pixels: tuple[float, float] = (0.2, 0.8)
    scattering: tuple[float, float] = (0.3, 1.0)
    scattering_share: float = 0.5
    window: tuple[float, float] = (0.05, 1.0)
    bound: float = 0.8
    batch_size: int = 500
    learning_rate: float = 2e-3
    network: str = "residual"
    width: int = 64
    ema: float = 0.99

    @property
    def claimed(self) -> dict[str, Any] | None:  # type: ignore[override]
        if self.form != "published":
            return None
        return {"epsilon": self.epsilon, "delta": self.delta, "by": self.paper, "why": LEAK}

    @property
    def _protected(self) -> bool:
        return self.form != "published"

    def validate(self) -> Self:
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        return super().validate()

    @property
    def _per_class(self) -> bool:
        return self.variant == "parallel"

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape[1:]) > LARGEST_SIDE:
            raise DataError(
                f"dp-kernel is for images of up to {LARGEST_SIDE} pixels a side; pass a smaller size (--size)"
            )
        if self.form == "published":
            return []
        times = {"pathwise": self.paths, "gp": self.steps, "nystrom": 1}[self.form]
        q = 1.0 if self.form == "nystrom" else self.sampling_prob
        weight = COUNTS_WEIGHT / (q * math.sqrt(times))
        counts = [] if public.sizes else [Release("counts", weight=weight, nonnegative=True)]
        return [*counts, Release("sums", times, q)]

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        training = Training(self, public, generator)
        if self.form == "published":
            self.counts_ = torch.ones(len(public.classes), device=self.torch_device)
            self._train_as_published(vault, training)
        else:
            counts = torch.tensor(public.sizes, device=self.torch_device) if public.sizes else vault.counts()
            self.counts_ = counts.float().clamp_min(1)
            trains = {"pathwise": self._train_pathwise, "gp": self._train_exactly, "nystrom": self._train_once}
            trains[self.form](vault.map(training.vectors), training)
        self.generator_ = training.result()

    # -- the sound forms --------------------------------------------------------------------------------------

    def _train_pathwise(self, vault: Vault, training: Training) -> None:
        """Paths are released one by one in the first part of the training, and followed again and again.

        Rows are features less the generated images' mean in their class, which is public; what was released, put back
        on that mean, is the private images' mean. Each step draws one of the paths that are there.
        """
        kept: list[torch.Tensor] = []
        choice = torch.Generator().manual_seed(self.seed)
        for step in track(self.steps, "generator"):
            due = math.ceil(self.paths * (step + 1) / (RELEASED_BY * self.steps))
            while len(kept) < min(due, self.paths):
                kept.append(self._release(vault, training, len(kept)))
            number = int(torch.randint(len(kept), (), generator=choice))
            training.match(self._frequencies(training, number), kept[number], step)

    def _release(self, vault: Vault, training: Training, number: int) -> torch.Tensor:
        """Noisy mean features of each class on the frequencies of that number, [classes, features]."""
        features = self._frequencies(training, number)
        means = training.means(features)
        rows = _differences(features, means)
        sums = vault.sum(rows, release="sums", bound=self.bound, by_class=True, with_labels=True)
        expected = (self.sampling_prob * self.counts_)[:, None]
        return (sums / expected).float() + means

    def _frequencies(self, training: Training, number: int) -> Frequencies:
        """Those of the user's seed and of that number: drawn again rather than kept, as they are large."""
        generator = torch.Generator(self.torch_device).manual_seed(self.seed * SEEDS + number)
        vectors = training.vectors
        scattering = Windowed(vectors.maps, self.scattering, self.window)
        pixels = Windowed(training.shape, self.pixels, self.window, PIXEL_NORM, CORRELATION_LENGTH)
        parts = [
            Part(vectors.scattering, scattering, self.scattering_share),
            Part(vectors.pixels, pixels, 1 - self.scattering_share),
        ]
        return Frequencies([part for part in parts if part.weight > 0], self.features, training.like, generator)

    def _train_exactly(self, vault: Vault, training: Training) -> None:
        """At each step the function's derivatives at some generated images, exact in their joint law."""
        kernel, classes = Gaussian(self.scattering), len(self.counts_)
        expected = self.sampling_prob * self.counts_
        for step in track(self.steps, "generator"):
            made = training.vectors(training.images())
            near = training.by_class(made)[:, :NEAR]
            points = [Points(kernel, some) for some in near.detach()]
            released = vault.sum(_rows_by_class(points), release="sums", bound=1.0, by_class=True, with_labels=True)
            climb = torch.stack([points[c].coloured(released[c])[1] / expected[c] for c in range(classes)])
            towards = (climb.to(near.dtype) * near).sum() / NEAR
            training.descend(_crowding(kernel, training.by_class(made)) - towards, step)

    def _train_once(self, vault: Vault, training: Training) -> None:
        """One release of the function's values at public points; between them it is what the kernel makes of these."""
        kernel = Gaussian(self.scattering)
        with torch.no_grad():
            inducing = training.vectors(smooth_images(INDUCING, training.shape, training.generator))
        points = Points(kernel, inducing, derivatives=False)
        released = vault.sum(points.rows, release="sums", bound=1.0, by_class=True)
        weights = torch.stack([points.interpolation(row) for row in released]).float() / self.counts_[:, None]
        for step in track(self.steps, "generator"):
            made = training.by_class(training.vectors(training.images()))
            values = (kernel(made.flatten(0, 1), inducing).unflatten(0, made.shape[:2]) * weights[:, None]).sum(2)
            training.descend(_crowding(kernel, made) - values.mean(1).sum(), step)

    # -- as published -----------------------------------------------------------------------------------------

    def _train_as_published(self, vault: Vault, training: Training) -> None:
        """The paper's loop, for comparison: Poisson batches, noise on values, gradients through the exact function."""
        images, labels = vault.unprotected(f"as published: {LEAK}")
        pixels = images.float() / 127.5 - 1
        labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        q = min(1.0, PUBLISHED_BATCH / max(len(images), 1))
        noise = 0.0
        if self._budget().private:
            noise = calibrate([Release("claimed", self.steps, q)], self._budget()).releases[0].noise
        device, generator = self.torch_device, training.generator
        for step in track(self.steps, "generator"):
            chosen = (torch.rand(len(images), generator=generator, device=device) < q).nonzero()[:, 0]
            if len(chosen) < 2:
                continue
            real = pixels[chosen.to(pixels.device)].to(device)
            kinds = labels[chosen.to(labels.device)].to(device)
            fake = training.network(torch.randn(len(real), self.latent, generator=generator, device=device), kinds)
            training.descend(published_loss(real, kinds, fake, kinds, noise, generator), step)


class Training:
    """A generator under way: batches with as many images of all classes, steps, and an average of the weights."""

    def __init__(self, method: KernelGenerator, public: PublicFacts, generator: torch.Generator) -> None:
        self.shape, self.generator, self._method = public.shape, generator, method
        self.vectors = Vectors(public.shape).to(generator.device)
        self.network, self._average = method._network(public), method._network(public).requires_grad_(False)
        self._average.load_state_dict(self.network.state_dict())
        graphs = generator.device.type == "cuda"
        if graphs and not method._per_class:
            for network in (self.network, self._average):
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters: list[torch.Tensor] = list(self.network.parameters())
        self._rate = torch.zeros((), device=generator.device)
        self._optimizer = torch.optim.Adam(
            self._parameters, self._rate if graphs else 0.0, betas=(0.5, 0.99), fused=True, capturable=graphs
        )
        self.classes, self._each = len(public.classes), max(NEAR, method.batch_size // len(public.classes))
        self._labels = torch.arange(self.classes, device=generator.device).repeat_interleave(self._each)
        self.like = torch.zeros(1, self.vectors.length, device=generator.device)
        self._look, self._step = Graph(self._means), Graph(self._match)

    def latent(self) -> torch.Tensor:
        size = (len(self._labels), self._method.latent)
        return torch.randn(size, generator=self.generator, device=self.generator.device)

    def images(self, latent: torch.Tensor | None = None, network: nn.Module | None = None) -> torch.Tensor:
        """A batch, class by class."""
        network, latent = network or self.network, self.latent() if latent is None else latent
        if isinstance(network, PerClass):
            return network.together(self.by_class(latent)).flatten(0, 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.generator.device.type == "cuda"):
            made: torch.Tensor = network(latent, self._labels)
        return made.float()

    def by_class(self, rows: torch.Tensor) -> torch.Tensor:
        """[classes, images, …]"""
        return rows.view(-1, self._each, *rows.shape[1:])

    def means(self, features: Frequencies) -> torch.Tensor:
        """Mean features of generated images, by class; over several batches, as these are public and cheap."""
        found = [self._look(features, self.latent()) for _ in range(MEANS_BATCHES)]
        return torch.stack([rows.clone() for rows in found if rows is not None]).mean(0)

    def match(self, features: Frequencies, wanted: torch.Tensor, step: int) -> None:
        """A step towards the mean features `wanted`, [classes, features]."""
        self._schedule(step)
        self._step(features, wanted, self.latent())

    def descend(self, loss: torch.Tensor, step: int) -> None:
        """A step down any loss."""
        self._schedule(step)
        self._descend(loss)

    def result(self) -> nn.Module:
        """The average, with its batch norms' statistics taken afresh."""
        refresh_batch_norm(self._average, lambda: self.images(network=self._average))
        return self._average

    def _means(self, features: Frequencies, latent: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.by_class(features(self.vectors(self.images(latent)))).mean(1)

    def _match(self, features: Frequencies, wanted: torch.Tensor, latent: torch.Tensor) -> None:
        """Down |wanted - mean|², summed over classes; features have norm 1, so that n / (n - 1) undoes its bias."""
        made = self.by_class(features(self.vectors(self.images(latent)))).mean(1)
        self._descend((self._each / (self._each - 1) * made.square() - 2 * made * wanted).sum())

    def _schedule(self, step: int) -> None:
        self._rate.fill_(self._method.learning_rate * warm_cosine(step, self._method.steps))
        if self._rate.device.type == "cpu":
            self._optimizer.param_groups[0]["lr"] = float(self._rate)

    def _descend(self, loss: torch.Tensor) -> None:
        gradients = torch.autograd.grad(loss, self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            alike = gradient.stride() == parameter.stride()  # the fused optimizer asks for that
            parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
        self._optimizer.step()
        torch._foreach_lerp_(list(self._average.parameters()), self._parameters, 1 - self._method.ema)


class Vectors(nn.Module):
    """Images as vectors: scattering coefficients, then pixels; each of norm one, or below.

    Coefficients are normalised in small groups of channels, to zero mean and unit variance, and divided by the root of
    their number, which is public; pixels by the root of theirs.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *size = shape
        self.transform = Scattering((size[0], size[1]))
        self.maps = (channels * self.transform.channels, size[0] // 4, size[1] // 4)
        self.groups = max(1, self.maps[0] // GROUP)
        self.coefficients = math.prod(self.maps)
        self.length = self.coefficients + math.prod(shape)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, coefficients + pixels]."""
        maps = self.transform(images).flatten(1, 2)
        normal = functional.group_norm(maps, self.groups).flatten(1) / math.sqrt(self.coefficients)
        return torch.cat([normal, images.flatten(1) / math.sqrt(math.prod(images.shape[1:]))], 1)

    def scattering(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, : self.coefficients]

    def pixels(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, self.coefficients :]


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


def _differences(features: Frequencies, means: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Features less the generated images' mean in their class."""
    return lambda vectors, labels: features(vectors) - means[labels]
