"""The wavelet scattering transform (Mallat; Bruna and Mallat 2013), second order: features that nobody trained.

A cascade of fixed Morlet wavelets and moduli, averaged by a Gaussian: S0 = x ⋆ φ, S1 = |x ⋆ ψ| ⋆ φ,
S2 = ||x ⋆ ψ| ⋆ ψ'| ⋆ φ. It has no weights, hence no question about public data; it is Lipschitz and differentiable.
Filters and conventions are Kymatio's, and so are the numbers, to 1e-4.

What makes it fast: all filters of a scale in one transform; sub-sampling as a sum over the aliases of the spectrum; and
φ, which is separable, as two small matrices that average, sub-sample and cut off the border in one go. On a GPU small
images are multiplied by whole filters as matrices: far more arithmetic, and much less to move than a Fourier transform.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Array = np.ndarray[Any, np.dtype[Any]]

SIGMA, FREQUENCY = 0.8, 0.75 * math.pi  # of the finest wavelet; each scale doubles the one and halves the other
WRAPS = range(-2, 3)  # periods over which a filter is summed
LARGEST_MATRIX = 2**26  # entries, of filters as a matrix


class Scattering(nn.Module):
    """Images [N, C, H, W] to coefficients [N, C, channels, H / 2^scales, W / 2^scales].

    channels = 1 + J L + L² J (J - 1) / 2, which is 81 for the default J = 2 scales and L = 8 angles.
    """

    def __init__(self, size: tuple[int, int], scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        if scales < 1 or min(size) < 2**scales:
            raise ValueError(f"{scales} scales need images of at least {2**scales} pixels a side, got {size}")
        self.size, self.scales, self.angles = size, scales, angles
        self.channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        step = 2**scales
        padded = [((side + step) // step + 1) * step for side in size]
        self._padding = [amount for side, whole in zip(size, padded, strict=True) for amount in _around(side, whole)]
        self._matrices: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        self._small = 2 * angles * math.prod(padded) ** 2 <= LARGEST_MATRIX
        for scale in range(scales):
            spectra = [
                _morlet(padded, SIGMA * 2**scale, (angles - angles // 2 - 1 - n) * math.pi / angles, scale, 4 / angles)
                for n in range(angles)
            ]
            for resolution in range(min(scale + 1, max(scales - 1, 1))):
                levels = np.stack([_cropped(spectrum, resolution) for spectrum in spectra])
                self._keep(f"wavelets_{scale}_{resolution}", levels)
            for axis, side in enumerate(padded):
                self._keep(f"average_{scale}_{axis}", _averaging(side, scale, scales))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if tuple(images.shape[2:]) != self.size:
            raise ValueError(f"this transform is for images of {self.size}, got {tuple(images.shape[2:])}")
        top, bottom, left, right = self._padding
        flat = functional.pad(images.flatten(0, 1)[:, None], (left, right, top, bottom), mode="reflect")
        parts = [self._averaged(flat, 0)]
        second = []
        seen = self._seen(flat)
        for first in range(self.scales):
            maps = self._filtered(seen, first, 0)
            parts.append(self._averaged(maps, first))
            if first + 1 < self.scales:
                again = self._seen(maps)
                made = [self._filtered(again, scale, first) for scale in range(first + 1, self.scales)]
                kept = [self._averaged(m, scale) for scale, m in enumerate(made, first + 1)]
                # for each wavelet of the first order, all of the second
                second.append(torch.cat([k.unflatten(1, (self.angles, self.angles)) for k in kept], 2).flatten(1, 2))
        coefficients: torch.Tensor = torch.cat([*parts, *second], 1).unflatten(0, images.shape[:2])
        return coefficients

    def _seen(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps as filters take them: their spectra, or, for matrices, as they are."""
        return maps if self._by_matrix(maps) else torch.fft.fft2(maps)

    def _by_matrix(self, maps: torch.Tensor) -> bool:
        return self._small and maps.is_cuda

    def _filtered(self, seen: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """|x ⋆ ψ| for all maps and angles, sub-sampled to the wavelets' scale: [N, maps * angles, h, w]."""
        if not self._by_matrix(seen):
            return self._waves(seen, scale, resolution).abs().flatten(1, 2)
        height, width = (side >> (scale - resolution) for side in seen.shape[2:])
        pairs = seen.flatten(2) @ self._matrix(seen, scale, resolution)
        return torch.view_as_complex(pairs.unflatten(2, (self.angles, height, width, 2))).abs().flatten(1, 2)

    def _matrix(self, like: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """The filters of a scale, [pixels of a map, angles * h * w * 2]: what they make of each pixel by itself."""
        key = scale, resolution, like.device
        if key not in self._matrices:
            pixels = torch.eye(math.prod(like.shape[2:]), device=like.device).unflatten(1, (1, *like.shape[2:]))
            waves = self._waves(torch.fft.fft2(pixels), scale, resolution)
            self._matrices[key] = torch.view_as_real(waves).flatten(1).contiguous()
        return self._matrices[key]

    def _waves(self, spectra: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """x ⋆ ψ, sub-sampled: complex, [N, maps, angles, h, w]."""
        wavelets = getattr(self, f"wavelets_{scale}_{resolution}")
        factor = 2 ** (scale - resolution)
        height, width = (side // factor for side in spectra.shape[2:])
        total: torch.Tensor | None = None
        for down in range(factor):
            for right in range(factor):
                part = (..., slice(down * height, (down + 1) * height), slice(right * width, (right + 1) * width))
                product = spectra[part][:, :, None] * wavelets[part]
                total = product if total is None else total + product
        assert total is not None
        waves: torch.Tensor = torch.fft.ifft2(total / factor**2)
        return waves

    def _averaged(self, maps: torch.Tensor, scale: int) -> torch.Tensor:
        rows, columns = (getattr(self, f"average_{scale}_{axis}") for axis in range(2))
        averaged: torch.Tensor = rows @ maps @ columns.T
        return averaged

    def _keep(self, name: str, values: Array) -> None:
        self.register_buffer(name, torch.from_numpy(values).float(), persistent=False)


def _around(side: int, whole: int) -> tuple[int, int]:
    """Pixels added before and after."""
    return (whole - side) // 2, (whole - side + 1) // 2


def _gabor(size: list[int], sigma: float, angle: float, frequency: float, slant: float) -> Array:
    """A Gaussian, elongated by 1 / slant across `angle`, under a plane wave; summed over periods of the image."""
    cos, sin = math.cos(angle), math.sin(angle)
    height, width = size
    total: Array = np.zeros(size, dtype=np.complex128)
    for down in WRAPS:
        for right in WRAPS:
            y, x = np.mgrid[down * height : (down + 1) * height, right * width : (right + 1) * width]
            along, across = cos * y + sin * x, -sin * y + cos * x
            total += np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    return total / (2 * math.pi * sigma**2 / slant)


def _morlet(size: list[int], sigma: float, angle: float, scale: int, slant: float) -> Array:
    """Spectrum of a Gabor function less as much of its envelope as makes its sum zero."""
    wave = _gabor(size, sigma, angle, FREQUENCY / 2**scale, slant)
    envelope = _gabor(size, sigma, angle, 0.0, slant)
    spectrum: Array = np.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real
    return spectrum


def _cropped(spectrum: Array, resolution: int) -> Array:
    """A filter for maps that were sub-sampled by 2^resolution: the low frequencies of its spectrum, along all axes."""
    for axis, side in enumerate(spectrum.shape):
        short = side >> resolution
        keep = np.ones(side)
        if resolution:
            start = side >> (resolution + 1)
            keep[start : start + int(side * (1 - 2.0**-resolution))] = 0
        kept = np.moveaxis(spectrum, axis, 0) * keep.reshape(-1, *[1] * (spectrum.ndim - 1))
        spectrum = np.moveaxis(kept.reshape(-1, short, *kept.shape[1:]).sum(0), 0, axis)
    return spectrum


def _averaging(side: int, scale: int, scales: int) -> Array:
    """The low-pass along one axis as a matrix from maps of `scale` to coefficients, without the border."""
    sigma = SIGMA * 2 ** (scales - 1)
    place = np.concatenate([np.arange(wrap * side, (wrap + 1) * side) for wrap in WRAPS]).reshape(len(WRAPS), side)
    gaussian = np.exp(-(place**2) / (2 * sigma**2)).sum(0) / math.sqrt(2 * math.pi * sigma**2)
    spectrum = _cropped(np.fft.fft(gaussian).real, scale)
    fine, factor = side >> scale, 2 ** (scales - scale)
    coarse = fine // factor
    filtered = np.fft.fft(np.eye(fine), axis=0) * spectrum[:, None]
    aliased = filtered.reshape(factor, coarse, fine).mean(0)
    matrix: Array = np.fft.ifft(aliased, axis=0).real[1:-1]
    return matrix
