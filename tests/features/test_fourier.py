"""Releases of kernel mean embeddings: norms of the rows (the sensitivity) and covariance of the noise."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.features.fourier import FrequencyBlock, PointEvaluations, RandomFourierFeatures
from sfumato.features.kernels import GaussianKernel

KERNEL = GaussianKernel((1.0, 2.5))


def flat(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def vectors(count: int, dimension: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- random Fourier features ----------------------------------------------------------------------------------


def test_fourier_features_have_norm_one_and_approximate_the_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 1, 2, 2, generator=generator)
    narrow = GaussianKernel((0.5,))
    terms = [FrequencyBlock(flat, KERNEL, 3.0), FrequencyBlock(lambda images: flat(images)[:, :2], narrow, 1.0)]
    features = RandomFourierFeatures(terms, 60_000, images, generator)
    rows = features(images)
    assert rows.shape == (7, 120_000)
    assert torch.allclose(rows.norm(dim=1), torch.ones(7), atol=1e-4)
    expected = 0.75 * KERNEL(flat(images), flat(images)) + 0.25 * narrow(flat(images)[:, :2], flat(images)[:, :2])
    assert torch.allclose(rows @ rows.T, expected, atol=0.03)


def test_noise_of_a_path_has_the_covariance_of_the_gaussian_process() -> None:
    """Values and derivatives at two points of the function with noisy coefficients, over many draws of frequencies."""
    generator = torch.Generator().manual_seed(1)
    points = vectors(2, 2, 3).float()
    kernel = GaussianKernel((1.3,))
    samples = []
    for _ in range(3000):
        features = RandomFourierFeatures([FrequencyBlock(flat, kernel)], 40, points, generator)
        x = points.clone().requires_grad_(True)
        values = features(x) @ torch.randn(80, generator=generator)
        (slopes,) = torch.autograd.grad(values.sum(), x)
        samples.append(torch.cat([values.detach(), slopes.flatten()]))
    found = torch.stack(samples).double().T.cov()
    assert torch.allclose(found, _covariance(PointEvaluations(kernel, points)), atol=0.12)


def _covariance(points: PointEvaluations) -> torch.Tensor:
    """Return the covariance of the output of `unwhiten` for standard normal input."""
    columns = []
    for unit in torch.eye(points.width, dtype=torch.float64):
        values, slopes = points.unwhiten(unit)
        columns.append(torch.cat([values, slopes.flatten()]))
    matrix = torch.stack(columns, 1)
    return matrix @ matrix.T


# -- point evaluations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dimension"), [(3, 2), (4, 9), (1, 5), (6, 40)])
def test_noise_at_points_has_the_covariance_of_the_gaussian_process(count: int, dimension: int) -> None:
    points = vectors(count, dimension)
    found = _covariance(PointEvaluations(KERNEL, points))
    for i in range(count):
        for j in range(count):
            x, y = points[i].clone().requires_grad_(True), points[j].clone().requires_grad_(True)
            value = _kernel(x, y)
            by_x, by_y = torch.autograd.grad(value, (x, y), create_graph=True)
            assert found[i, j].item() == pytest.approx(value.item(), abs=1e-6)
            slopes = count + dimension * j
            assert torch.allclose(found[i, slopes : slopes + dimension], by_y.detach(), atol=1e-6)
            for axis in range(dimension):
                (mixed,) = torch.autograd.grad(by_x[axis], y, retain_graph=True)
                row = count + dimension * i + axis
                assert torch.allclose(found[row, slopes : slopes + dimension], mixed, atol=1e-6)


def _kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the kernel, computed without a square root, which has no derivative at 0."""
    squares = (x - y).square().sum()
    return torch.stack([torch.exp(-squares / (2 * h**2)) for h in KERNEL.bandwidths]).mean()


@pytest.mark.parametrize("derivatives", [True, False])
@pytest.mark.parametrize(("count", "dimension"), [(1, 3), (5, 3), (5, 30), (12, 4)])
def test_rows_of_points_have_norm_at_most_one(count: int, dimension: int, derivatives: bool) -> None:
    points = PointEvaluations(KERNEL, vectors(count, dimension), derivatives=derivatives)
    near = torch.cat([vectors(200, dimension, 5), vectors(count, dimension), 0.01 + vectors(count, dimension)])
    rows = points.rows(near)
    assert rows.shape == (200 + 2 * count, points.width)
    norms = rows.norm(dim=1)
    assert norms.max() <= 1 + 1e-6
    at_points = points.rows(vectors(count, dimension)).norm(dim=1)
    assert torch.allclose(at_points, torch.ones(count, dtype=torch.float64), atol=1e-4)  # k(w_i, .) is in the span


def test_unwhiten_without_noise_returns_exact_values_and_derivatives() -> None:
    data, points = vectors(50, 20, 7), vectors(6, 20)
    functional = PointEvaluations(KERNEL, points)
    values, slopes = functional.unwhiten(functional.rows(data).sum(0))
    x = points.clone().requires_grad_(True)
    exact = KERNEL(data, x).sum(0)
    (exact_slopes,) = torch.autograd.grad(exact.sum(), x)
    assert torch.allclose(values, exact.detach(), atol=1e-6)
    assert torch.allclose(slopes, exact_slopes, atol=1e-6)


def test_repeated_points_are_allowed() -> None:
    points = vectors(3, 4)[[0, 0, 1, 2]]
    functional = PointEvaluations(KERNEL, points)
    assert functional.rows(vectors(50, 4, 9)).norm(dim=1).max() <= 1 + 1e-4
    values, _ = functional.unwhiten(torch.randn(functional.width, dtype=torch.float64))
    assert values[0].item() == pytest.approx(values[1].item(), abs=1e-3)
    assert math.isfinite(float(values.sum()))


def test_subsample_and_concatenate() -> None:
    """Subsampled features are entries of phi, rescaled to norm 1."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 5, generator=generator)
    terms = [
        FrequencyBlock(lambda x: x[:, :2], GaussianKernel((1.0,)), 0.3),
        FrequencyBlock(lambda x: x, GaussianKernel((2.0,)), 0.7),
    ]
    features = RandomFourierFeatures(terms, 100, images, generator)
    subset, entries = features.subsample(31, generator, features(images))
    assert torch.allclose(subset(images), entries, atol=1e-6)
    assert torch.allclose(subset(images).norm(dim=1), torch.ones(7), atol=1e-5)
    both = RandomFourierFeatures.concatenate([subset, features])
    assert torch.allclose(both(images), torch.cat([entries, features(images)], 1), atol=1e-6)
    assert torch.equal(both.like(both.tensors())(images), both(images))
