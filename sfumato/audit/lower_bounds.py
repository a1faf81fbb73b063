"""Lower bounds on epsilon, with confidence, from the outcomes of attacks.

Two worlds: the data set *without* one unit, and *with* it. An attack gives each run a score, larger if it believes in
"with". Each bound below holds with probability at least `confidence` if its assumption holds.

- `clopper_pearson`: no assumption. (epsilon, delta)-DP implies 1 - FNR <= e^epsilon FPR + delta, and the same with the
  two rates exchanged; the rates have exact binomial intervals (Jagielski, Ullman, Oprea 2020).
- `gaussian`: the mechanism is Gaussian, of unknown noise, so FPR and FNR give mu of mu-Gaussian DP (Nasr et al.
  2023). With Poisson samples: the planned releases, with the planned sampling probabilities, and all noise multiplied
  by one unknown factor. A sound program satisfies this (factor 1), so a bound above its claim refutes it. If a fault
  breaks the assumption, by how much the bound exceeds the claim is an estimate.
- `one_run`: no assumption; many canaries, each in or out by a fair coin, in a single run (Steinke, Nasr, Jagielski
  2023). `one_run_gaussian`: its f-DP form for Gaussian mechanisms without sampling (Mahloujifar, Melis, Chaudhuri
  2024).

A small lower bound is no proof of privacy: it may show only that the attack is weak or that the runs are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from scipy.optimize import brentq
from scipy.special import expit, ndtr, ndtri
from scipy.stats import beta, binom

from sfumato.privacy.accounting import Release, merge_gaussians, suppress_library_warnings
from sfumato.privacy.budget import Adjacency

Array = np.ndarray[Any, np.dtype[Any]]

CONFIDENCE = 0.95
SELECTION = 0.25  # share of the trials that chooses the threshold; the others are counted
THRESHOLD_FAILURE = 0.05  # one-sided failure probability of the rates by which a threshold is chosen
LEVELS = expit(np.linspace(-8.0, 8.0, 33))  # quantiles of scores that are tried as thresholds, dense in both tails
CENTRAL_LEVELS = np.array([0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99])  # few: a choice among many is noisy
GUESSED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of canaries, on each side, that a one-run audit guesses
EPSILON_GRID = np.linspace(0.0, 40.0, 801)  # values of epsilon at which a privacy profile is compared
DISCRETIZATION = 1e-3  # interval of privacy loss distributions
ROOT_TOLERANCE = 2e-3  # of the logarithm of a noise factor
MAX_EPSILON = 60.0


@dataclass(frozen=True)
class Counts:
    """Outcomes of an attack at one threshold: `missed` of `present` runs, `false_alarms` of `absent` runs."""

    missed: int
    present: int
    false_alarms: int
    absent: int

    @property
    def measured(self) -> tuple[float, float]:
        """FNR and FPR, with half an event more, so that no rate is 0."""
        return (self.missed + 0.5) / (self.present + 1), (self.false_alarms + 0.5) / (self.absent + 1)

    def rates(self, confidence: float) -> tuple[float, float]:
        """Return upper bounds on FNR and FPR that hold together with this confidence."""
        each = (1 - confidence) / 2
        return upper_rate(self.missed, self.present, each), upper_rate(self.false_alarms, self.absent, each)


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds on epsilon from scores.

    - clopper_pearson, gaussian: see the module; `gaussian` is None where nothing says that the mechanism is Gaussian.
    - trials: runs in each world that were counted.
    - ceiling: what `clopper_pearson` gives for this number of trials if the attack never errs.
    - limit: an estimate, not a bound: what any number of trials would show at the error rates of this attack.
    """

    clopper_pearson: float
    gaussian: float | None
    delta: float
    confidence: float
    trials: int
    ceiling: float
    limit: float

    @property
    def bound(self) -> float:
        """The bound to report: `gaussian` where it applies. (The larger of two bounds would be less certain.)"""
        return self.clopper_pearson if self.gaussian is None else self.gaussian

    def to_dict(self) -> dict[str, Any]:
        exact = ("delta", "trials", "confidence")
        return {name: each if name in exact or each is None else round(each, 4) for name, each in asdict(self).items()}


def selected(runs: int) -> int:
    """Return how many of the first runs choose a threshold, or a score, and are not counted."""
    return max(4, int(SELECTION * runs))


def upper_rate(events: int | Array, trials: int, failure: float) -> Any:
    """Return the Clopper-Pearson upper bound on a rate; it is too small with probability at most `failure`."""
    found = beta.ppf(1 - failure, np.asarray(events) + 1, np.maximum(trials - np.asarray(events), 1e-300))
    return np.where(np.asarray(events) >= trials, 1.0, found)[()]


