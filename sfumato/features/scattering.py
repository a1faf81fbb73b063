"""Wavelet scattering transform of second order (Mallat 2012; Bruna and Mallat 2013).

A cascade of fixed Morlet wavelets ψ and moduli with a Gaussian low-pass filter φ: S0 = x ⋆ φ, S1 = |x ⋆ ψ| ⋆ φ,
S2 = ||x ⋆ ψ| ⋆ ψ'| ⋆ φ. The transform has no trained weights, so it uses no data; it is Lipschitz and differentiable.
Filters and conventions follow Kymatio; the coefficients agree to 1e-4.

Speed: all filters of a scale share one Fourier transform. Subsampling sums the aliases of the spectrum. The filter φ
is separable: two small matrices average, subsample and crop in one product. On a GPU the filters of small images are
dense matrices: this needs more arithmetic than a Fourier transform, but far less memory traffic.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Array = np.ndarray[Any, np.dtype[Any]]

SIGMA, FREQUENCY = 0.8, 0.75 * math.pi  # of the finest wavelet; each scale doubles SIGMA and halves FREQUENCY
PERIODS = range(-2, 3)  # periods of the image over which a filter is summed
MAX_MATRIX_ENTRIES = 2**26  # largest filter matrix on a GPU


class Scattering(nn.Module):
    """Map images [N, C, H, W] to scattering coefficients [N, C, channels, H / 2^J, W / 2^J].

    The number of channels is 1 + J L + L² J (J - 1) / 2, which is 81 for the defaults.

    - size: height and width of the images, at least 2^J.
    - scales: J, default 2.
    - angles: L, default 8.
    """

    def __init__(self, size: tuple[int, int], scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        if scales < 1 or min(size) < 2**scales:
            raise ValueError(f"{scales} scales need images of at least {2**scales} pixels per side, got {size}")
        self.size, self.scales, self.angles = size, scales, angles
        self.channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        step = 2**scales
        height, width = (((side + step) // step + 1) * step for side in size)
        padded = height, width
        self._padding = [amount for side, total in zip(size, padded, strict=True) for amount in _margins(side, total)]
        self._matrices: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        self._fits_matrix = 2 * angles * math.prod(padded) ** 2 <= MAX_MATRIX_ENTRIES
        for scale in range(scales):
            spectra = [
                _morlet(padded, SIGMA * 2**scale, (angles - angles // 2 - 1 - n) * math.pi / angles, scale, 4 / angles)
                for n in range(angles)
            ]
            for resolution in range(min(scale + 1, max(scales - 1, 1))):
                cropped = np.stack([_cropped(spectrum, resolution) for spectrum in spectra])
                self._register(f"wavelets_{scale}_{resolution}", cropped)
            for axis, side in enumerate(padded):
                self._register(f"average_{scale}_{axis}", _averaging(side, scale, scales))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if tuple(images.shape[2:]) != self.size:
            raise ValueError(f"this transform is for images of size {self.size}, got {tuple(images.shape[2:])}")
        top, bottom, left, right = self._padding
        flat = functional.pad(images.flatten(0, 1)[:, None], (left, right, top, bottom), mode="reflect")
        first_orders = [self._low_pass(flat, 0)]
        second_orders = []
        inputs = self._filter_input(flat)
        for first in range(self.scales):
            maps = self._modulus(inputs, first, 0)
            first_orders.append(self._low_pass(maps, first))
            if first + 1 < self.scales:
                inputs_2 = self._filter_input(maps)
                maps_2 = [self._modulus(inputs_2, scale, first) for scale in range(first + 1, self.scales)]
                averaged = [self._low_pass(m, scale) for scale, m in enumerate(maps_2, first + 1)]
                # Kymatio's order: for each wavelet of the first order, all wavelets of the second.
                by_wavelet = torch.cat([k.unflatten(1, (self.angles, self.angles)) for k in averaged], 2)
                second_orders.append(by_wavelet.flatten(1, 2))
        coefficients: torch.Tensor = torch.cat([*first_orders, *second_orders], 1).unflatten(0, images.shape[:2])
        return coefficients

    def _filter_input(self, maps: torch.Tensor) -> torch.Tensor:
        """Return the input of `_modulus`: the maps for dense filters, else their spectra."""
        return maps if self._by_matrix(maps) else torch.fft.fft2(maps)

    def _by_matrix(self, maps: torch.Tensor) -> bool:
        return self._fits_matrix and maps.is_cuda

    def _modulus(self, inputs: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """Return |x ⋆ ψ| for all maps and angles, subsampled to the scale of ψ: [N, maps * angles, h, w]."""
        if not self._by_matrix(inputs):
            return self._convolve(inputs, scale, resolution).abs().flatten(1, 2)
        height, width = (side >> (scale - resolution) for side in inputs.shape[2:])
        pairs = inputs.flatten(2) @ self._matrix(inputs, scale, resolution)
        return torch.view_as_complex(pairs.unflatten(2, (self.angles, height, width, 2))).abs().flatten(1, 2)

    def _matrix(self, like: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """Return the filters of a scale as a matrix, [pixels, angles * h * w * 2]: the responses to each pixel."""
        key = scale, resolution, like.device
        if key not in self._matrices:
            pixels = torch.eye(math.prod(like.shape[2:]), device=like.device).unflatten(1, (1, *like.shape[2:]))
            response = self._convolve(torch.fft.fft2(pixels), scale, resolution)
            self._matrices[key] = torch.view_as_real(response).flatten(1).contiguous()
        return self._matrices[key]

    def _convolve(self, spectra: torch.Tensor, scale: int, resolution: int) -> torch.Tensor:
        """Return x ⋆ ψ, subsampled: complex, [N, maps, angles, h, w]."""
        wavelets = getattr(self, f"wavelets_{scale}_{resolution}")
        factor = 2 ** (scale - resolution)
        height, width = (side // factor for side in spectra.shape[2:])
        total: torch.Tensor | None = None
        for row in range(factor):
            for column in range(factor):
                alias = (..., slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                product = spectra[alias][:, :, None] * wavelets[alias]
                total = product if total is None else total + product
        assert total is not None
        filtered: torch.Tensor = torch.fft.ifft2(total / factor**2)
        return filtered

    def _low_pass(self, maps: torch.Tensor, scale: int) -> torch.Tensor:
        rows, columns = (getattr(self, f"average_{scale}_{axis}") for axis in range(2))
        averaged: torch.Tensor = rows @ maps @ columns.T
        return averaged

    def _register(self, name: str, values: Array) -> None:
        self.register_buffer(name, torch.from_numpy(values).float(), persistent=False)


def _margins(side: int, total: int) -> tuple[int, int]:
    """Return the padding before and after."""
    return (total - side) // 2, (total - side + 1) // 2


def _gabor(size: tuple[int, int], sigma: float, angle: float, frequency: float, slant: float) -> Array:
    """Return a Gabor filter: a plane wave times a Gaussian of aspect ratio 1 / slant, summed over periods."""
    cos, sin = math.cos(angle), math.sin(angle)
    height, width = size
    total: Array = np.zeros(size, dtype=np.complex128)
    for row in PERIODS:
        for column in PERIODS:
            y, x = np.mgrid[row * height : (row + 1) * height, column * width : (column + 1) * width]
            along, across = cos * y + sin * x, -sin * y + cos * x
            total += np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    return total / (2 * math.pi * sigma**2 / slant)


@lru_cache(maxsize=32)  # the filters of two sizes of images: a method makes the same transform several times
def _morlet(size: tuple[int, int], sigma: float, angle: float, scale: int, slant: float) -> Array:
    """Return the spectrum of a Morlet wavelet: a Gabor filter minus a multiple of its envelope, with sum zero."""
    wave = _gabor(size, sigma, angle, FREQUENCY / 2**scale, slant)
    envelope = _gabor(size, sigma, angle, 0.0, slant)
    spectrum: Array = np.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real
    return spectrum


def _cropped(spectrum: Array, resolution: int) -> Array:
    """Return the low frequencies of a filter's spectrum, for maps that are subsampled by 2^resolution."""
    for axis, side in enumerate(spectrum.shape):
        short = side >> resolution
        mask = np.ones(side)
        if resolution:
            start = side >> (resolution + 1)
            mask[start : start + int(side * (1 - 2.0**-resolution))] = 0
        masked = np.moveaxis(spectrum, axis, 0) * mask.reshape(-1, *[1] * (spectrum.ndim - 1))
        spectrum = np.moveaxis(masked.reshape(-1, short, *masked.shape[1:]).sum(0), 0, axis)
    return spectrum


def _averaging(side: int, scale: int, scales: int) -> Array:
    """Return φ along one axis as a matrix, from maps at `scale` to coefficients without the padding."""
    sigma = SIGMA * 2 ** (scales - 1)
    position = np.concatenate([np.arange(p * side, (p + 1) * side) for p in PERIODS]).reshape(len(PERIODS), side)
    gaussian = np.exp(-(position**2) / (2 * sigma**2)).sum(0) / math.sqrt(2 * math.pi * sigma**2)
    spectrum = _cropped(np.fft.fft(gaussian).real, scale)
    fine, factor = side >> scale, 2 ** (scales - scale)
    coarse = fine // factor
    filtered = np.fft.fft(np.eye(fine), axis=0) * spectrum[:, None]
    aliased = filtered.reshape(factor, coarse, fine).mean(0)
    matrix: Array = np.fft.ifft(aliased, axis=0).real[1:-1]
    return matrix
