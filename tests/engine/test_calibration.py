"""Calibration: the smallest noise that meets a budget. What a plan accounts: tests/privacy/test_accounting.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sfumato.engine.calibration import SEARCH_TOLERANCE, calibrate, epsilon, noise_multiplier, with_share
from sfumato.privacy import Budget, BudgetExceeded, Release
from sfumato.privacy.accounting import bounds, tightest
from sfumato.privacy.budget import Adjacency

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


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_is_a_share_of_the_inverse_variance(share: float, adjacency: Adjacency) -> None:
    """Gaussian releases compose by 1 / noise²; weights between the releases of the share are kept."""
    budget = Budget(1.0, adjacency=adjacency)
    releases = [Release("one", 3), Release("two", weight=2.0)]
    alone, shared = calibrate(releases, budget).releases, with_share(releases, budget, share)
    assert [each.name for each in shared] == ["one", "two"]
    for full, part in zip(alone, shared, strict=True):
        assert part.noise**-2 / full.noise**-2 == pytest.approx(share, rel=1e-9)
    assert shared[1].noise == pytest.approx(2 * shared[0].noise)
    rest = calibrate([*shared, Release("rest")], budget)["rest"].noise
    all_of_it = calibrate([Release("rest")], budget)["rest"].noise
    assert rest**-2 / all_of_it**-2 == pytest.approx(1 - share, rel=2e-3)


def test_a_share_and_the_rest_meet_the_budget() -> None:
    """Also with Poisson samples, where the composition is not Gaussian; a little less noise in the share does not."""
    budget = Budget(2.0)
    shared = with_share([Release("gradients", 100, 0.1)], budget, 0.6)
    plan = calibrate([*shared, Release("means")], budget)
    assert plan["gradients"] == shared[0]
    assert tightest(plan.bounds) <= budget.epsilon
    assert tightest(plan.bounds) > 0.99 * budget.epsilon
    less = [replace(each, noise_multiplier=each.noise * 0.99) for each in plan.releases]
    assert tightest(bounds(less, budget.delta, budget.adjacency)) > budget.epsilon
    too_much = with_share([Release("gradients", 100, 0.1)], budget, 1.5)
    with pytest.raises(BudgetExceeded):
        calibrate([*too_much, Release("means")], budget)


def test_a_share_without_privacy_has_no_noise() -> None:
    shared = with_share([Release("a", 5, 0.1), Release("b")], Budget(math.inf), 0.3)
    assert [each.noise_multiplier for each in shared] == [0.0, 0.0]
