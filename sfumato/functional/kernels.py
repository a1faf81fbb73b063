"""Kernels with k(x, x) = 1, by their spectral densities.

By Bochner's theorem a shift-invariant kernel is the mean of cos(w . (x - y)) over a law of frequencies w. So a kernel
here is two things that agree: its values, and a way to draw frequencies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kernel(ABC):
    """The mean over `bandwidths` of one shape of kernel; a bandwidth is the length over which it falls off."""

    bandwidths: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bandwidths or not all(h > 0 for h in self.bandwidths):
            raise ValueError(f"bandwidths must be greater than 0, got {self.bandwidths}")

    def __call__(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Values for all pairs of rows, [N, M]."""
        squares = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([self._shape(squares / h**2) for h in self.bandwidths]).mean(0)

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        """Frequencies of the spectral density, [count, dimension], each with a bandwidth drawn at random."""
        device = generator.device
        choice = torch.randint(len(self.bandwidths), (count, 1), generator=generator, device=device)
        lengths = torch.tensor(self.bandwidths, device=device)[choice]
        normal = torch.randn(count, dimension, generator=generator, device=device)
        return normal / lengths * self._spread(count, generator)

    @abstractmethod
    def _shape(self, squares: torch.Tensor) -> torch.Tensor:
        """The kernel of bandwidth 1 at these squared distances."""

    @abstractmethod
    def _spread(self, count: int, generator: torch.Generator) -> torch.Tensor | float:
        """Factors, [count, 1], that make normal frequencies those of the kernel of bandwidth 1."""


@dataclass(frozen=True)
class Gaussian(Kernel):
    """exp(-|x - y|² / 2h²); its frequencies are normal."""

    def _shape(self, squares: torch.Tensor) -> torch.Tensor:
        return torch.exp(-squares / 2)

    def _spread(self, count: int, generator: torch.Generator) -> float:  # noqa: ARG002
        return 1.0


@dataclass(frozen=True)
class Matern(Kernel):
    """Of smoothness 1/2 (Laplace: exp(-|x - y| / h)), 3/2 or 5/2; its frequencies follow Student's law."""

    smoothness: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smoothness not in (0.5, 1.5, 2.5):
            raise ValueError(f"smoothness must be 0.5, 1.5 or 2.5, got {self.smoothness}")

    def _shape(self, squares: torch.Tensor) -> torch.Tensor:
        scaled = (2 * self.smoothness * squares).sqrt()
        factor = {0.5: torch.ones_like(scaled), 1.5: 1 + scaled, 2.5: 1 + scaled + scaled.square() / 3}
        return factor[self.smoothness] * torch.exp(-scaled)

    def _spread(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """A normal vector over the root of an independent chi-square / degrees: 2 smoothness degrees of freedom."""
        degrees = round(2 * self.smoothness)
        squares = torch.randn(count, degrees, generator=generator, device=generator.device).square()
        return math.sqrt(degrees) / squares.sum(1, keepdim=True).sqrt()
