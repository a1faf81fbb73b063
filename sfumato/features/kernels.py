"""Shift-invariant kernels with k(x, x) = 1, and their spectral densities.

By Bochner's theorem k(x, y) is the expectation of cos(w . (x - y)) over frequencies w from the spectral density. A
kernel class therefore defines two things that agree: the values of k, and a sampler of frequencies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch


class SpectralDensity(Protocol):
    """A distribution of frequencies."""

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        """Draw frequencies, [count, dimension]."""
        ...


@dataclass(frozen=True)
class Kernel(ABC):
    """The mean over several bandwidths of a shift-invariant kernel.

    - bandwidths: length scales, all greater than 0.
    """

    bandwidths: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bandwidths or not all(h > 0 for h in self.bandwidths):
            raise ValueError(f"bandwidths must be greater than 0, got {self.bandwidths}")

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the kernel of all pairs of rows, [N, M]."""
        squares = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([self._profile(squares / h**2) for h in self.bandwidths]).mean(0)

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        """Draw frequencies from the spectral density, [count, dimension]; each has a random bandwidth."""
        device = generator.device
        choice = torch.randint(len(self.bandwidths), (count, 1), generator=generator, device=device)
        bandwidths = torch.tensor(self.bandwidths, device=device)[choice]
        normal = torch.randn(count, dimension, generator=generator, device=device)
        return normal / bandwidths * self._frequency_scale(count, generator)

    @abstractmethod
    def _profile(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the kernel of bandwidth 1 at these squared distances."""

    @abstractmethod
    def _frequency_scale(self, count: int, generator: torch.Generator) -> torch.Tensor | float:
        """Draw factors [count, 1] that turn standard normal vectors into frequencies of the kernel of bandwidth 1."""


@dataclass(frozen=True)
class GaussianKernel(Kernel):
    """exp(-|x - y|² / 2h²). Its spectral density is normal."""

    def _profile(self, squares: torch.Tensor) -> torch.Tensor:
        return torch.exp(-squares / 2)

    def _frequency_scale(self, count: int, generator: torch.Generator) -> float:  # noqa: ARG002
        return 1.0


@dataclass(frozen=True)
class WindowedSpectrum:
    """Frequencies under Gaussian windows of random size and centre: the mean of kernels on image regions.

    A kernel on the whole image compares images as wholes, and little of its mean embedding survives the noise. Windowed
    frequencies learn a local structure from all images that contain it. A frequency w is white noise times its window.
    It is scaled so that w . x has standard deviation |x| / h under a public model of the maps x: norm `norm`, equal
    variance at all positions, and correlations that decay exponentially with distance. Window sizes and bandwidths h
    are log-uniform.

    - shape: channels, height and width of the maps.
    - bandwidths: smallest and largest h.
    - window: smallest and largest standard deviation of a window, in image sides.
    - norm: norm of a map, default 1.
    - correlation: correlation length in image sides; 0 (default): uncorrelated.
    """

    shape: tuple[int, int, int]
    bandwidths: tuple[float, float]
    window: tuple[float, float]
    norm: float = 1.0
    correlation: float = 0.0

    def frequencies(self, count: int, dimension: int, generator: torch.Generator) -> torch.Tensor:
        """Draw frequencies, [count, dimension]; the dimension must match the shape."""
        if dimension != math.prod(self.shape):
            raise ValueError(f"these frequencies are for maps of shape {self.shape}, got vectors of length {dimension}")
        _, height, width = self.shape
        side, device = (height + width) / 2, generator.device
        noise = torch.randn(count, *self.shape, generator=generator, device=device)
        deviation = _log_uniform(self.window, count, generator)[:, None] * side

        def window(size: int) -> torch.Tensor:
            centre = torch.rand(count, 1, generator=generator, device=device) * (size - 1)
            return torch.exp(-((torch.arange(size, device=device) - centre) ** 2) / (2 * deviation**2))

        def apply_covariance(maps: torch.Tensor) -> torch.Tensor:
            if self.correlation == 0:
                return maps
            rows, columns = (
                torch.exp(-(position[:, None] - position).abs() / (self.correlation * side))
                for position in (torch.arange(size, device=device) for size in (height, width))
            )
            return rows @ maps @ columns

        noise = noise * window(height)[:, None, :, None] * window(width)[:, None, None, :]
        variance = (apply_covariance(noise) * noise).sum((1, 2, 3)) * self.norm**2 / dimension
        scale = self.norm / _log_uniform(self.bandwidths, count, generator) / variance.sqrt()
        return (noise * scale[:, None, None, None]).flatten(1)


def _log_uniform(limits: tuple[float, float], count: int, generator: torch.Generator) -> torch.Tensor:
    low, high = (math.log(limit) for limit in limits)
    return torch.exp(low + (high - low) * torch.rand(count, generator=generator, device=generator.device))
