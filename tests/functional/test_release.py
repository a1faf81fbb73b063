"""Functions released by features and by points: norms that are charged for, the covariance of a Gaussian process."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.functional import Frequencies, Gaussian, Matern, Part, Points

KERNEL = Gaussian((1.0, 2.5))


def flat(images: torch.Tensor) -> torch.Tensor:
    return images.flatten(1)


def vectors(count: int, dimension: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- a whole path -------------------------------------------------------------------------------------------


def test_rows_of_frequencies_have_norm_one_and_the_kernel_for_their_products() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 1, 2, 2, generator=generator)
    parts = [Part(flat, KERNEL, 3.0), Part(lambda images: flat(images)[:, :2], Matern((1.0,)), 1.0)]
    features = Frequencies(parts, 60_000, images, generator)
    rows = features(images)
    assert rows.shape == (7, 120_000)
    assert torch.allclose(rows.norm(dim=1), torch.ones(7), atol=1e-4)
    expected = 0.75 * KERNEL(flat(images), flat(images)) + 0.25 * Matern((1.0,))(
        flat(images)[:, :2], flat(images)[:, :2]
    )
    assert torch.allclose(rows @ rows.T, expected, atol=0.03)


def test_a_path_has_the_covariance_of_the_process_and_of_its_derivatives() -> None:
    """Noise on the coefficients, seen as a function: values and slopes at two points, over many frequencies."""
    generator = torch.Generator().manual_seed(1)
    points = vectors(2, 2, 3).float()
    kernel = Gaussian((1.3,))
    seen = []
    for _ in range(3000):
        features = Frequencies([Part(flat, kernel)], 40, points, generator)
        places = points.clone().requires_grad_(True)
        values = features(places) @ torch.randn(80, generator=generator)
        (slopes,) = torch.autograd.grad(values.sum(), places)
        seen.append(torch.cat([values.detach(), slopes.flatten()]))
    found = torch.stack(seen).double().T.cov()
    exact = Points(kernel, points)
    gram = _joint(exact)
    assert torch.allclose(found, gram, atol=0.12)


def _joint(points: Points) -> torch.Tensor:
    """Covariance of values and derivatives as `coloured` makes them of standard noise."""
    columns = []
    for unit in torch.eye(points.width, dtype=torch.float64):
        values, slopes = points.coloured(unit)
        columns.append(torch.cat([values, slopes.flatten()]))
    matrix = torch.stack(columns, 1)
    return matrix @ matrix.T


# -- chosen points --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "dimension"), [(3, 2), (4, 9), (1, 5), (6, 40)])
def test_noise_at_points_has_the_exact_covariance(count: int, dimension: int) -> None:
    points = vectors(count, dimension)
    found = _joint(Points(KERNEL, points))
    for i in range(count):
        for j in range(count):
            one, other = points[i].clone().requires_grad_(True), points[j].clone().requires_grad_(True)
            value = _smooth(one, other)
            (to_one, to_other) = torch.autograd.grad(value, (one, other), create_graph=True)
            assert found[i, j].item() == pytest.approx(value.item(), abs=1e-6)
            slopes = count + dimension * j
            assert torch.allclose(found[i, slopes : slopes + dimension], to_other.detach(), atol=1e-6)
            for axis in range(dimension):
                (mixed,) = torch.autograd.grad(to_one[axis], other, retain_graph=True)
                row = count + dimension * i + axis
                assert torch.allclose(found[row, slopes : slopes + dimension], mixed, atol=1e-6)


def _smooth(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The kernel without a distance's root, which has no derivative at 0."""
    squares = (one - other).square().sum()
    return torch.stack([torch.exp(-squares / (2 * h**2)) for h in KERNEL.bandwidths]).mean()


@pytest.mark.parametrize("derivatives", [True, False])
@pytest.mark.parametrize(("count", "dimension"), [(1, 3), (5, 3), (5, 30), (12, 4)])
def test_rows_have_norm_at_most_one(count: int, dimension: int, derivatives: bool) -> None:
    points = Points(KERNEL, vectors(count, dimension), derivatives=derivatives)
    near = torch.cat([vectors(200, dimension, 5), vectors(count, dimension), 0.01 + vectors(count, dimension)])
    rows = points.rows(near)
    assert rows.shape == (200 + 2 * count, points.width)
    norms = rows.norm(dim=1)
    assert norms.max() <= 1 + 1e-6
    at_points = points.rows(vectors(count, dimension)).norm(dim=1)
    assert torch.allclose(at_points, torch.ones(count, dtype=torch.float64), atol=1e-4)  # they span themselves


def test_without_noise_values_and_slopes_are_those_of_the_function() -> None:
    data, points = vectors(50, 20, 7), vectors(6, 20)
    functional = Points(KERNEL, points)
    values, slopes = functional.coloured(functional.rows(data).sum(0))
    places = points.clone().requires_grad_(True)
    exact = KERNEL(data, places).sum(0)
    (exact_slopes,) = torch.autograd.grad(exact.sum(), places)
    assert torch.allclose(values, exact.detach(), atol=1e-6)
    assert torch.allclose(slopes, exact_slopes, atol=1e-6)


def test_repeated_points_do_no_harm() -> None:
    points = vectors(3, 4)[[0, 0, 1, 2]]
    functional = Points(KERNEL, points)
    assert functional.rows(vectors(50, 4, 9)).norm(dim=1).max() <= 1 + 1e-4
    values, _ = functional.coloured(torch.randn(functional.width, dtype=torch.float64))
    assert values[0].item() == pytest.approx(values[1].item(), abs=1e-3)
    assert math.isfinite(float(values.sum()))


def test_some_of_the_frequencies_are_features_of_their_own() -> None:
    """Drawn features are the same entries of phi, larger, so that their norm is 1 again."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 5, generator=generator)
    parts = [Part(lambda x: x[:, :2], Gaussian((1.0,)), 0.3), Part(lambda x: x, Gaussian((2.0,)), 0.7)]
    features = Frequencies(parts, 100, images, generator)
    some, entries = features.drawn(31, generator, features(images))
    assert torch.allclose(some(images), entries, atol=1e-6)
    assert torch.allclose(some(images).norm(dim=1), torch.ones(7), atol=1e-5)
    both = Frequencies.beside([some, features])
    assert torch.allclose(both(images), torch.cat([entries, features(images)], 1), atol=1e-6)
    assert torch.equal(both.like(both.tensors())(images), both(images))
