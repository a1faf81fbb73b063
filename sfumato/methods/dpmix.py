"""DPMix: noisy mixtures of images and of their labels (Lee, Kim, Lee, Suh, Ramchandran; ISIT 2019). A baseline.

The idea: the average of a few random images of any class, with noise, and the average of their labels, with noise.
A synthetic image's class is the one that is most over-represented in its mixture.

Released: for each synthetic image a noisy sum of (image, weighted one-hot label) over a Poisson sample of all classes;
noisy class counts unless sizes are declared. Public: image shape, class names.
Events: Gaussian sums over Poisson samples with probability q, composed by PLD.

What is ours: Poisson samples and sums (the paper draws without replacement and noises means); hard labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods.condensation import PrivateCondenser


@dataclass(kw_only=True, eq=False)
class Mixer(PrivateCondenser):
    """Noisy mixtures of images of any class, `images_per_class` times the number of classes.

    - label_weight: float, 1.0; norm of the label's part of a row, where the image's is at most 1.
    """

    key: ClassVar[str] = "dpmix"
    paper: ClassVar[str] = "Lee et al., ISIT 2019"
    summary: ClassVar[str] = "average a few images of any class, with noise; a baseline"

    sampling_prob: float = 0.001
    label_weight: float = 1.0

    def _times(self, public: PublicFacts) -> int:
        return self.images_per_class * len(public.classes)

    def _smallest(self, public: PublicFacts) -> float:
        """Return the number of images of all classes, which a mixture is drawn from."""
        super()._smallest(public)
        return max(sum(public.sizes or ()), 1)

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        expected = self._expected(vault, public)[:, 0]  # of each class in a mixture
        pixels, classes = math.prod(public.shape), len(public.classes)
        labelled = classes > 1
        scale = math.hypot(1.0, self.label_weight) if labelled else 1.0

        def row(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            parts = [images.flatten(1) / math.sqrt(pixels)]
            if labelled:
                parts.append(self.label_weight * functional.one_hot(labels, classes))
            return torch.cat(parts, 1) / scale

        width = pixels + (classes if labelled else 0)
        sums = torch.zeros(self._times(public), width, device=self.torch_device)
        for number in self._checkpoints.loop("mixtures", len(sums), sums=sums):
            sums[number] = vault.sum(row, release="sums", bound=1.0, with_labels=True) * scale
        images = sums[:, :pixels] * (math.sqrt(pixels) / expected.sum())
        labels = torch.zeros(len(sums), dtype=torch.int64, device=sums.device)
        if labelled:
            labels = (sums[:, pixels:] / self.label_weight - expected).argmax(1)
        self._keep(images.view(-1, *public.shape), labels)
