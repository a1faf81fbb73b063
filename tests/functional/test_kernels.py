"""Kernels and their spectral densities agree."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.functional import Gaussian, Kernel, Matern, Windowed

KERNELS = [
    Gaussian((1.0,)),
    Gaussian((0.5, 2.0, 4.0)),
    Matern((1.0,)),
    Matern((1.0, 3.0), smoothness=1.5),
    Matern((2.0,), smoothness=2.5),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_random_frequencies_have_the_kernel_for_their_mean_cosine(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(6, 3, generator=generator)
    frequencies = kernel.frequencies(400_000, 3, generator)
    phases = (points[:, None] - points).reshape(-1, 3) @ frequencies.T
    mean = phases.cos().mean(1).view(6, 6)
    assert torch.allclose(mean, kernel(points, points), atol=5 / math.sqrt(400_000))


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_point_has_norm_one(kernel: Kernel) -> None:
    points = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    gram = kernel(points, points)
    assert torch.allclose(gram.diagonal(), torch.ones(5))
    assert torch.linalg.eigvalsh(gram.double()).min() > -1e-6


def test_laplace_is_the_roughest_matern() -> None:
    one, other = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
    assert Matern((2.0,))(one, other).item() == pytest.approx(math.exp(-2.5))


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidths"):
        Gaussian(())
    with pytest.raises(ValueError, match="bandwidths"):
        Gaussian((1.0, -1.0))
    with pytest.raises(ValueError, match="smoothness"):
        Matern((1.0,), smoothness=2.0)


@pytest.mark.parametrize("correlation", [0.0, 0.25])
def test_windowed_frequencies_vary_as_the_public_model_says(correlation: float) -> None:
    """Maps drawn from the model: w . x has a standard deviation of |x| / h, with h within its range."""
    shape, norm = (2, 9, 11), 1.7
    drawn = Windowed(shape, (0.5, 2.0), (0.1, 1.0), norm, correlation).frequencies(
        60, 198, torch.Generator().manual_seed(0)
    )
    maps = torch.randn(4000, *shape, generator=torch.Generator().manual_seed(1))
    if correlation:
        for axis, size in ((2, 9), (3, 11)):
            place = torch.arange(size)
            root = torch.linalg.cholesky(torch.exp(-(place[:, None] - place).abs() / (correlation * 10)))
            maps = (maps.movedim(axis, 3) @ root.T).movedim(3, axis)
    deviation = (maps.flatten(1) * norm / math.sqrt(198) @ drawn.T).std(0)
    assert deviation.min() > norm / 2.0 * 0.9
    assert deviation.max() < norm / 0.5 * 1.1


def test_windows_are_windows() -> None:
    drawn = Windowed((1, 20, 20), (1.0, 1.0), (0.05, 0.05)).frequencies(30, 400, torch.Generator().manual_seed(0))
    energy = drawn.view(30, 400).square()
    largest = energy.sort(1, descending=True).values
    assert (largest[:, :25].sum(1) / largest.sum(1)).min() > 0.8
    with pytest.raises(ValueError, match="maps of shape"):
        Windowed((1, 20, 20), (1.0, 1.0), (0.05, 0.05)).frequencies(3, 399, torch.Generator())
