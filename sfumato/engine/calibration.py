"""Search for the smallest noise that meets a budget. `privacy.Plan` accounts the result again, independently."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import dp_accounting
from scipy.optimize import brentq

from sfumato.privacy.accounting import (
    MAX_NOISE,
    MIN_NOISE,
    Plan,
    Release,
    bounds,
    merge_gaussians,
    pld_epsilon,
    rdp_epsilon,
    suppress_library_warnings,
    tightest,
)
from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded

SEARCH_TOLERANCE = 1e-4  # relative error of the noise multiplier; always rounded up
HEADROOM = 2e-6  # relative margin below the budget, as certificates round epsilon up to six digits


def calibrate(releases: Sequence[Release], budget: Budget) -> Plan:
    """Return the plan with the smallest noise that meets the budget.

    - releases: those without a `noise_multiplier` get one, in proportion to their `weight`.
    - budget: with epsilon = inf all open noise multipliers become 0.

    Raises `BudgetExceeded` if the fixed noise multipliers alone exceed the budget.
    """
    plan = copy.copy(_calibrate(tuple(releases), budget))
    object.__setattr__(plan, "bounds", dict(plan.bounds))  # callers cannot change the cached plan
    return plan


@lru_cache(maxsize=256)
def _calibrate(releases: tuple[Release, ...], budget: Budget) -> Plan:
    """Calibrate; cached, because a method's plan, fit and warm start need the same plan."""
    if not budget.private:
        return Plan(_with_noise(releases, 0.0), budget)
    fixed = [release for release in releases if release.noise_multiplier is not None]
    if len(fixed) == len(releases):
        return Plan(releases, budget)

    def excess(log_scale: float) -> float:
        """Return log(epsilon / budget) for open noise multipliers of exp(log_scale) times their weights."""
        value = _search_epsilon(_with_noise(releases, math.exp(log_scale)), budget.delta, budget.adjacency)
        return math.log(max(value, 1e-12) / (budget.epsilon * (1 - HEADROOM)))

    low, high = _bracket(excess, _initial_log_scale(releases, budget), fixed)
    log_scale = float(brentq(excess, low, high, xtol=SEARCH_TOLERANCE / 2))
    while not excess(log_scale) <= 0:
        log_scale += SEARCH_TOLERANCE / 4
    return Plan(_with_noise(releases, math.exp(log_scale)), budget)


def with_share(releases: Sequence[Release], budget: Budget, share: float) -> list[Release]:
    """Return the releases with the noise that they would have alone, increased so that they take a share of the budget.

    - share: of 1 / noise², by which Gaussian releases compose. What is left is for releases whose noise stays open.
    """
    alone = calibrate(releases, budget).releases
    return [replace(each, noise_multiplier=each.noise / math.sqrt(share)) for each in alone]


def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    adjacency: Adjacency = "add-remove",
) -> float:
    """Return the epsilon of `steps` Gaussian releases, each on a Poisson sample with `sampling_prob`."""
    budget = Budget(math.inf, delta, adjacency)
    return tightest(bounds([Release("sum", steps, sampling_prob, noise_multiplier)], budget.delta, budget.adjacency))


def noise_multiplier(
    *,
    epsilon: float,
    sampling_prob: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    adjacency: Adjacency = "add-remove",
) -> float:
    """Return the smallest noise multiplier with which `steps` releases on Poisson samples satisfy `epsilon`."""
    return calibrate([Release("sum", steps, sampling_prob)], Budget(epsilon, delta, adjacency)).releases[0].noise


def _with_noise(releases: Sequence[Release], scale: float) -> tuple[Release, ...]:
    """Return the releases with open noise multipliers set to `scale` times `weight`, within the accountants' limits."""

    def noise(weight: float) -> float:
        return 0.0 if scale == 0 else min(max(scale * weight, MIN_NOISE), MAX_NOISE)

    calibrated = (
        r if r.noise_multiplier is not None else replace(r, noise_multiplier=noise(r.weight)) for r in releases
    )
    return tuple(calibrated)


def _initial_log_scale(releases: Sequence[Release], budget: Budget) -> float:
    """Return the log-scale that meets the budget in the central limit, as a starting point."""
    sigma = dp_accounting.get_sigma_gaussian(budget.epsilon, budget.delta)
    variance = sum(r.times * (r.sampling_prob * r.shift(budget.adjacency) / r.weight) ** 2 for r in releases)
    return math.log(min(max(sigma * math.sqrt(variance), 0.5), 1e6))


def _bracket(excess: Callable[[float], float], start: float, fixed: Sequence[Release]) -> tuple[float, float]:
    """Return two log-scales, a factor of 2 apart, between which epsilon crosses the budget."""
    start_excess = excess(start)
    step = math.log(2) if start_excess > 0 else -math.log(2)
    current = start
    while math.log(MIN_NOISE) < current < math.log(MAX_NOISE):
        following = current + step
        if (excess(following) > 0) != (start_excess > 0):
            return (current, following) if current < following else (following, current)
        current = following
    if start_excess > 0 and fixed:
        raise BudgetExceeded(
            f"the fixed noise multiplier of {fixed[0].name!r} alone exceeds the budget; increase it or the budget"
        )
    raise ValueError("no noise multiplier between 1e-3 and 1e9 meets this budget; increase delta or reduce the steps")


def _search_epsilon(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return only the bound that is usually tightest, for a fast search: RDP where delta is too small for PLD."""
    full, sampled = merge_gaussians(releases, adjacency)
    with suppress_library_warnings():
        value = (
            pld_epsilon(full, sampled, delta, adjacency) if sampled else dp_accounting.get_epsilon_gaussian(full, delta)
        )
        return rdp_epsilon(full, sampled, delta) if math.isinf(value) and adjacency == "add-remove" else float(value)
