"""The test of equal means: formula, size, power and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom

from benchmarks.two_sample import bai_saranadasa

REPEATS = 400


def draw(seed: int, count: int = 30, dimensions: int = 200) -> torch.Tensor:
    """Draw correlated Gaussian rows with a different variance in each dimension."""
    white = torch.randn(count, dimensions + 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return white.unfold(1, 5, 1).mean(2) * torch.linspace(0.5, 2, dimensions, dtype=torch.float64)


@pytest.fixture(scope="module")
def under_equal_means() -> list[tuple[float, float]]:
    return [bai_saranadasa(draw(seed), draw(REPEATS + seed, 40)) for seed in range(REPEATS)]


def test_agrees_with_the_formula_in_full_dimension() -> None:
    one, other = draw(0, 9, 6), draw(1, 7, 6) + 0.3
    n1, n2, n = 9, 7, 14
    pooled = (8 * torch.cov(one.T) + 6 * torch.cov(other.T)) / n
    tau = n1 * n2 / (n1 + n2)
    gap = one.mean(0) - other.mean(0)
    m = gap @ gap - pooled.trace() / tau
    b_square = n**2 / ((n + 2) * (n - 1)) * ((pooled @ pooled).trace() - pooled.trace() ** 2 / n)
    expected = float(tau * m / torch.sqrt(2 * (n + 1) / n * b_square))
    z, p = bai_saranadasa(one, other)
    assert z == pytest.approx(expected, rel=1e-10)
    assert p == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), rel=1e-10)


def test_the_rejection_rate_under_equal_means_is_as_stated(under_equal_means: list[tuple[float, float]]) -> None:
    """The interval has probability 99.9 %. Seeds are fixed, so the test is deterministic.

    Z is normal only for many effective dimensions, so a rejection rate of up to 7 % is accepted.
    """
    rejected = sum(p < 0.05 for _, p in under_equal_means)
    assert binom.ppf(0.0005, REPEATS, 0.05) <= rejected <= binom.isf(0.0005, REPEATS, 0.07)


def test_z_is_standard_normal_under_equal_means(under_equal_means: list[tuple[float, float]]) -> None:
    z = torch.tensor([z for z, _ in under_equal_means])
    assert abs(float(z.mean())) < 3.3 / math.sqrt(REPEATS)
    assert 0.85 < float(z.std()) < 1.15  # detects a missing factor of 2


def test_different_means_are_detected() -> None:
    found = [bai_saranadasa(draw(seed), draw(REPEATS + seed) + 0.2) for seed in range(50)]
    assert sum(p < 0.05 for _, p in found) >= 45
    assert min(z for z, _ in found) > 0


def test_dependent_samples_have_negative_z() -> None:
    """Samples with the same noise have means that are closer than those of independent samples."""
    noise = draw(0)
    z, p = bai_saranadasa(noise, noise + 0.01 * draw(1))
    assert z < -3
    assert p > 0.99


def test_z_is_invariant_under_rotation_shift_and_scale() -> None:
    one, other = draw(0, dimensions=60), draw(1, dimensions=60) + 0.1
    rotation = torch.linalg.qr(draw(2, 60, 60)).Q
    expected = pytest.approx(bai_saranadasa(one, other), rel=1e-9)
    assert bai_saranadasa(one @ rotation, other @ rotation) == expected
    assert bai_saranadasa(3 * one + 7, 3 * other + 7) == expected
    assert bai_saranadasa(other, one) == expected
    assert bai_saranadasa(one.view(-1, 1, 6, 10), other.view(-1, 1, 6, 10)) == expected


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 5), "rows of the same shape"),
        (torch.zeros(1, 4), torch.zeros(3, 4), "at least two rows"),
        (torch.zeros(3, 4), torch.zeros(3, 4), "samples are constant"),
    ],
)
def test_invalid_samples_are_refused(one: torch.Tensor, other: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bai_saranadasa(one, other)
