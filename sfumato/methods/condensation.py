"""Base classes of condensation methods: a few images per class, created once, matched in random networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from sfumato.data import DataError, PublicFacts
from sfumato.engine import GradientVault
from sfumato.engine.cuda_graph import Graph
from sfumato.methods.base import Synthesizer
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.nets.augmentation import Augmentation, draw_augmentation
from sfumato.nets.random_convnet import WIDTH, draw_networks, embed
from sfumato.privacy import Release

BLOCK = 100  # iterations whose networks are drawn at once
CHUNK = 2000  # synthetic images in a forward
TINY = 1e-12


@dataclass(kw_only=True, eq=False)
class Condenser(Synthesizer):
    """A method that makes a fixed number of images.

    - images_per_class: int, 50; images of each class, the paper's M.
    """

    sample_batch: ClassVar[int] = 2**62  # all at once: no image is drawn twice

    images_per_class: int = 50

    def max_samples(self, public: PublicFacts) -> int:
        return self.images_per_class * len(public.classes)

    def _keep(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Store the condensed set: float pixels, which are clamped to [-1, 1] when they are written."""
        self.images_, self.labels_ = images.float(), labels.long()

    def _proportions(self) -> torch.Tensor:
        return torch.bincount(self.labels_.cpu(), minlength=len(self._fitted().classes)).float()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images of these labels without replacement."""
        classes = self._fitted().classes
        wanted = torch.bincount(labels, minlength=len(classes))
        there = torch.bincount(self.labels_, minlength=len(classes))
        for name, many, few in zip(classes, wanted.tolist(), there.tolist(), strict=True):
            if many > few:
                raise ValueError(
                    f"{self.key} made {few} images of class {name!r}, and {many} were asked for: it condenses a set "
                    f"once and cannot draw more. Ask for at most {len(self.images_)} in all, or fit with more "
                    "images_per_class"
                )
        shuffled = torch.randperm(len(self.labels_), generator=generator, device=self.labels_.device)
        supply = shuffled[self.labels_[shuffled].argsort(stable=True)]
        chosen = torch.empty_like(labels)
        starts = torch.cumsum(there, 0) - there
        order = labels.argsort(stable=True)
        rank = torch.arange(len(labels), device=labels.device) - (torch.cumsum(wanted, 0) - wanted)[labels[order]]
        chosen[order] = supply[starts[labels[order]] + rank]
        return self.images_[chosen]

    def _state(self) -> dict[str, torch.Tensor]:
        return {"images": self.images_, "labels": self.labels_}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:  # noqa: ARG002
        self.images_, self.labels_ = state["images"], state["labels"]


@dataclass(kw_only=True, eq=False)
class PrivateCondenser(Condenser):
    """Noisy class sums over Poisson samples.

    - sampling_prob: float; probability q of an image to be in a sample, for all classes.
    - group_size: int or None; the paper's L, the expected number of images of the smallest class in a sample, instead
      of q. Needs class sizes that are declared public.
    - noise_multiplier: float or None; fixes the noise. Epsilon is then a limit that the plan must keep.
    """

    sampling_prob: float = 0.02
    group_size: int | None = None
    noise_multiplier: float | None = None

    @abstractmethod
    def _times(self, public: PublicFacts) -> int:
        """Return the number of released sums."""

    def validate(self) -> Self:
        for name in ("group_size", "noise_multiplier"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{name} must be a number greater than 0, or left out, got {value!r}")
        if not 0 < self.sampling_prob <= 1:
            raise ValueError(f"sampling_prob must lie in (0, 1], got {self.sampling_prob!r}")
        return super().validate()

    def _releases(self, public: PublicFacts) -> list[Release]:
        q, times = self._probability(public), self._times(public)
        # All sums together are about as precise as one over all the data with noise 1 / (q sqrt(times)).
        counts = counts_release(public, 1 / (q * math.sqrt(times)))
        return [*counts, Release("sums", times, q, self.noise_multiplier)]

    def _probability(self, public: PublicFacts) -> float:
        """Return the sampling probability q of all classes; with `group_size`, that of the smallest class."""
        return self.sampling_prob if self.group_size is None else min(1.0, self.group_size / self._smallest(public))

    def _smallest(self, public: PublicFacts) -> float:
        """Return the number of images of the smallest class."""
        if not public.sizes:
            raise DataError(
                "group_size divides by the sizes of classes, and these are private: declare them public "
                "(public_size=true), or give sampling_prob instead"
            )
        return max(min(public.sizes), 1)

    def _expected(self, vault: GradientVault, public: PublicFacts) -> torch.Tensor:
        """Return the expected number of images of each class in a sample, [classes, 1]."""
        return (self._probability(public) * class_counts(vault, public))[:, None]


class RandomViews:
    """Random networks and augmentations, one of each for every iteration; all from the user's seed."""

    def __init__(self, public: PublicFacts, generator: torch.Generator, *, width: int = WIDTH, flip: bool | None):
        self._public, self._generator, self._width, self._flip = public, generator, width, flip
        self._first = generator.get_state()
        self._ready: list[View] = []
        self._begun, self._taken = generator.get_state(), torch.zeros((), dtype=torch.int64)  # of the block

    def state_parts(self) -> dict[str, Any]:
        """Return the state that `next` changes, for checkpoints."""
        return {"generator": self._generator, "begun": self._begun, "taken": self._taken}

    def next(self) -> View:
        if not self._ready and 0 < int(self._taken) < BLOCK:  # restored: draw the block again, and skip what was taken
            here = self._generator.get_state()
            self._generator.set_state(self._begun)
            self._draw()
            self._generator.set_state(here)
            del self._ready[BLOCK - int(self._taken) :]
        elif not self._ready:
            self._begun.copy_(self._generator.get_state())
            self._taken.zero_()
            self._draw()
        self._taken += 1
        return self._ready.pop()

    def restart(self) -> None:
        """Draw the same views again, from the first on."""
        self._generator.set_state(self._first)
        self._ready.clear()
        self._taken.zero_()

    @property
    def features(self) -> int:
        """The number of features of a network."""
        device = self._generator.device
        networks = draw_networks(1, self._public.shape, torch.Generator(device), self._width)
        return embed(torch.zeros(1, *self._public.shape, device=device), [each[0] for each in networks]).shape[1]

    def _draw(self) -> None:
        """Draw networks and augmentations of a block of iterations."""
        classes = len(self._public.classes)
        networks = draw_networks(BLOCK, self._public.shape, self._generator, self._width)
        drawn = None
        if self._flip is not None:
            drawn = draw_augmentation(BLOCK * classes, self._public.shape[1:], self._generator, flip=self._flip)
        for number in reversed(range(BLOCK)):
            part = None if drawn is None else drawn[slice(number * classes, (number + 1) * classes)]
            self._ready.append(View([weights[number] for weights in networks], part))


