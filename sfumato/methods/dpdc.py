"""LDPDC and NDPDC: "Differentially Private Dataset Condensation" (Zheng and Li, NDSS workshop 2024).

Idea: find a few images per class that train a classifier as well as the whole set. Each iteration takes a Poisson
sample of every class and releases a noisy sum; all that follows is post-processing.

- `ldpdc` (Algorithm 1) releases noisy sums of pixels. Each sum, divided by the expected size of its sample, is a
  synthetic image.
- `ndpdc` (Algorithm 2) releases noisy sums of embeddings of augmented images by a fresh random network, clipped to norm
  G. Synthetic images descend on the squared distance between their own mean embedding and the released one. With
  `passes` the released means are kept and matched again, in the networks that they were made with: a release is charged
  and noised once, however often it is used. (Dosser, ICCV 2025, has this idea, but stores sums without noise and adds
  fresh noise at each use.)

Released: M (ldpdc) or I (ndpdc) noisy class sums over Poisson samples; noisy class counts unless sizes are declared.
Public: image shape, class names; networks and augmentations, which are drawn from the user's seed.
Events: Gaussian sums over Poisson samples with probability q, composed by PLD; classes are blocks of one vector.

q is chosen, or computed as L / N_c for the smallest class from sizes that are declared public (`group_size`,
`public_size`). (The paper has a q of its own for each class and pays for the largest.) Released counts only scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods.base import constant
from sfumato.methods.condensation import Matcher, PrivateCondenser, RandomViews, View
from sfumato.nets.random_convnet import WIDTH

PAPER_SAMPLE_SIZE = 50  # L of the paper, whose loss is a sum over L images; learning rates here are for L = 50


@dataclass(kw_only=True, eq=False)
class LinearCondenser(PrivateCondenser):
    """LDPDC: each synthetic image is a noisy sum of real ones over their expected number."""

    key: ClassVar[str] = "ldpdc"
    paper: ClassVar[str] = "Zheng and Li, NDSS workshop 2024"
    summary: ClassVar[str] = "condense to a few noisy averages of each class"

    sampling_prob: float = 0.008

    def _times(self, public: PublicFacts) -> int:  # noqa: ARG002
        return self.images_per_class

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        expected = self._expected(vault, public)
        bound = math.sqrt(math.prod(public.shape))  # of pixels in [-1, 1]
        sums = torch.zeros(self.images_per_class, len(public.classes), math.prod(public.shape), device=expected.device)
        for number in self._checkpoints.loop("averages", self.images_per_class, sums=sums):
            sums[number] = vault.sum(_pixels, release="sums", bound=bound, by_class=True)
        # Algorithm 1: s_j = (N(0, σ² I) + Σ x) / L.
        images = (sums / expected).transpose(0, 1).reshape(-1, *public.shape)
        labels = torch.arange(len(public.classes), device=images.device).repeat_interleave(self.images_per_class)
        self._keep(images, labels)


@dataclass(kw_only=True, eq=False)
class NonlinearCondenser(PrivateCondenser):
    """NDPDC: synthetic images whose mean embedding in random networks is the released one.

    - iterations: int, 500; the paper's I.
    - bound: float, 0.3; clipping norm, the paper's G.
    - flip: bool, False; include mirroring in the augmentation.

    Presets: `paper`, the authors' form; `kept`, each release is used ten times: once when it is made, then again from
    memory, free of charge.
    """

    key: ClassVar[str] = "ndpdc"
    paper: ClassVar[str] = "Zheng and Li, NDSS workshop 2024"
    summary: ClassVar[str] = "condense to a few images of each class that match noisy embeddings in random networks"

    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed", "momentum", "smoothness", "average"})
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "bound": 1.0,
            "residual": False,
            "start": 1.0,
            "learning_rate": 1.0,
            "decay": False,
            "smoothness": 0.0,
            "average": 0.0,
        },
        "kept": {"passes": 10},
    }

    iterations: int = 500
    bound: float = 0.3
    flip: bool = False
    passes: int = constant(1)  # how often each release is used
    augmentation: bool = constant(True)  # the same for real and synthetic images, per class and iteration
    # Rows are directions minus the synthetic images' mean direction in their class, which is public: it comes from
    # earlier releases. Embeddings of a class are similar, so these residuals are short and allow a small bound.
    residual: bool = constant(True)
    start: float = constant(0.3)  # standard deviation of the first images' pixels
    learning_rate: float = constant(0.5)  # the paper's eta
    momentum: float = constant(0.5)
    decay: bool = constant(True)  # of the learning rate, along a cosine
    smoothness: float = constant(0.02)  # length over which neighbouring pixels move together, in image sides
    average: float = constant(0.2)  # part of the iterations over which images are averaged
    width: int = constant(WIDTH)  # of the networks

    def _times(self, public: PublicFacts) -> int:  # noqa: ARG002
        return self.iterations

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        device, flip = self.torch_device, self.flip if self.augmentation else None
        expected = self._expected(vault, public)
        views = RandomViews(public, torch.Generator(device).manual_seed(self.seed + 1), width=self.width, flip=flip)
        matcher = Matcher(
            public,
            self.images_per_class,
            self.iterations * self.passes,
            torch.Generator(device).manual_seed(self.seed),
            unit=True,
            learning_rate=2 * PAPER_SAMPLE_SIZE * self.images_per_class * self.learning_rate,
            momentum=self.momentum,
            decay=self.decay,
            smoothness=self.smoothness,
            average=self.average,
            start=self.start,
        )
        rows, scale = None, self.bound if self.residual else 1.0
        state: dict[str, Any] = {"views": views, "matcher": matcher}
        if self.passes > 1:
            state["kept"] = torch.zeros(self.iterations, len(public.classes), views.features, device=device)
        for number in self._checkpoints.loop("matching", self.iterations, **state):
            view = views.next()
            rows = rows or self._rows(view)
            means = matcher.means(view)
            sums = vault.sum(
                rows,
                release="sums",
                bound=self.bound,
                by_class=True,
                with_labels=True,
                constants=[means, *view.tensors()],
            )
            # Algorithm 2: the gradient of its loss moves means along (N(0, σ² I) + Σ clip(r(x), G)) / L - means.
            found = sums / (expected * self.bound)
            matcher.step(view, found if self.residual else found - means)
            if self.passes > 1:
                state["kept"][number] = means + scale * found if self.residual else found
        if self.passes > 1:
            self._match_again(views, matcher, state["kept"], scale)
        self._keep(matcher.result(), matcher.labels)

    def _match_again(self, views: RandomViews, matcher: Matcher, kept: torch.Tensor, scale: float) -> None:
        """Match the released means again, pass by pass, without a query on private images."""
        again = self.iterations * (self.passes - 1)
        for number in self._checkpoints.loop("matching again", again, views=views, matcher=matcher):
            if number % self.iterations == 0:
                views.restart()
            view = views.next()
            matcher.step(view, (kept[number % self.iterations] - matcher.means(view)) / scale)

    def _rows(self, kind: View) -> Callable[..., torch.Tensor]:
        """Return the released rows as a function of images, labels, synthetic means and a view's tensors."""

        def rows(images: torch.Tensor, labels: torch.Tensor, means: torch.Tensor, *view: torch.Tensor) -> torch.Tensor:
            seen = kind.like(view)(images, labels)
            return functional.normalize(seen) - means[labels] if self.residual else seen

        return rows


def _pixels(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)
