"""Convert releases to epsilon with Google's `dp_accounting`. (`engine/calibration.py` searches for the noise.)

A `Release` is a noised sum over a Poisson sample of units (images, or persons with all their images), repeated. Three
accountants bound the epsilon of a composition. Each bound is valid alone, so the minimum is; all are recorded. `exact`:
Gaussian releases without subsampling compose to one Gaussian with 1/z^2 = sum of 1/z_i^2, whose epsilon has a closed
form (Balle and Wang 2018). `rdp`: Renyi DP with the improved conversion (Canonne, Kamath and Steinke 2020). `pld`:
privacy loss distributions, rounded pessimistically to a grid that is fine enough for the composition.

The noise multiplier z is the standard deviation of the noise over the clipping norm of one unit. The sensitivity of the
sum, in clipping norms, is 1 under add-remove and 2 under replace-one; sqrt(2) if rows are non-negative (|a - b|^2 <=
|a|^2 + |b|^2 since <a, b> >= 0) and there is no subsampling. Replace-one with subsampling: proof 5 of docs/proofs.md.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import dp_accounting
from dp_accounting import pld, rdp

from sfumato.privacy.budget import Adjacency, Budget, BudgetExceeded

GRID_ERROR = 1e-3  # relative variance that the PLD grid may add to the composed privacy loss
GRID_POINTS = 250_000  # maximum for the privacy loss of one release
MAX_TIMES, MIN_NOISE, MAX_NOISE = 10**7, 1e-3, 1e9  # outside this range the accountants lose precision


@dataclass(frozen=True)
class Release:
    """A noised sum of clipped rows over a fresh Poisson sample, repeated `times` times.

    - name: letters, digits, "-" and "_"; unique within a plan.
    - times: number of repetitions, default 1, at most 1e7.
    - sampling_prob: Poisson sampling probability, in (0, 1], default 1 (all the data).
    - noise_multiplier: noise per clipping norm; default None, to be set by `calibrate`.
    - weight: noise relative to the other releases that `calibrate` sets, default 1.
    - nonnegative: whether rows are clamped to non-negative entries, default False.

    Guarantee: epsilon depends on these fields alone.
    """

    name: str
    times: int = 1
    sampling_prob: float = 1.0
    noise_multiplier: float | None = None
    weight: float = 1.0
    nonnegative: bool = False

    def __post_init__(self) -> None:
        for name in ("sampling_prob", "weight", "noise_multiplier"):  # floats: a tensor could change after accounting
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        z = self.noise_multiplier
        for valid, rule in (
            (re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name), "name must be 1 to 64 letters, digits, '-' or '_'"),
            (type(self.times) is int and 1 <= self.times <= MAX_TIMES, "times must be an integer from 1 to 1e7"),
            (0 < self.sampling_prob <= 1, "sampling_prob must lie in (0, 1]"),
            (math.isfinite(self.weight) and self.weight > 0, "weight must be greater than 0"),
            (type(self.nonnegative) is bool, "nonnegative must be True or False"),
            (z is None or z == 0 or MIN_NOISE <= z <= MAX_NOISE, "noise_multiplier must be 0 or from 1e-3 to 1e9"),
        ):
            if not valid:
                raise ValueError(f"release {self.name!r}: {rule}, got {getattr(self, rule.split()[0])!r}")

    @property
    def noise(self) -> float:
        """The noise multiplier. Guarantee: raises for an uncalibrated release, so that none is drawn."""
        if self.noise_multiplier is None:
            raise ValueError(f"release {self.name!r} is not calibrated: pass it through calibrate first")
        return self.noise_multiplier

    def shift(self, adjacency: Adjacency) -> float:
        """Return the sensitivity of the sum in clipping norms. Guarantee: see the module docstring."""
        if adjacency == "add-remove":
            return 1.0
        return math.sqrt(2) if self.nonnegative and self.sampling_prob == 1 else 2.0


@dataclass(frozen=True)
class Plan:
    """Calibrated releases and their budget. Guarantee: constructed only if their composition is within it."""

    releases: tuple[Release, ...]
    budget: Budget
    bounds: dict[str, float | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "releases", tuple(self.releases))
        names = Counter(release.name for release in self.releases)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"release names must differ; {repeated[0]!r} occurs {names[repeated[0]]} times")
        object.__setattr__(self, "bounds", bounds(self.releases, self.budget.delta, self.budget.adjacency))
        if not (need := self.epsilon) <= self.budget.epsilon:
            raise BudgetExceeded(f"the planned releases need epsilon {need:.4g}, the budget is {self.budget.epsilon:g}")

    @property
    def epsilon(self) -> float:
        return tightest(self.bounds)

    def __getitem__(self, name: str) -> Release:
        return {release.name: release for release in self.releases}[name]


def bounds(releases: Sequence[Release], delta: float, adjacency: Adjacency = "add-remove") -> dict[str, float | None]:
    """Return the epsilon of each accountant for these releases; None where one does not apply.

    Guarantee: each number is an upper bound on epsilon at `delta` for the adaptive composition of the releases, whose
    parameters do not depend on their results.
    """
    found: dict[str, float | None] = {"exact": None, "rdp": None, "pld": None}
    if not releases or any(release.noise == 0 for release in releases):
        return {**found, "exact": math.inf if releases else 0.0}
    full, sampled = merge_gaussians(releases, adjacency)
    with suppress_library_warnings():
        if not sampled:
            found["exact"] = float(dp_accounting.get_epsilon_gaussian(full, delta))
        if not sampled or adjacency == "add-remove":
            found["rdp"] = rdp_epsilon(full, sampled, delta)
        found["pld"] = pld_epsilon(full, sampled, delta, adjacency)
    return found


def tightest(found: dict[str, float | None]) -> float:
    """Return the smallest bound that applies. Guarantee: the minimum of upper bounds is an upper bound."""
    return min(value for value in found.values() if value is not None)


def merge_gaussians(releases: Sequence[Release], adjacency: Adjacency) -> tuple[float, list[tuple[float, float, int]]]:
    """Return z of all unsampled releases as one Gaussian of sensitivity 1 (or inf), and the others as (q, z, times)."""
    precision = 0.0
    sampled: Counter[tuple[float, float]] = Counter()
    for release in releases:
        if release.sampling_prob == 1:
            precision += release.times * (release.shift(adjacency) / release.noise) ** 2
        else:
            sampled[release.sampling_prob, release.noise] += release.times
    return (1 / math.sqrt(precision) if precision else math.inf), [(q, z, n) for (q, z), n in sampled.items()]


def rdp_epsilon(full: float, sampled: list[tuple[float, float, int]], delta: float) -> float:
    accountant = rdp.RdpAccountant()
    if math.isfinite(full):
        accountant.compose(dp_accounting.GaussianDpEvent(full))
    for q, z, times in sampled:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), times)
    return float(accountant.get_epsilon(delta))


def pld_epsilon(full: float, sampled: list[tuple[float, float, int]], delta: float, adjacency: Adjacency) -> float:
    """Return epsilon by privacy loss distributions.

    Guarantee: rounding is pessimistic for every grid. A grid of width h adds about h^2/6 to the variance of one loss; h
    keeps the total below `GRID_ERROR` of the variance of the composition. The library convolves by FFT, whose round-off
    may lower delta by about 1e-17 per release; the query uses a delta that is smaller by ten times that.
    """
    both = dp_accounting.NeighboringRelation
    relation, sensitivity = (both.REPLACE_ONE, 2.0) if adjacency == "replace-one" else (both.ADD_OR_REMOVE_ONE, 1.0)
    variance, count = 1 / full**2, int(math.isfinite(full))
    max_loss = 10 / full + 0.5 / full**2 if sampled else 0.0
    for q, z, times in sampled:
        variance += times * sensitivity**2 * min(q**2 * math.expm1(min(1 / z**2, 600.0)), 1 / z**2)
        count += times
        max_loss = max(max_loss, sensitivity * math.log1p(q * math.expm1(min(10 / z + 0.5 / z**2, 600.0))))
    interval = max(math.sqrt(6 * GRID_ERROR * variance / count), max_loss / GRID_POINTS)

    total, make = (
        pld.privacy_loss_distribution.identity(interval),
        pld.privacy_loss_distribution.from_gaussian_mechanism,
    )
    if math.isfinite(full):  # `full` includes the sensitivity
        total = total.compose(make(full, value_discretization_interval=interval))
    for q, z, times in sampled:
        one = make(z, value_discretization_interval=interval, sampling_prob=q, neighboring_relation=relation)
        total = total.compose(one.self_compose(times))
    return float(total.get_epsilon_for_delta(max(delta - 1e-14 - 1e-16 * count, 0.0)))


def suppress_library_warnings() -> ExitStack:
    """Hide warnings of `dp_accounting` about RDP orders that it skips; a bound without them is still valid."""
    stack, logger = ExitStack(), logging.getLogger("absl")
    stack.enter_context(warnings.catch_warnings(action="ignore"))
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    return stack
