"""Kernels and their spectral densities agree."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.functional import Gaussian, Kernel, Matern

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
