"""Kernels with k(x, x) = 1, by their spectral densities.

By Bochner's theorem a shift-invariant kernel is the mean of cos(w . (x - y)) over a law of frequencies w. So a kernel
here is two things that agree: its values, and a way to draw frequencies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch


class Spectrum(Protocol):
    """A law of frequencies."""

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        """[count, dimension]."""
        ...


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


@dataclass(frozen=True)
class Windowed:
    """Frequencies on maps that look through a Gaussian window of random size and place: kernels of parts, averaged.

    A kernel on all of an image says how alike two images are as wholes, and a mean in it says little that survives
    noise. Parts are learned from all images that share them. A frequency w is white noise under its window, scaled so
    that w . x has standard deviation |x| / h under a public model of maps: x has the norm `norm`, spread evenly, and
    correlations that fall off over `correlation` sides. Windows (in sides) and bandwidths h are log-uniform.
    """

    shape: tuple[int, int, int]
    bandwidths: tuple[float, float]
    window: tuple[float, float]
    norm: float = 1.0
    correlation: float = 0.0

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        if dimension != math.prod(self.shape):
            raise ValueError(f"these frequencies are for maps of shape {self.shape}, got vectors of {dimension}")
        _, height, width = self.shape
        side, device = (height + width) / 2, generator.device
        noise = torch.randn(count, *self.shape, generator=generator, device=device)
        deviation = _log_uniform(self.window, count, generator)[:, None] * side

        def window(size: int) -> torch.Tensor:
            centre = torch.rand(count, 1, generator=generator, device=device) * (size - 1)
            return torch.exp(-((torch.arange(size, device=device) - centre) ** 2) / (2 * deviation**2))

        def correlated(maps: torch.Tensor) -> torch.Tensor:
            if self.correlation == 0:
                return maps
            rows, columns = (
                torch.exp(-(place[:, None] - place).abs() / (self.correlation * side))
                for place in (torch.arange(size, device=device) for size in (height, width))
            )
            return rows @ maps @ columns

        noise = noise * window(height)[:, None, :, None] * window(width)[:, None, None, :]
        spread = (correlated(noise) * noise).sum((1, 2, 3)) * self.norm**2 / dimension
        scale = self.norm / _log_uniform(self.bandwidths, count, generator) / spread.sqrt()
        return (noise * scale[:, None, None, None]).flatten(1)


def _log_uniform(limits: tuple[float, float], count: int, generator: torch.Generator) -> torch.Tensor:
    low, high = (math.log(limit) for limit in limits)
    return torch.exp(low + (high - low) * torch.rand(count, generator=generator, device=generator.device))
