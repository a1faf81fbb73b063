"""Releases to epsilon, on Google's `dp_accounting`. (The search for noise is `engine/calibration.py`.)

A `Release` is one noised sum over a Poisson sample of units (images, or persons with all their images), repeated. Each
bound below is valid by itself, so their minimum is; all are recorded.

- `exact`: Gaussian releases on all the data compose to one Gaussian with 1/z^2 = sum of 1/z_i^2, whose
  epsilon has a closed form (Balle and Wang 2018).
- `rdp`: Renyi DP with the improved conversion.
- `pld`: privacy loss distributions, rounded pessimistically on a grid fine enough for the composition.

**Shift of one unit.** z is the noise's standard deviation over the bound on one unit's norm. Under add-remove a unit
shifts the sum by at most one bound. Under replace-one by two; by sqrt(2) if rows are non-negative (then <a, b> >= 0, so
|a - b|^2 <= |a|^2 + |b|^2) and the sample is all the data.

**Replace-one with Poisson sampling.** The neighbouring outputs are P = (1-q) N(0) + q N(a) and
Q = (1-q) N(0) + q N(b) with |a|, |b| <= 1. Claim: a = e, b = -e dominates, which is `dp_accounting`'s pair.
Proof: for alpha >= 1 and any set S, P(S) - alpha Q(S) = (1-q)(1-alpha) N_0(S) + q N_a(S) - alpha q N_b(S). Let H
be the half-space {<x, e> >= t} with N_0(H) = N_0(S). By Neyman-Pearson N_a(S) <= N_e(H) and N_b(S) >= N_-e(H),
so S does no better on (a, b) than H on (e, -e). For alpha < 1 swap the roles. With sums kept by class, a and b
may lie in different blocks: the proof does not care. (The sqrt(2) of non-negative rows fails here: a and b are
still at distance 1 from 0.)
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded

GRID_ERROR = 1e-3  # relative variance that the PLD grid may add to the composed privacy loss
GRID_POINTS = 250_000  # at most, for the loss of one release
MOST_TIMES = 10**7
LEAST_NOISE, MOST_NOISE = 1e-3, 1e9  # outside, accountants lose their digits


@dataclass(frozen=True)
class Release:
    """`times` noised sums of bounded rows, each over a fresh Poisson sample.

    A method states `weight`, its noise relative to its other releases; calibration fills in `noise_multiplier`. A
    method that fixes its noise states `noise_multiplier` itself.

    Guarantee: this is all that epsilon depends on.
    """

    name: str
    times: int = 1
    sampling_prob: float = 1.0
    noise_multiplier: float | None = None
    weight: float = 1.0
    nonnegative: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ValueError(f"a release's name must be letters, digits, '-' and '_', got {self.name!r}")
        if type(self.times) is not int or not 1 <= self.times <= MOST_TIMES:
            raise ValueError(f"release {self.name!r}: times must be a whole number from 1 to 1e7, got {self.times!r}")
        if not 0 < self.sampling_prob <= 1:
            raise ValueError(f"release {self.name!r}: sampling_prob must lie in (0, 1], got {self.sampling_prob}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"release {self.name!r}: weight must be greater than 0, got {self.weight}")
        if type(self.nonnegative) is not bool:
            raise ValueError(f"release {self.name!r}: nonnegative must be True or False, got {self.nonnegative!r}")
        # Plain numbers: what was accounted for cannot change afterwards.
        object.__setattr__(self, "sampling_prob", float(self.sampling_prob))
        object.__setattr__(self, "weight", float(self.weight))
        z = None if self.noise_multiplier is None else float(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", z)
        if z is not None and not (z == 0 or LEAST_NOISE <= z <= MOST_NOISE):
            raise ValueError(f"release {self.name!r}: noise_multiplier must be 0 or from 1e-3 to 1e9, got {z}")

    @property
    def noise(self) -> float:
        """The noise multiplier. Guarantee: an uncalibrated release cannot be drawn."""
        if self.noise_multiplier is None:
            raise ValueError(f"release {self.name!r} is not calibrated")
        return self.noise_multiplier

    def shift(self, adjacency: Adjacency) -> float:
        """How far one unit moves the sum, in units of the bound. Guarantee: module docstring."""
        if adjacency == "add-remove":
            return 1.0
        return math.sqrt(2) if self.nonnegative and self.sampling_prob == 1 else 2.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """Calibrated releases under a budget, before anything is spent.

    Guarantee: a plan exists only if these very releases, composed, are within the budget; it accounts them itself.
    """

    releases: tuple[Release, ...]
    budget: Budget
    bounds: dict[str, float | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))
        names = Counter(release.name for release in self.releases)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"release names must differ; {twice[0]!r} occurs {names[twice[0]]} times")
        object.__setattr__(self, "bounds", bounds(self.releases, self.budget.delta, self.budget.adjacency))
        if not self.epsilon <= self.budget.epsilon:
            raise BudgetExceeded(
                f"the planned releases need epsilon {self.epsilon:.4g}, the budget is {self.budget.epsilon:g}"
            )

    @property
    def epsilon(self) -> float:
        return least(self.bounds)

    def __getitem__(self, name: str) -> Release:
        for release in self.releases:
            if release.name == name:
                return release
        raise KeyError(name)

    def __str__(self) -> str:
        head = f"{'release':<16}{'times':>8}  {'sampling':>10}  {'noise multiplier':>17}"
        rows = [f"{r.name:<16}{r.times:>8}  {r.sampling_prob:>10.4g}  {r.noise:>17.4f}" for r in self.releases]
        b = self.budget
        total = f"epsilon {self.epsilon:.4f} of {b.epsilon:g} at delta {b.delta:g}, {b.adjacency}, one {b.unit}"
        return "\n".join([head, *rows, total])


def bounds(releases: Sequence[Release], delta: float, adjacency: Adjacency = "add-remove") -> dict[str, float | None]:
    """Return every accountant's epsilon for these releases; None where one does not apply.

    Guarantee: each number is an upper bound on epsilon at `delta` for the adaptive composition of the
    releases, whose parameters do not depend on their outcomes.
    """
    found: dict[str, float | None] = {"exact": None, "rdp": None, "pld": None}
    if not releases:
        return {**found, "exact": 0.0}
    if any(release.noise == 0 for release in releases):
        return {**found, "exact": math.inf}
    full, sampled = _merge(releases, adjacency)
    with _quiet():
        if not sampled:
            found["exact"] = float(dp_accounting.get_epsilon_gaussian(full, delta))
        if not sampled or adjacency == "add-remove":
            found["rdp"] = _rdp(full, sampled, delta)
        found["pld"] = _pld(full, sampled, delta, adjacency)
    return found


def least(found: dict[str, float | None]) -> float:
    """Return the smallest of the valid bounds. Guarantee: a minimum of upper bounds is one."""
    return min(value for value in found.values() if value is not None)


def search_bound(releases: Sequence[Release], delta: float, adjacency: Adjacency) -> float:
    """Return the tightest bound alone, for a search; RDP only where PLD cannot reach so small a delta."""
    full, sampled = _merge(releases, adjacency)
    with _quiet():
        if not sampled:
            return float(dp_accounting.get_epsilon_gaussian(full, delta))
        value = _pld(full, sampled, delta, adjacency)
        return _rdp(full, sampled, delta) if math.isinf(value) and adjacency == "add-remove" else value


def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
    adjacency: Adjacency = "add-remove",
) -> float:
    """Return the epsilon of `steps` Gaussian sums over Poisson samples. Guarantee: as `bounds`."""
    budget = Budget(math.inf, delta, adjacency)
    release = Release("sum", steps, sampling_prob, noise_multiplier)
    return least(bounds([release], budget.delta, budget.adjacency))


def renyi(releases: Sequence[Release], order: float, adjacency: Adjacency) -> float:
    """Return the composed Renyi divergence of that order. Guarantee: an upper bound, additive over releases.

    Under replace-one with sampling it is the integral of the dominating pair (module docstring), by the trapezoidal
    rule, which for such an integrand errs by less than 1e-12.
    """
    if any(release.noise == 0 for release in releases):
        return math.inf
    full, sampled = _merge(releases, adjacency)
    total = order / (2 * full**2)
    for q, z, times in sampled:
        if adjacency == "add-remove":
            with _quiet():
                accountant = rdp.RdpAccountant([order])
                accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
                total += float(accountant.rdp[0])
        else:
            x = np.arange(-2 - 14 * z, 2 * order + 14 * z, z / 64)
            logs = [np.log1p(-q) - x**2 / (2 * z**2), np.log(q) - (x - 1) ** 2 / (2 * z**2)]
            p, other = np.logaddexp(*logs), np.logaddexp(logs[0], np.log(q) - (x + 1) ** 2 / (2 * z**2))
            logs = order * p + (1 - order) * other
            integral = np.log(np.sum(np.exp(logs - logs.max())) / 64 / math.sqrt(2 * math.pi)) + logs.max()
            total += times * max(float(integral), 0.0) / (order - 1)
    return total


def _merge(releases: Sequence[Release], adjacency: Adjacency) -> tuple[float, list[tuple[float, float, int]]]:
    """(z of all full-data releases as one Gaussian of shift 1, or inf; the sampled ones as (q, z, times))."""
    precision = 0.0
    sampled: Counter[tuple[float, float]] = Counter()
    for release in releases:
        if release.sampling_prob == 1:
            precision += release.times * (release.shift(adjacency) / release.noise) ** 2
        else:
            sampled[release.sampling_prob, release.noise] += release.times
    return (1 / math.sqrt(precision) if precision else math.inf), [(q, z, n) for (q, z), n in sampled.items()]


def _rdp(full: float, sampled: list[tuple[float, float, int]], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    if math.isfinite(full):
        accountant.compose(dp_accounting.GaussianDpEvent(full))
    for q, z, times in sampled:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
    return float(accountant.get_epsilon(delta))


def _pld(full: float, sampled: list[tuple[float, float, int]], delta: float, adjacency: Adjacency) -> float:
    """Return epsilon by privacy loss distributions.

    Guarantee: rounding is pessimistic at every grid, so the grid decides only how tight the bound is. Rounding
    one loss to a grid of width h adds about h^2/6 to its variance; h keeps the sum of these below
    `GRID_ERROR` of the composition's variance. The library convolves by FFT, whose round-off may lower delta by
    about 1e-17 a release; asking at a delta smaller by ten times that covers it.
    """
    relation = dp_accounting.NeighboringRelation
    replace_one = adjacency == "replace-one"
    spread = 2.0 if replace_one else 1.0
    variance = 1 / full**2
    count = int(math.isfinite(full))
    reach = 10 / full + 0.5 / full**2 if sampled else 0.0
    for q, z, times in sampled:
        variance += times * spread**2 * min(q**2 * math.expm1(min(1 / z**2, 600.0)), 1 / z**2)
        count += times
        reach = max(reach, spread * math.log1p(q * math.expm1(min(10 / z + 0.5 / z**2, 600.0))))
    interval = max(math.sqrt(6 * GRID_ERROR * variance / count), reach / GRID_POINTS)

    total = pld.privacy_loss_distribution.identity(interval)
    if math.isfinite(full):  # its shift is in `full` already
        total = total.compose(
            pld.privacy_loss_distribution.from_gaussian_mechanism(full, value_discretization_interval=interval)
        )
    for q, z, times in sampled:
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(
            z,
            value_discretization_interval=interval,
            sampling_prob=q,
            neighboring_relation=relation.REPLACE_ONE if replace_one else relation.ADD_OR_REMOVE_ONE,
        )
        total = total.compose(one.self_compose(times))
    return float(total.get_epsilon_for_delta(max(delta - 1e-14 - 1e-16 * count, 0.0)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's remarks on orders that it leaves out; they loosen no bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
