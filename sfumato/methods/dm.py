"""Distribution matching: dataset condensation without privacy ("Dataset Condensation with Distribution Matching").

The idea: a few images per class whose mean embedding in random networks is that of the real ones. It is what `ndpdc`
tends to as its noise goes to nothing: the limit that a private method can be measured against.

Released: images made from the raw ones. Public: nothing is protected. Events: none; the certificate says
`guarantee: none`. That few images come of many is no protection: docs/privacy-for-free.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sfumato.data import DataError, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault
from sfumato.methods.base import constant
from sfumato.methods.condensation import Condenser, Matcher, RandomViews, View
from sfumato.nets.random_convnet import WIDTH
from sfumato.privacy import Release

CHUNK, DEVICE_CHUNK = 500, 4000  # images in a forward, on a CPU and on an accelerator


@dataclass(kw_only=True, eq=False)
class DistributionMatching(Condenser):
    """DM: synthetic images whose mean embedding in random networks is that of real images. Not private.

    - epsilon: must be infinite, which is the default.
    - iterations: int, 2000; the paper has 20,000.
    - batch_size: int, 256; real images of each class in an iteration.
    - learning_rate: float, 1.0; the paper's.
    - augmentation: bool, True; the same random augmentation of real and synthetic images, per class and iteration.
    - flip: bool, False; include mirroring.
    """

    key: ClassVar[str] = "dm"
    paper: ClassVar[str] = "Zhao and Bilen, WACV 2023"
    summary: ClassVar[str] = "match embeddings of real images by a few images of each class; not private"
    guarantee: ClassVar[str] = "none"
    claimed: ClassVar[dict[str, Any] | None] = {
        "epsilon": "O(m / n) for m images condensed from n",
        "by": "Dong, Zhao and Lyu, Privacy for Free (ICML 2022), of networks trained on the condensed images",
        "why": "not so: the proof supposes a solution that holds for linear networks only, in a basis that is itself "
        "computed from the private images, and a fixed law of trained weights",
    }

    epsilon: float = math.inf
    iterations: int = 2000
    batch_size: int = 256
    learning_rate: float = 1.0
    augmentation: bool = True
    flip: bool = False
    momentum: float = constant(0.5)
    width: int = constant(WIDTH)

    def validate(self) -> DistributionMatching:
        super().validate()
        if math.isfinite(self.epsilon):
            raise ValueError(
                f"{self.key} is not private and cannot keep epsilon {self.epsilon:g}: say epsilon=inf (--epsilon inf) "
                "if the images need no protection, or choose a method that guarantees differential privacy"
            )
        return self

    def _releases(self, public: PublicFacts) -> list[Release]:  # noqa: ARG002
        return []

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        images, labels = vault.unprotected("distribution matching embeds raw images, without noise")
        if labels is None:
            labels = torch.zeros(len(images), dtype=torch.int64)
        device = self.torch_device
        generator = torch.Generator(device).manual_seed(self.seed)
        start = initial_noise(public, self.images_per_class, generator)
        views = RandomViews(public, generator, width=self.width, flip=self.flip if self.augmentation else None)
        matcher = Matcher(
            public,
            self.images_per_class,
            self.iterations,
            generator,
            unit=False,
            learning_rate=2 * self.learning_rate,  # the squared distance has twice the difference for its gradient
            momentum=self.momentum,
            start=start,
        )
        batches = class_batches(images, labels.to(device), public, self.batch_size, generator)
        for _ in self._checkpoints.loop("matching", self.iterations, views=views, matcher=matcher):
            view = views.next()
            targets = mean_embeddings(view, *next(batches), len(public.classes))
            matcher.step(view, targets - matcher.means(view))
        self._keep(matcher.result(), matcher.labels)


def initial_noise(public: PublicFacts, per_class: int, generator: torch.Generator) -> torch.Tensor:
    """Return the initial images, N(0, I) class by class. They are the first draw of `generator`."""
    return torch.randn(len(public.classes) * per_class, *public.shape, generator=generator, device=generator.device)


def class_batches(
    images: torch.Tensor, labels: torch.Tensor, public: PublicFacts, size: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches endlessly: `size` images of each class (or all, if fewer) in [-1, 1], and their labels."""
    counts = torch.bincount(labels, minlength=len(public.classes))
    if empty := [name for name, count in zip(public.classes, counts.tolist(), strict=True) if not count]:
        raise DataError(f"there are no images of class {empty[0]!r}: nothing to match")
    grouped = labels.sort().values  # the labels of any order of the images that goes class by class
    rank = torch.arange(len(labels), device=labels.device) - (torch.cumsum(counts, 0) - counts)[grouped]
    taken = (rank < size).nonzero()[:, 0]
    while True:
        order = torch.randperm(len(labels), generator=generator, device=labels.device)
        chosen = order[labels[order].argsort(stable=True)][taken]
        pixels = images[chosen.to(images.device)].to(labels.device)
        yield to_unit_range(pixels), grouped[taken]


@torch.no_grad()
def mean_embeddings(view: View, images: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the mean features of each class, [classes, features]."""
    chunk = CHUNK if images.device.type == "cpu" else DEVICE_CHUNK
    parts = zip(images.split(chunk), labels.split(chunk), strict=True)
    rows = torch.cat([view(*part) for part in parts])
    sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, labels, rows)
    return sums / torch.bincount(labels, minlength=classes)[:, None]
