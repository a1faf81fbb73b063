"""Releases to epsilon, on Google's `dp_accounting`. (The search for noise is `engine/calibration.py`.)

A `Release` is one noised sum over a Poisson sample of units (images, or persons with all their images), repeated. Each
bound below is valid by itself, so their minimum is; all are recorded.

- `exact`: Gaussian releases on all the data compose to one Gaussian with 1/z^2 = sum of 1/z_i^2, whose
  epsilon has a closed form (Balle and Wang 2018).
- `rdp`: Renyi DP with the improved conversion.
- `pld`: privacy loss distributions, rounded pessimistically on a grid fine enough for the composition.

z is the noise's standard deviation over the bound on one unit's norm. Under add-remove a unit shifts the sum by at most
one bound; under replace-one by two, or by sqrt(2) if rows are non-negative (then <a, b> >= 0, so |a - b|^2 <= |a|^2 +
|b|^2) and the sample is all the data. Replace-one with Poisson sampling: proof 5 of docs/proofs.md.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import dp_accounting
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
        for name in ("sampling_prob", "weight", "noise_multiplier"):  # plain numbers: what was accounted for stays so
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        z = self.noise_multiplier
        for right, what in (
            (re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name), "name must be letters, digits, '-' and '_'"),
            (type(self.times) is int and 1 <= self.times <= MOST_TIMES, "times must be a whole number from 1 to 1e7"),
            (0 < self.sampling_prob <= 1, "sampling_prob must lie in (0, 1]"),
            (math.isfinite(self.weight) and self.weight > 0, "weight must be greater than 0"),
            (type(self.nonnegative) is bool, "nonnegative must be True or False"),
            (z is None or z == 0 or LEAST_NOISE <= z <= MOST_NOISE, "noise_multiplier must be 0 or from 1e-3 to 1e9"),
        ):
            if not right:
                raise ValueError(f"release {self.name!r}: {what}, got {getattr(self, what.split()[0])!r}")

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
        return {release.name: release for release in self.releases}[name]


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
    full, sampled = merged(releases, adjacency)
    with quiet():
        if not sampled:
            found["exact"] = float(dp_accounting.get_epsilon_gaussian(full, delta))
        if not sampled or adjacency == "add-remove":
            found["rdp"] = by_rdp(full, sampled, delta)
        found["pld"] = by_pld(full, sampled, delta, adjacency)
    return found


def least(found: dict[str, float | None]) -> float:
    """Return the smallest of the valid bounds. Guarantee: a minimum of upper bounds is one."""
    return min(value for value in found.values() if value is not None)


def merged(releases: Sequence[Release], adjacency: Adjacency) -> tuple[float, list[tuple[float, float, int]]]:
    """(z of all full-data releases as one Gaussian of shift 1, or inf; the sampled ones as (q, z, times))."""
    precision = 0.0
    sampled: Counter[tuple[float, float]] = Counter()
    for release in releases:
        if release.sampling_prob == 1:
            precision += release.times * (release.shift(adjacency) / release.noise) ** 2
        else:
            sampled[release.sampling_prob, release.noise] += release.times
    return (1 / math.sqrt(precision) if precision else math.inf), [(q, z, n) for (q, z), n in sampled.items()]


def by_rdp(full: float, sampled: list[tuple[float, float, int]], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    if math.isfinite(full):
        accountant.compose(dp_accounting.GaussianDpEvent(full))
    for q, z, times in sampled:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
    return float(accountant.get_epsilon(delta))


def by_pld(full: float, sampled: list[tuple[float, float, int]], delta: float, adjacency: Adjacency) -> float:
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
def quiet() -> Iterator[None]:
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