def lower_bounds(
    present: Sequence[float] | Array,
    absent: Sequence[float] | Array,
    *,
    delta: float = 1e-5,
    confidence: float = CONFIDENCE,
    releases: Sequence[Release] | None = (),
    adjacency: Adjacency = "add-remove",
) -> LowerBounds:
    """Return all bounds from the scores of independent runs with the unit and without it.

    - releases: planned releases, for the `gaussian` bound of a mechanism with Poisson samples; None: not Gaussian. The
      bound also holds for attacks on what was computed from releases: post-processing keeps the trade-off curve.

    The threshold is chosen on the first `SELECTION` of the runs and counted on the others, for each bound by itself.
    """
    with_unit, without = np.asarray(present, dtype=float), np.asarray(absent, dtype=float)
    if min(len(with_unit), len(without)) < 8:
        raise ValueError(f"a bound needs at least 8 runs in each world, got {len(with_unit)} and {len(without)}")
    sampled = any(release.sampling_prob < 1 for release in releases or ())
    by_counts = _counted(with_unit, without, partial(clopper_pearson, delta=delta))
    levels = CENTRAL_LEVELS if sampled else np.array([0.5])  # for Gaussian scores the middle has the tightest intervals
    by_mu = _counted(with_unit, without, _mu, levels)

    def fit(fnr: float, fpr: float) -> float:
        if releases and sampled:
            return planned_gaussian(fnr, fpr, releases, delta, adjacency)
        return gaussian_dp(fnr, fpr, delta)

    perfect = replace(by_counts, missed=0, false_alarms=0).rates(confidence)
    return LowerBounds(
        clopper_pearson=float(clopper_pearson(*by_counts.rates(confidence), delta)),
        gaussian=None if releases is None else fit(*by_mu.rates(confidence)),
        delta=delta,
        confidence=confidence,
        trials=by_counts.present,
        ceiling=float(clopper_pearson(*perfect, delta)),
        limit=float(clopper_pearson(*by_counts.measured, delta)) if releases is None else fit(*by_mu.measured),
    )


def runs_needed(epsilon: float, share: float = 0.5, *, delta: float = 1e-5, confidence: float = CONFIDENCE) -> int:
    """Return how many runs in each world show a share of epsilon, if an attack loses nothing of a Gaussian mechanism.

    - share: of epsilon, default one half. The `gaussian` bound is meant, with `SELECTION`.
    """
    values = (dp_accounting.get_sigma_gaussian(each, delta) for each in (epsilon, share * epsilon))
    true, wanted = (float(ndtr(-0.5 / sigma)) for sigma in values)
    counted = 8
    while upper_rate(round(true * counted), counted, (1 - confidence) / 2) > wanted:
        counted = math.ceil(1.05 * counted)
    return math.ceil(counted / (1 - SELECTION))


def clopper_pearson(fnr: Any, fpr: Any, delta: float) -> Any:
    """Return the smallest epsilon that allows these error rates, by the definition of (epsilon, delta)-DP."""
    with np.errstate(divide="ignore", invalid="ignore"):
        both = [np.log(np.maximum(1 - a - delta, 0.0)) - np.log(b) for a, b in ((fnr, fpr), (fpr, fnr))]
    return np.nan_to_num(np.maximum(np.maximum(*both), 0.0))


def gaussian_dp(fnr: float, fpr: float, delta: float) -> float:
    """Return the epsilon at `delta` of the mu-Gaussian DP with these error rates."""
    mu = float(_mu(fnr, fpr))
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if mu > 1e-9 else 0.0


def planned_gaussian(
    fnr: float, fpr: float, releases: Sequence[Release], delta: float, adjacency: Adjacency = "add-remove"
) -> float:
    """Return the epsilon of planned releases whose noise, multiplied by one factor, just allows these error rates."""

    def excess(log_factor: float) -> float:
        """Return by how much the rates violate the privacy profile at this noise: positive if they refute it."""
        allowed = np.asarray(
            _composed(releases, math.exp(log_factor), adjacency).get_delta_for_epsilon(EPSILON_GRID.tolist())
        )
        both = [1 - a - np.exp(EPSILON_GRID) * b - allowed for a, b in ((fnr, fpr), (fpr, fnr))]
        return float(max(each.max() for each in both))

    step = math.log(1.5)
    refuted = math.log(4.0)  # from much noise to little: little noise makes the distributions large
    if excess(refuted) <= 0:
        return 0.0
    while refuted > math.log(0.1) and excess(refuted - step) > 0:
        refuted -= step
    if refuted > math.log(0.1):
        refuted = brentq(excess, refuted - step, refuted, xtol=ROOT_TOLERANCE) + ROOT_TOLERANCE  # a little less epsilon
    return float(_composed(releases, math.exp(refuted), adjacency).get_epsilon_for_delta(delta))


def one_run(scores: Array, included: Array, *, delta: float = 1e-5, confidence: float = CONFIDENCE) -> float:
    """Return the lower bound from one run with many canaries; `included` are the fair coins, drawn independently.

    The highest and the lowest scores are guessed, for each share in `GUESSED`, with a Bonferroni correction.
    """
    return _one_run(scores, included, confidence, partial(_steinke, delta=delta))


