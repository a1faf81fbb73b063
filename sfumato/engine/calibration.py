"""Search for the least noise that meets a budget. The plan that it returns is accounted again by `privacy`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import dp_accounting
from scipy.optimize import brentq

from sfumato.privacy.accounting import (
    LEAST_NOISE,
    MOST_NOISE,
    Plan,
    Release,
    bounds,
    by_pld,
    by_rdp,
    least,
    merged,
    quiet,
)
from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded

SEARCH_TOLERANCE = 1e-4  # of calibrated noise, relative; always on the safe side
HEADROOM = 2e-6  # relative: certificates round epsilon up in the sixth digit


def calibrate(releases: Sequence[Release], budget: Budget) -> Plan:
    """Return the plan with the least noise, in the releases' proportions, that keeps within the budget."""
    plan = copy.copy(_calibrated(tuple(releases), budget))
    object.__setattr__(plan, "bounds", dict(plan.bounds))  # what is cached stays as it is
    return plan


@lru_cache(maxsize=256)
def _calibrated(releases: tuple[Release, ...], budget: Budget) -> Plan:
    """Cached: a method's plan, its fit and its warm start ask for the same."""
    if not budget.private:
        return Plan(_scaled(releases, 0.0), budget)
    fixed = [release for release in releases if release.noise_multiplier is not None]
    if len(fixed) == len(releases):
        return Plan(releases, budget)

    def excess(log_scale: float) -> float:
        """Return log(epsilon / budget) by the tightest bound."""
        value = _tightest(_scaled(releases, math.exp(log_scale)), budget.delta, budget.adjacency)
        return math.log(max(value, 1e-12) / (budget.epsilon * (1 - HEADROOM)))

    low, high = _bracket(excess, _guess(releases, budget), fixed)
    log_scale = float(brentq(excess, low, high, xtol=SEARCH_TOLERANCE / 2))
    while not excess(log_scale) <= 0:
        log_scale += SEARCH_TOLERANCE / 4
    return Plan(_scaled(releases, math.exp(log_scale)), budget)


def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    adjacency: Adjacency = "add-remove",
) -> float:
    """Return the epsilon of `steps` Gaussian sums over Poisson samples."""
    budget = Budget(math.inf, delta, adjacency)
    return least(bounds([Release("sum", steps, sampling_prob, noise_multiplier)], budget.delta, budget.adjacency))


def noise_multiplier(
    *,
    epsilon: float,
    sampling_prob: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    adjacency: Adjacency = "add-remove",
) -> float:
    """Return the least noise multiplier with which `epsilon` holds."""
    return calibrate([Release("sum", steps, sampling_prob)], Budget(epsilon, delta, adjacency)).releases[0].noise


def _scaled(releases: Sequence[Release], scale: float) -> tuple[Release, ...]:
    """Fill in the noise that is left open, within the limits of the accountants."""

    def noise(weight: float) -> float:
        return 0.0 if scale == 0 else min(max(scale * weight, LEAST_NOISE), MOST_NOISE)

    filled = (r if r.noise_multiplier is not None else replace(r, noise_multiplier=noise(r.weight)) for r in releases)
    return tuple(filled)


def _guess(releases: Sequence[Release], budget: Budget) -> float:
    """Return the log-scale at which a central limit would meet the budget: a place to start."""
    alone = dp_accounting.get_sigma_gaussian(budget.epsilon, budget.delta)
    spread = sum(r.times * (r.sampling_prob * r.shift(budget.adjacency) / r.weight) ** 2 for r in releases)
    return math.log(min(max(alone * math.sqrt(spread), 0.5), 1e6))


def _bracket(excess: Callable[[float], float], start: float, fixed: Sequence[Release]) -> tuple[float, float]:
    """Return log-scales on either side of the budget, by steps of a factor of two."""
    at = excess(start)
    step = math.log(2) if at > 0 else -math.log(2)
    here = start
    while math.log(LEAST_NOISE) < here < math.log(MOST_NOISE):
        there = here + step
        if (excess(there) > 0) != (at > 0):
            return (here, there) if here < there else (there, here)
        here = there
    if at > 0 and fixed:
        raise BudgetExceeded(f"the fixed noise of {fixed[0].name!r} alone is more than the budget allows")
    raise ValueError(
        "no noise multiplier between 1e-3 and 1e9 meets this budget; a larger delta or fewer steps may help"
    )


def _tightest(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return the tightest bound alone, for a search; RDP only where PLD cannot reach so small a delta."""
    full, sampled = merged(releases, adjacency)
    with quiet():
        value = by_pld(full, sampled, delta, adjacency) if sampled else dp_accounting.get_epsilon_gaussian(full, delta)
        return by_rdp(full, sampled, delta) if math.isinf(value) and adjacency == "add-remove" else float(value)
