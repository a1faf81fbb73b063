"""Gaussian distributions of classes: norm of the moments, estimates without noise and with it, draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from sfumato.features import class_gaussians as module
from sfumato.features.class_gaussians import ClassGaussians, moment_rows, moved, product_rows, weighted_covariances

WIDTH, ROUNDING = 6, 1e-5
VARIANCES = torch.tensor([0.08, 0.05, 0.03, 0.02, 0.01, 0.01])  # of public rows
SPREAD = torch.diag(VARIANCES)


def rows_of(count: int, seed: int) -> torch.Tensor:
    """Draw correlated rows of norm at most one, whose mean and covariance depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    turn = 0.4 * torch.randn(WIDTH, WIDTH, generator=generator) + torch.eye(WIDTH)
    mean = 0.3 * functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    rows = mean + torch.randn(count, WIDTH, generator=generator) * VARIANCES.sqrt() @ turn / 2
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1)


def sums_of(classes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact sums of moments, and counts."""
    return torch.stack([moment_rows(rows).sum(0) for rows in classes]), torch.tensor([len(rows) for rows in classes])


def covariances(found: ClassGaussians) -> torch.Tensor:
    return found.roots @ found.roots.mT


def exact(rows: torch.Tensor) -> torch.Tensor:
    return torch.cov(rows.T, correction=0)


# -- moments ----------------------------------------------------------------------------------------------


def extreme_rows() -> torch.Tensor:
    """Return rows of norm one: random ones, a single coordinate, equal coordinates; and shorter ones."""
    random = functional.normalize(torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0)), dim=1)
    long = torch.cat([random, torch.eye(WIDTH), -torch.eye(WIDTH), torch.full((1, WIDTH), WIDTH**-0.5)])
    return torch.cat([long, 0.5 * long, torch.zeros(1, WIDTH)])


def test_the_norm_is_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = extreme_rows()
    moments = moment_rows(rows)
    assert moments.shape == (len(rows), WIDTH + WIDTH * (WIDTH + 1) // 2)
    assert moments.norm(dim=1).max() <= 1 + ROUNDING
    ends = moments[rows.norm(dim=1) > 0.99]
    assert torch.allclose(ends.norm(dim=1), torch.ones(len(ends)), atol=ROUNDING)  # no part of the bound is wasted
    assert not moments[-1].any()
    factors = module._factors
    monkeypatch.setattr(module, "_factors", lambda upper: factors(upper) ** 2)  # planted: 2 instead of its root
    assert moment_rows(rows).norm(dim=1).max() > 1.1


def test_the_norm_of_products_is_that_of_the_row_squared() -> None:
    rows = extreme_rows()
    assert torch.allclose(product_rows(rows).norm(dim=1), rows.norm(dim=1).square(), atol=ROUNDING)


def test_moments_are_of_each_row_alone() -> None:
    rows = rows_of(9, 0)
    assert torch.allclose(torch.cat([moment_rows(row[None]) for row in rows]), moment_rows(rows), atol=1e-6)


# -- estimates without noise ------------------------------------------------------------------------------


def largest_error(classes: list[torch.Tensor], found: ClassGaussians) -> float:
    """Return the largest error of means and covariances, relative to the largest entry of the latter."""
    scale = max(float(exact(rows).abs().max()) for rows in classes)
    means = max(float((mean - rows.mean(0)).abs().max()) for mean, rows in zip(found.means, classes, strict=True))
    pairs = zip(covariances(found), classes, strict=True)
    return max(means, *(float((got - exact(rows)).abs().max()) for got, rows in pairs)) / scale


def test_without_noise_the_moments_are_exact() -> None:
    """For classes of other size, mean and covariance; public rows have another spread."""
    classes = [rows_of(count, seed) for seed, count in enumerate((500, 90, 30))]
    sums, counts = sums_of(classes)
    assert largest_error(classes, ClassGaussians.of(sums, counts, 0.0, SPREAD)) < 1e-3
    assert largest_error(classes, ClassGaussians.of(sums, counts.flip(0), 0.0, SPREAD)) > 0.5  # other counts
    assert largest_error(classes, ClassGaussians.of(sums.flip(0), counts.flip(0), 0.0, SPREAD)) > 0.5  # other classes
    assert largest_error(classes[:1], ClassGaussians.of(sums[:1], counts[:1], 0.0, SPREAD)) < 1e-3  # a single class


@pytest.mark.parametrize("name", ["_factors", "FIRST_WEIGHT"])
def test_other_weights_than_those_of_the_moments_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [rows_of(200, seed) for seed in range(2)]
    sums, counts = sums_of(classes)
    monkeypatch.setattr(module, name, 0.6 if name == "FIRST_WEIGHT" else lambda upper: torch.ones(upper.shape[1]))
    assert largest_error(classes, ClassGaussians.of(sums, counts, 0.0, SPREAD)) > 0.1


# -- filtering --------------------------------------------------------------------------------------------


def test_where_noise_hides_all_a_covariance_is_the_public_spread() -> None:
    """The sums have no noise here, so that the means are known; the estimate is told that there is much."""
    classes = [rows_of(100, 0), 0.7 * rows_of(100, 1)]
    found = ClassGaussians.of(*sums_of(classes), 10.0, SPREAD)
    for mean, covariance, rows in zip(found.means, covariances(found), classes, strict=True):
        assert torch.allclose(mean, rows.mean(0), atol=1e-5)
        assert torch.allclose(covariance, SPREAD, atol=4e-3)
        assert not torch.allclose(covariance, exact(rows), atol=1e-2)


def test_where_noise_hides_the_classes_they_share_the_mean_covariance() -> None:
    """A hundred equal classes: each is below the noise, their mean is far above it."""
    rows = rows_of(1000, 3)
    sums, counts = sums_of([rows] * 100)
    noise = 5.0
    noisy = sums + noise * torch.randn(sums.shape, generator=torch.Generator().manual_seed(0))
    found = covariances(ClassGaussians.of(noisy, counts, noise, SPREAD))
    scaled = found / found.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]  # traces are noisy
    truth, public = exact(rows) / exact(rows).trace(), SPREAD / SPREAD.trace()
    assert (scaled - truth).norm(dim=(1, 2)).median() < 0.3 * (public - truth).norm()


WIDE = 0.2 * torch.arange(1, 41.0) ** -1.5  # spread of public rows in 40 dimensions, few of them large


def wide_rows(seed: int) -> torch.Tensor:
    """Draw a thousand rows, correlated a little, with a spread near `WIDE`."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.eye(40) + 0.1 * torch.randn(40, 40, generator=generator)
    rows = 0.05 + torch.randn(1000, 40, generator=generator) * WIDE.sqrt() @ turn
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1)


