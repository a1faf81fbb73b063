"""Kernels agree with their spectral densities."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.features.kernels import GaussianKernel, Kernel, WindowedSpectrum

KERNELS = [
    GaussianKernel((1.0,)),
    GaussianKernel((0.5, 2.0, 4.0)),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_mean_cosine_over_frequencies_equals_the_kernel(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(6, 3, generator=generator)
    frequencies = kernel.frequencies(400_000, 3, generator)
    phases = (points[:, None] - points).reshape(-1, 3) @ frequencies.T
    mean = phases.cos().mean(1).view(6, 6)
    assert torch.allclose(mean, kernel(points, points), atol=5 / math.sqrt(400_000))


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_kernel_is_normalised_and_positive_semidefinite(kernel: Kernel) -> None:
    points = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    gram = kernel(points, points)
    assert torch.allclose(gram.diagonal(), torch.ones(5))
    assert torch.linalg.eigvalsh(gram.double()).min() > -1e-6


def test_invalid_bandwidths_raise_errors() -> None:
    with pytest.raises(ValueError, match="bandwidths"):
        GaussianKernel(())
    with pytest.raises(ValueError, match="bandwidths"):
        GaussianKernel((1.0, -1.0))


@pytest.mark.parametrize("correlation", [0.0, 0.25])
def test_windowed_frequencies_have_the_deviation_of_the_public_model(correlation: float) -> None:
    """For maps x from the model, w . x has standard deviation |x| / h, with h within its range."""
    shape, norm = (2, 9, 11), 1.7
    spectrum = WindowedSpectrum(shape, (0.5, 2.0), (0.1, 1.0), norm, correlation)
    frequencies = spectrum.frequencies(60, 198, torch.Generator().manual_seed(0))
    maps = torch.randn(4000, *shape, generator=torch.Generator().manual_seed(1))
    if correlation:
        for axis, size in ((2, 9), (3, 11)):
            position = torch.arange(size)
            root = torch.linalg.cholesky(torch.exp(-(position[:, None] - position).abs() / (correlation * 10)))
            maps = (maps.movedim(axis, 3) @ root.T).movedim(3, axis)
    deviation = (maps.flatten(1) * norm / math.sqrt(198) @ frequencies.T).std(0)
    assert deviation.min() > norm / 2.0 * 0.9
    assert deviation.max() < norm / 0.5 * 1.1


def test_energy_is_concentrated_in_the_window() -> None:
    spectrum = WindowedSpectrum((1, 20, 20), (1.0, 1.0), (0.05, 0.05))
    energy = spectrum.frequencies(30, 400, torch.Generator().manual_seed(0)).view(30, 400).square()
    largest = energy.sort(1, descending=True).values
    assert (largest[:, :25].sum(1) / largest.sum(1)).min() > 0.8
    with pytest.raises(ValueError, match="maps of shape"):
        spectrum.frequencies(3, 399, torch.Generator())