def one_run_gaussian(scores: Array, included: Array, *, delta: float = 1e-5, confidence: float = CONFIDENCE) -> float:
    """Return the lower bound from one run, if the mechanism is Gaussian, without sampling, for each canary."""
    return _one_run(scores, included, confidence, partial(_mahloujifar, delta=delta))


def _one_run(
    scores: Array, included: Array, confidence: float, bound: Callable[[int, int, int, float], float]
) -> float:
    order, coins = np.argsort(np.asarray(scores, dtype=float), kind="stable"), np.asarray(included, dtype=bool)
    canaries, found = len(order), 0.0
    for share in GUESSED:
        k = int(share * canaries)
        if k:
            correct = int(coins[order[-k:]].sum() + (~coins[order[:k]]).sum())
            found = max(found, bound(canaries, 2 * k, correct, (1 - confidence) / len(GUESSED)))
    return found


def _steinke(canaries: int, guesses: int, correct: int, failure: float, delta: float) -> float:
    """Return the largest epsilon that this number of correct guesses refutes (Steinke et al., Theorem 5.2)."""

    def excess(epsilon: float) -> float:
        right = expit(epsilon)  # a guess is right with at most this probability under pure DP
        tail = binom.sf(correct - 1, guesses, right)
        steps = np.arange(1, correct + 1)
        more = np.max((binom.sf(correct - steps - 1, guesses, right) - tail) / steps, initial=0.0)
        return float(failure - (tail + 2 * canaries * delta * more))

    return _largest(excess)


def _mahloujifar(canaries: int, guesses: int, correct: int, failure: float, delta: float) -> float:
    """Return the largest epsilon that is refuted, for mu-Gaussian DP (Mahloujifar et al., Algorithm 3)."""

    def excess(epsilon: float) -> float:
        mu = 1 / max(float(dp_accounting.get_sigma_gaussian(epsilon, delta)), 1e-9)
        right, wrong = failure * correct / canaries, failure * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            more = max(wrong, float(ndtr(ndtri(right) - mu)))
            if more == wrong:
                break
            right, wrong = min(right + i / (guesses - i) * (more - wrong), 1.0), more
        return right + wrong - guesses / canaries

    return _largest(excess)


def _largest(excess: Callable[[float], float]) -> float:
    """Return where a function that falls with epsilon crosses zero; 0 if it is negative from the start."""
    low, high = 1e-4, MAX_EPSILON
    if excess(low) <= 0:
        return 0.0
    return high if excess(high) > 0 else float(brentq(excess, low, high, xtol=1e-4))


def _counted(present: Array, absent: Array, value: Callable[[Any, Any], Any], levels: Array = LEVELS) -> Counts:
    """Choose the threshold that is best for `value` on the first runs; count errors at it on the others."""
    cut_present, cut_absent = selected(len(present)), selected(len(absent))
    first, second = np.sort(present[:cut_present]), np.sort(absent[:cut_absent])
    pooled = np.sort(np.concatenate([first, second]))
    middles = (pooled[1:] + pooled[:-1]) / 2
    thresholds = np.unique(np.quantile(middles, levels))
    # Judged by upper bounds on the rates, so that a threshold with few events is not chosen by luck.
    missed, alarms = np.searchsorted(first, thresholds), cut_absent - np.searchsorted(second, thresholds)
    judged = value(
        upper_rate(missed, cut_present, THRESHOLD_FAILURE), upper_rate(alarms, cut_absent, THRESHOLD_FAILURE)
    )
    threshold = thresholds[int(np.argmax(judged))]
    kept, others = present[cut_present:], absent[cut_absent:]
    return Counts(int((kept < threshold).sum()), len(kept), int((others >= threshold).sum()), len(others))


def _mu(fnr: Any, fpr: Any) -> Any:
    return -(ndtri(np.clip(fpr, 1e-300, 1 - 1e-16)) + ndtri(np.clip(fnr, 1e-300, 1 - 1e-16)))


def _composed(releases: Sequence[Release], factor: float, adjacency: Adjacency) -> Any:
    """Return the privacy loss distribution of the releases with their noise multiplied by a factor."""
    noisier = [replace(release, noise_multiplier=release.noise * factor) for release in releases]
    full, sampled = merge_gaussians(noisier, adjacency)
    relation = dp_accounting.NeighboringRelation
    neighbours = relation.REPLACE_ONE if adjacency == "replace-one" else relation.ADD_OR_REMOVE_ONE
    make = partial(pld.privacy_loss_distribution.from_gaussian_mechanism, value_discretization_interval=DISCRETIZATION)
    with suppress_library_warnings():
        total = pld.privacy_loss_distribution.identity(DISCRETIZATION)
        if math.isfinite(full):
            total = total.compose(make(full))
        for q, z, times in sampled:
            total = total.compose(make(z, sampling_prob=q, neighboring_relation=neighbours).self_compose(times))
        return total