@dataclass(frozen=True)
class View:
    """The network and the augmentations, one per class, by which an iteration embeds real and synthetic images."""

    network: list[torch.Tensor]
    augmentation: Augmentation | None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return features [N, features], each row from its own image."""
        if self.augmentation is not None:
            images = self.augmentation[labels](images)
        return embed(images, self.network)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.network, *([] if self.augmentation is None else [self.augmentation.table])]

    def like(self, tensors: Sequence[torch.Tensor]) -> View:
        """Return a view of the same kind from these tensors."""
        depth = len(self.network)
        return View(list(tensors[:depth]), Augmentation(*tensors[depth:]) if self.augmentation is not None else None)


class Matcher:
    """Distribution matching: move synthetic images until their mean embeddings are the given ones.

    All classes go through one network at once; on a GPU an iteration is one CUDA graph.

    - unit: scale embeddings to norm 1; the scale is not differentiated.
    - learning_rate: learning rate; with `decay` it falls to zero as a cosine.
    - momentum: momentum of the gradient steps.
    - smoothness: length in image sides over which gradients of neighbouring pixels are correlated, default 0.
    - average: share of the last iterations whose images are averaged for the result, default 0.
    - start: first images, or the standard deviation of their noise, default 1.
    """

    def __init__(
        self,
        public: PublicFacts,
        per_class: int,
        iterations: int,
        generator: torch.Generator,
        *,
        unit: bool,
        learning_rate: float,
        momentum: float,
        decay: bool = False,
        smoothness: float = 0.0,
        average: float = 0.0,
        start: float | torch.Tensor = 1.0,
    ) -> None:
        device = generator.device
        self.labels = torch.arange(len(public.classes), device=device).repeat_interleave(per_class)
        if not isinstance(start, torch.Tensor):
            start = start * torch.randn(len(self.labels), *public.shape, generator=generator, device=device)
        self.images = start
        self._per_class, self._unit, self._momentum = per_class, unit, momentum
        self._rate, self._decay, self._iterations = learning_rate, decay, iterations
        self._averaged_from = round((1 - average) * iterations)
        self._correlations = [_correlation(size, smoothness * size, device) for size in public.shape[1:]]
        self._smooth = smoothness > 0
        self._velocity = torch.zeros_like(start)
        self._mean, self._done = torch.zeros_like(start), torch.zeros((), dtype=torch.int64)
        self._means_graph, self._step_graph = Graph(self._means), Graph(self._step)

    def state_parts(self) -> dict[str, Any]:
        """Return the state that an iteration changes, for checkpoints."""
        return {"images": self.images, "velocity": self._velocity, "mean": self._mean, "done": self._done}

    def means(self, view: View) -> torch.Tensor:
        """Return the mean embeddings of the current images, [classes, features]."""
        found = self._means_graph(view)
        assert found is not None
        return found

    def step(self, view: View, difference: torch.Tensor) -> None:
        """Run one iteration: move the mean embeddings along `difference`, [classes, features]."""
        rate = self._rate
        if self._decay:
            rate *= (1 + math.cos(math.pi * int(self._done) / self._iterations)) / 2
        self._step_graph(view, difference.float(), torch.full((), rate, device=difference.device))
        self._done += 1
        if self._count > 0:
            self._mean += (self.images - self._mean) / self._count

    @property
    def _count(self) -> int:
        """Return the number of iterations in the average so far."""
        return max(0, int(self._done) - self._averaged_from)

    def result(self) -> torch.Tensor:
        return self._mean if self._count else self.images

    def _parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield slices of a few classes, and of their images."""
        classes = max(1, CHUNK // self._per_class)
        for first in range(0, len(self.images) // self._per_class, classes):
            yield slice(first, first + classes), slice(first * self._per_class, (first + classes) * self._per_class)

    def _embedded(self, view: View, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean embeddings of some classes."""
        rows = view(images, labels)
        if self._unit:
            rows = rows / torch.linalg.vector_norm(rows.detach(), dim=1, keepdim=True).clamp_min(TINY)
        return rows.view(-1, self._per_class, rows.shape[1]).mean(1)

    def _means(self, view: View) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self._embedded(view, self.images[part], self.labels[part]) for _, part in self._parts()])

    def _step(self, view: View, difference: torch.Tensor, rate: torch.Tensor) -> None:
        for classes, part in self._parts():
            images = self.images[part].detach().requires_grad_(True)
            with torch.enable_grad():
                toward = (self._embedded(view, images, self.labels[part]) * difference[classes]).sum()
                (gradient,) = torch.autograd.grad(toward, images)
            if self._smooth:
                gradient = self._correlations[0] @ gradient @ self._correlations[1]
            velocity = self._velocity[part].mul_(self._momentum).add_(gradient)
            self.images[part] = (self.images[part] + rate * velocity).clamp_(-1, 1)


def _correlation(size: int, length: float, device: torch.device) -> torch.Tensor:
    """Return a matrix [size, size] of pixel correlations that decay over `length` and keep the norm of white noise."""
    place = torch.arange(size, device=device)
    matrix = torch.exp(-(place[:, None] - place).abs() / max(length, 1e-6))
    return matrix / matrix.square().sum(1).mean().sqrt()