def estimates(noise: float, claimed: float, draws: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Return covariances of three classes of wide rows from noisy sums, [draws, 3, 40, 40], and the exact ones."""
    classes = [wide_rows(seed) for seed in range(3)]
    (sums, counts), generator = sums_of(classes), torch.Generator().manual_seed(0)
    noisy = [sums + noise * torch.randn(sums.shape, generator=generator) for _ in range(draws)]
    found = [covariances(ClassGaussians.of(each, counts, claimed, torch.diag(WIDE))) for each in noisy]
    return torch.stack(found), torch.stack([exact(rows) for rows in classes])


def error(noise: float, claimed: float) -> float:
    """Return the error of covariances, relative to their norm."""
    found, truth = estimates(noise, claimed)
    return float((found - truth).square().sum((1, 2, 3)).mean().sqrt() / truth.norm())


def test_covariances_are_recovered_from_noisy_sums() -> None:
    """With much noise the filter is better than none; and it is best if it is told the right noise."""
    assert error(1.0, 1.0) < 0.2
    assert error(5.0, 5.0) < 0.45
    assert error(5.0, 5.0) < 0.85 * error(5.0, 0.0)
    assert error(20.0, 20.0) < 0.85 * error(20.0, 0.0)
    assert error(5.0, 5.0) < 0.6 * error(5.0, 50.0)  # planted: ten times the noise


def test_noise_does_not_change_the_mean_trace() -> None:
    """The square of a noisy mean is too large, by the variance of its noise; the trace must not lose that.

    Here that would be 0.14 of 0.54; the standard error of the mean over 40 draws and three classes is 0.02.
    """
    found, truth = estimates(30.0, 30.0, draws=40)
    traces = found.diagonal(dim1=2, dim2=3).sum(2)
    assert float(traces.mean()) == pytest.approx(float(truth.diagonal(dim1=1, dim2=2).sum(1).mean()), abs=0.07)


@pytest.mark.parametrize("noise", [0.0, 0.5, 10.0, 300.0])
def test_covariances_have_no_negative_directions(noise: float) -> None:
    """Thirty images of a class: the noisy matrices are indefinite, most of them with a negative trace."""
    classes = [rows_of(30, seed) for seed in range(4)]
    sums, counts = sums_of(classes)
    noisy = sums + noise * torch.randn(sums.shape, generator=torch.Generator().manual_seed(1))
    found = ClassGaussians.of(noisy, counts, noise, SPREAD)
    got = covariances(found).double()
    assert got.isfinite().all()
    assert torch.allclose(got, got.mT)
    assert torch.linalg.eigvalsh(got).min() > -1e-5 * max(1.0, float(got.abs().max()))
    means = noisy[:, :WIDTH] / counts[:, None] / module.FIRST_WEIGHT
    assert torch.allclose(found.means, means / means.norm(dim=1, keepdim=True).clamp_min(1), atol=1e-4)
    assert found.means.norm(dim=1).max() <= 1 + ROUNDING  # as those of rows must be
    assert bool((means.norm(dim=1) > 1).any()) == (noise > 1)


def test_noise_collapses_no_class() -> None:
    """Small classes: the trace of the noisy matrix is negative in many; what is left must not be without spread."""
    sums, counts = sums_of([0.5 * rows_of(100, seed) for seed in range(40)])
    noise = 20.0
    noisy = sums + noise * torch.randn(sums.shape, generator=torch.Generator().manual_seed(0))
    traces = covariances(ClassGaussians.of(noisy, counts, noise, SPREAD / 4)).diagonal(dim1=1, dim2=2).sum(1)
    truth = float(
        torch.stack([exact(0.5 * rows_of(100, seed)) for seed in range(40)]).diagonal(dim1=1, dim2=2).sum(1).mean()
    )
    assert traces.min() > 0.2 * truth
    assert traces.max() < 3 * truth


def test_equal_rows_have_no_spread() -> None:
    rows = rows_of(1, 0).expand(20, -1)
    found = ClassGaussians.of(*sums_of([rows, rows]), 0.0, SPREAD)
    assert torch.allclose(found.means, rows[:2], atol=1e-5)
    assert found.roots.isfinite().all()
    assert found.roots.abs().max() < 2e-3


# -- the sum over all images, and what is expected -----------------------------------------------------------


def error_with_common(noise: float, noise_of_common: float, claimed: float) -> float:
    """Return the mean relative error of covariances of three classes, over six draws of the noise."""
    classes = [wide_rows(seed) for seed in range(3)]
    (sums, counts), generator = sums_of(classes), torch.Generator().manual_seed(0)
    truth, found = torch.stack([exact(rows) for rows in classes]), []
    for _ in range(6):
        noisy = sums + noise * torch.randn(sums.shape, generator=generator)
        product = sum(product_rows(rows).sum(0) for rows in classes)
        assert isinstance(product, torch.Tensor)
        common = product + noise_of_common * torch.randn(product.shape, generator=generator), claimed
        found.append(covariances(ClassGaussians.of(noisy, counts, noise, torch.diag(WIDE), common)))
    return float((torch.stack(found) - truth).square().sum((1, 2, 3)).mean().sqrt() / truth.norm())


def test_a_sum_over_all_images_is_used_as_far_as_it_is_exact() -> None:
    alone = error(20.0, 20.0)
    assert error_with_common(20.0, 1.0, 1.0) < 0.9 * alone
    assert error_with_common(20.0, 2000.0, 2000.0) == pytest.approx(alone, rel=0.05)  # it says nothing
    assert error_with_common(20.0, 2000.0, 1.0) > 1.4 * alone  # planted: its noise is thought to be small


def test_without_noise_a_sum_over_all_images_changes_nothing() -> None:
    classes = [rows_of(count, seed) for seed, count in enumerate((500, 90, 30))]
    sums, counts = sums_of(classes)
    common = torch.stack([product_rows(rows).sum(0) for rows in classes]).sum(0), 0.0
    assert largest_error(classes, ClassGaussians.of(sums, counts, 0.0, SPREAD, common)) < 1e-3
    assert ClassGaussians.of(sums, counts, 5.0, SPREAD, common).roots.isfinite().all()


def test_where_noise_hides_the_classes_they_have_the_expected_covariances() -> None:
    """What gives them is told exact means, shares and, as the sum of all is exact, the covariance within classes."""
    classes = [rows_of(100, 0), rows_of(300, 1)]
    sums, counts = sums_of(classes)
    told: list[torch.Tensor] = []
    wanted = torch.stack([SPREAD, 0.5 * SPREAD.flip(0, 1)]).double()

    def expected(*given: torch.Tensor) -> torch.Tensor:
        told.extend(given)
        return wanted

    common = torch.stack([product_rows(rows).sum(0) for rows in classes]).sum(0), 0.0
    found = ClassGaussians.of(sums, counts, 10.0, SPREAD, common, expected)
    assert torch.allclose(covariances(found).double(), wanted, atol=4e-3)
    means, shares, within = told
    assert torch.allclose(means.float(), torch.stack([rows.mean(0) for rows in classes]), atol=1e-5)
    assert shares.tolist() == [0.25, 0.75]
    bias = (
        10.0**2 * (0.25 / 100**2 + 0.75 / 300**2) / module.FIRST_WEIGHT**2
    )  # of squares of means; here they are exact
    truth = 0.25 * exact(classes[0]) + 0.75 * exact(classes[1]) + bias * torch.eye(WIDTH)
    assert torch.allclose(within.float(), truth, atol=1e-3)


def test_moved_rows_have_the_mean_and_covariance_that_are_wanted() -> None:
    rows, wanted = rows_of(400, 0), rows_of(400, 1)
    made = moved(rows, wanted.mean(0).double(), torch.cov(wanted.T).double())
    assert torch.allclose(made.mean(0).float(), wanted.mean(0), atol=1e-5)
    assert torch.allclose(torch.cov(made.T).float(), torch.cov(wanted.T), atol=1e-5)
    same = moved(rows, rows.mean(0).double(), torch.cov(rows.T).double())
    assert torch.allclose(same.float(), rows, atol=1e-4)  # and none moves further than it must
    flat = torch.cat([rows[:, :-1], torch.zeros(400, 1)], 1)  # no spread in one direction
    assert moved(flat, wanted.mean(0).double(), torch.cov(wanted.T).double()).isfinite().all()


def test_weighted_covariances_are_those_of_repeated_rows_and_of_as_many_common_ones() -> None:
    rows = rows_of(30, 0).double()
    times = torch.randint(0, 4, (30, 2), generator=torch.Generator().manual_seed(0))
    found = weighted_covariances(rows, times.float(), SPREAD.double())
    for column, covariance in zip(times.T, found, strict=True):
        own = torch.cov(rows.repeat_interleave(column, 0).T, correction=0)
        worth = float(column.sum() ** 2 / column.square().sum())
        assert torch.allclose(covariance, (worth * own + WIDTH * SPREAD.double()) / (worth + WIDTH))


def test_a_class_that_no_public_row_resembles_has_the_common_covariance() -> None:
    weights = torch.zeros(30, 3)
    weights[:, 0], weights[4, 1] = 1e-300, 1e-3  # the first are zero in float32; one row alone has no spread
    found = weighted_covariances(rows_of(30, 0).double(), weights, SPREAD.double())
    assert torch.allclose(found[0], SPREAD.double())
    assert torch.allclose(found[1], SPREAD.double() * WIDTH / (WIDTH + 1), atol=1e-6)
    assert torch.equal(found[0], found[2])


# -- draws ------------------------------------------------------------------------------------------------

Draw = Callable[[ClassGaussians, torch.Tensor, torch.Generator], torch.Tensor]


def faults_of(draw: Draw) -> list[str]:
    """List what is wrong with draws of two classes, 20,000 of each; the tolerance is six standard errors."""
    classes = [rows_of(300, seed) for seed in range(2)]
    found, labels = ClassGaussians.of(*sums_of(classes), 0.0, SPREAD), torch.arange(40_000) % 2
    drawn, wrong = draw(found, labels, torch.Generator().manual_seed(0)), []
    for number, rows in enumerate(classes):
        own, deviation = drawn[labels == number], exact(rows).diagonal().sqrt()
        if ((own.mean(0) - rows.mean(0)).abs() > 6 * deviation / math.sqrt(20_000)).any():
            wrong.append("mean")
        if ((exact(own) - exact(rows)).abs() > 6 * math.sqrt(2 / 20_000) * deviation[:, None] * deviation).any():
            wrong.append("covariance")
    return wrong


def test_draws_have_mean_and_covariance_of_their_class() -> None:
    def transposed(found: ClassGaussians, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return ClassGaussians(found.means, found.roots.mT).draw(labels, generator)

    def exchanged(found: ClassGaussians, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return found.draw(1 - labels, generator)

    assert faults_of(ClassGaussians.draw) == []
    assert faults_of(transposed) == ["covariance"] * 2
    assert "mean" in faults_of(exchanged)


def test_the_generator_decides_and_other_labels_change_no_draw() -> None:
    found = ClassGaussians.of(*sums_of([rows_of(50, seed) for seed in range(3)]), 0.0, SPREAD)
    labels = torch.tensor([0, 2, 1, 1, 0])
    first = found.draw(labels, torch.Generator().manual_seed(0))
    assert torch.equal(found.draw(labels, torch.Generator().manual_seed(0)), first)
    assert not torch.allclose(found.draw(labels, torch.Generator().manual_seed(1)), first, atol=1e-2)
    labels[1] = 0
    changed = found.draw(labels, torch.Generator().manual_seed(0)) != first
    assert changed.any(1).tolist() == [False, True, False, False, False]
