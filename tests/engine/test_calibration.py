"""Calibration: the smallest noise that meets a budget. What a plan accounts: tests/privacy/test_accounting.py."""

from __future__ import annotations

import math

import pytest

from sfumato.engine.calibration import SEARCH_TOLERANCE, calibrate, epsilon, noise_multiplier
from sfumato.privacy import Budget, Release

QUERIES = [(1.0, 1, 1.0), (1.0, 20, 0.3), (0.05, 200, 4.0)]  # sampling probability, steps, epsilon


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("prob", "steps", "target"), QUERIES)
def test_the_noise_is_the_smallest_that_meets_the_budget(
    prob: float, steps: int, target: float, adjacency: str
) -> None:
    """A little less noise exceeds the budget. Epsilon here is the accountants', not that of the search."""
    asked = {"sampling_prob": prob, "steps": steps, "adjacency": adjacency}
    noise = noise_multiplier(epsilon=target, **asked)  # type: ignore[arg-type]
    assert epsilon(noise_multiplier=noise, **asked) <= target  # type: ignore[arg-type]
    assert epsilon(noise_multiplier=noise * (1 - 10 * SEARCH_TOLERANCE), **asked) > target  # type: ignore[arg-type]


def test_more_privacy_needs_more_noise() -> None:
    base = noise_multiplier(epsilon=1, steps=10)
    assert noise_multiplier(epsilon=0.5, steps=10) > base
    assert noise_multiplier(epsilon=1, steps=20) == pytest.approx(base * math.sqrt(2), rel=1e-3)  # Gaussians compose
    assert noise_multiplier(epsilon=1, steps=10, delta=1e-9) > base
    assert noise_multiplier(epsilon=1, steps=10, sampling_prob=0.1) < base
    assert noise_multiplier(epsilon=1, steps=10, adjacency="replace-one") == pytest.approx(2 * base, rel=1e-3)


def test_fixed_noise_leaves_the_rest_of_the_budget_to_open_noise() -> None:
    """Gaussian releases compose by 1 / noise²."""
    alone = calibrate([Release("open")], Budget(1))["open"].noise
    plan = calibrate([Release("fixed", noise_multiplier=2 * alone), Release("open")], Budget(1))
    assert plan["fixed"].noise == 2 * alone
    assert plan["open"].noise == pytest.approx(alone / math.sqrt(1 - 1 / 4), rel=1e-3)


def test_a_budget_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(ValueError, match="no noise multiplier between"):
        calibrate([Release("a", 10**7)], Budget(1e-9, 1e-12))


def test_without_privacy_open_noise_is_zero_and_fixed_noise_stays() -> None:
    plan = calibrate([Release("a", noise_multiplier=2.0), Release("b", 5, 0.1)], Budget(math.inf))
    assert [release.noise for release in plan.releases] == [2.0, 0.0]


def test_a_changed_plan_does_not_change_the_cached_one() -> None:
    releases, budget = [Release("a", 3)], Budget(1.25)
    first = calibrate(releases, budget)
    kept = dict(first.bounds)
    first.bounds.clear()
    assert calibrate(releases, budget).bounds == kept != {}
