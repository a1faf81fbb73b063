"""Lower bounds: against the library of reference, against true values, and their failure rates."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_sigma_gaussian

from sfumato.audit import lower_bounds as module
from sfumato.audit.lower_bounds import (
    Counts,
    clopper_pearson,
    gaussian_dp,
    lower_bounds,
    one_run,
    one_run_gaussian,
    planned_gaussian,
    runs_needed,
    upper_rate,
)
from sfumato.engine import calibrate, epsilon
from sfumato.privacy import Budget, Release

DELTA = 1e-5


def gaussian_scores(true: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the Gaussian mechanism with this epsilon, `count` in each world."""
    rng = np.random.default_rng(seed)
    mu = 1 / get_sigma_gaussian(true, DELTA)
    return rng.standard_normal(count) + mu, rng.standard_normal(count)


def game(true: float, canaries: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and coins of canaries of one run."""
    rng = np.random.default_rng(seed)
    coins = rng.random(canaries) < 0.5
    return rng.standard_normal(canaries) + coins / get_sigma_gaussian(true, DELTA), coins


# Values of jax_privacy 2.0.0, auditing.py:
# _epsilon_one_run(0, m, guesses, correct, .05, 1e-5) and _epsilon_one_run_fdp(1e-4, m, guesses, correct, .05, 1e-5)
@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "steinke", "gaussian"),
    [
        (1000, 200, 150, 0.8199728, 1.2969161),
        (1000, 200, 190, 2.3936182, 3.9161045),
        (10000, 2000, 1500, 1.0112106, 1.4451785),
    ],
)
def test_one_run_bounds_agree_with_jax_privacy(
    canaries: int, guesses: int, correct: int, steinke: float, gaussian: float
) -> None:
    assert module._steinke(canaries, guesses, correct, 0.05, DELTA) == pytest.approx(steinke, abs=2e-4)
    assert module._mahloujifar(canaries, guesses, correct, 0.05, DELTA) == pytest.approx(gaussian, abs=2e-4)


@pytest.fixture(scope="module")
def jax_auditing() -> Any:
    """Return jax_privacy's module for audits, which does not need JAX. The package around it does."""
    spec = importlib.util.find_spec("jax_privacy")
    if spec is None or spec.origin is None:
        pytest.skip("jax_privacy is not installed")
    found = importlib.util.spec_from_file_location("jax_auditing", Path(spec.origin).parent / "auditing.py")
    assert found is not None
    assert found.loader is not None
    library = importlib.util.module_from_spec(found)
    sys.modules["jax_auditing"] = library  # its dataclasses look themselves up
    found.loader.exec_module(library)
    return library


def test_estimators_are_those_of_jax_privacy(jax_auditing: Any) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        canaries = int(rng.integers(50, 600))
        guesses = int(rng.integers(10, canaries + 1))
        correct = int(rng.integers(guesses // 2, guesses + 1))
        for ours, theirs, start in (
            (module._steinke, jax_auditing._epsilon_one_run, 0.0),
            (module._mahloujifar, jax_auditing._epsilon_one_run_fdp, 1e-4),
        ):
            wanted = theirs(start, canaries, guesses, correct, 0.05, DELTA)
            assert ours(canaries, guesses, correct, 0.05, DELTA) == pytest.approx(wanted, abs=3e-4)
        wanted = jax_auditing._clopper_pearson_upper(np.array([correct]), guesses, 0.025)[0]
        assert upper_rate(correct, guesses, 0.025) == pytest.approx(wanted)


@pytest.mark.parametrize("true", [1.0, 4.0])
def test_bounds_are_as_strong_as_those_of_jax_privacy(jax_auditing: Any, true: float) -> None:
    """Medians over draws. Its bound corrects for all thresholds; ours chooses one on a quarter of the scores.

    Its `epsilon_from_gdp` is not compared: it takes the absolute value of mu at upper bounds of the rates, and exceeds
    the true epsilon (3.2 of 1 for these scores).
    """
    draws = [gaussian_scores(true, 5000, seed) for seed in range(5)]
    found = [lower_bounds(*scores) for scores in draws]
    theirs = [jax_auditing.CanaryScoreAuditor(*scores) for scores in draws]
    counted = np.median([each.epsilon_clopper_pearson(0.05, DELTA, one_sided=False) for each in theirs])
    assert np.median([each.clopper_pearson for each in found]) > 0.75 * counted


def test_rates_are_clopper_pearson() -> None:
    """By definition: at the upper bound, so few events have exactly the failure probability."""
    from scipy.stats import binom

    for events, trials in ((0, 10), (3, 50), (49, 50)):
        assert binom.cdf(events, trials, upper_rate(events, trials, 0.025)) == pytest.approx(0.025)
    assert upper_rate(50, 50, 0.025) == 1.0
    assert Counts(3, 50, 0, 10).rates(0.95) == (upper_rate(3, 50, 0.025), upper_rate(0, 10, 0.025))


def test_known_rates_give_known_epsilons() -> None:
    assert clopper_pearson(0.5, 0.1, 0.0) == pytest.approx(math.log(5))
    assert clopper_pearson(0.1, 0.5, 0.0) == pytest.approx(math.log(5))  # the other direction
    assert clopper_pearson(0.6, 0.6, 0.0) == 0.0
    assert clopper_pearson(1.0, 1.0, 0.0) == 0.0
    mu = 1 / get_sigma_gaussian(2.0, DELTA)
    from scipy.stats import norm

    assert gaussian_dp(norm.sf(mu / 2), norm.sf(mu / 2), DELTA) == pytest.approx(2.0, abs=1e-3)
    assert gaussian_dp(0.5, 0.6, DELTA) == 0.0


def test_the_bound_for_a_plan_is_that_of_gaussian_dp_without_sampling() -> None:
    releases = [Release("a", noise_multiplier=2.0), Release("b", times=3, noise_multiplier=4.0)]
    assert planned_gaussian(0.2, 0.3, releases, DELTA) == pytest.approx(gaussian_dp(0.2, 0.3, DELTA), rel=0.01)


def test_the_bound_for_a_sampled_plan_recovers_its_epsilon() -> None:
    """Rates on the trade-off curve of a plan give the plan's own epsilon, and worse rates less."""
    releases = calibrate([Release("a", times=20, sampling_prob=0.2)], Budget(2.0, DELTA)).releases
    allowed = module._composed(releases, 1.0, "add-remove").get_delta_for_epsilon(module.EPSILON_GRID.tolist())
    fpr = 1e-3
    fnr = float(np.max(1 - np.asarray(allowed) - np.exp(module.EPSILON_GRID) * fpr))
    found = planned_gaussian(fnr, fpr, releases, DELTA)
    assert found == pytest.approx(2.0, rel=0.01)
    assert planned_gaussian(fnr + 0.05, fpr, releases, DELTA) < found
    assert planned_gaussian(0.6, 0.6, releases, DELTA) == 0.0


@pytest.mark.parametrize(("true", "count"), [(1.0, 200_000), (4.0, 200_000)])
def test_gaussian_bound_reaches_80_percent(true: float, count: int) -> None:
    found = lower_bounds(*gaussian_scores(true, count, 0))
    assert 0.8 * true < found.gaussian < 1.02 * true
    assert found.clopper_pearson < found.gaussian


# What is attainable (../shared/notes/anchors.md): true epsilon, canaries, Clopper-Pearson, one run, one run f-DP
@pytest.mark.parametrize(
    ("true", "canaries", "by_counts", "steinke", "fdp"),
    [(1.0, 10_000, 0.16, 0.49, 0.47), (4.0, 10_000, 1.9, 1.6, 2.0), (10.0, 10_000, 3.8, 3.9, 6.0)],
)
def test_bounds_reach_what_is_attainable(
    true: float, canaries: int, by_counts: float, steinke: float, fdp: float
) -> None:
    """Medians over draws, with 25 % to spare for the scatter."""
    counted = [lower_bounds(*gaussian_scores(true, canaries // 2, seed)).clopper_pearson for seed in range(10)]
    runs = [game(true, canaries, seed) for seed in range(10)]
    assert np.median(counted) > 0.75 * by_counts
    assert np.median([one_run(*run) for run in runs]) > 0.75 * steinke
    assert np.median([one_run_gaussian(*run) for run in runs[:3]]) > 0.75 * fdp


def test_the_number_of_runs_that_an_ideal_attack_needs() -> None:
    """With that many runs half of epsilon is shown, in the median; with a tenth of them it is not."""
    for true in (1.0, 10.0):
        needed = runs_needed(true)
        enough, few = (
            np.median([lower_bounds(*gaussian_scores(true, max(8, count), seed)).bound for seed in range(30)])
            for count in (needed, needed // 10)
        )
        assert enough > 0.45 * true
        assert few < 0.45 * true
    assert runs_needed(10.0) < 100 < 1000 < runs_needed(1.0) < 4000


def test_the_limit_is_an_estimate_of_what_many_runs_show() -> None:
    few, many = (lower_bounds(*gaussian_scores(4.0, count, 0)) for count in (200, 200_000))
    assert few.bound < few.limit
    assert many.limit == pytest.approx(4.0, rel=0.05)
    assert lower_bounds(np.ones(40), np.zeros(40), releases=None).limit > 3


def test_bounds_fail_no_more_often_than_stated() -> None:
    """At 90 % confidence each bound exceeds the truth in at most 10 % of 100 games; 22 has a probability of 1e-3.

    `python -m benchmarks audit` has more of this, at 95 % and for Poisson samples.
    """
    true, exceeded = 1.0, dict.fromkeys(("counts", "gaussian", "one run", "one run f-DP"), 0)
    for seed in range(100):
        found = lower_bounds(*gaussian_scores(true, 400, seed), confidence=0.9)
        scores, coins = game(true, 400, seed)
        exceeded["counts"] += found.clopper_pearson > true
        exceeded["gaussian"] += found.gaussian > true
        exceeded["one run"] += one_run(scores, coins, confidence=0.9) > true
        if seed < 20:  # it is slow
            exceeded["one run f-DP"] += one_run_gaussian(scores, coins, confidence=0.9) > true
    assert max(exceeded.values()) <= 21, exceeded


def test_the_bound_for_a_sampled_plan_has_power() -> None:
    """Log-likelihood ratios of 20 Poisson-sampled Gaussian releases: half of epsilon, and never more than it."""
    (release,) = calibrate([Release("a", times=20, sampling_prob=0.2)], Budget(2.0, DELTA)).releases
    rng, z, q, worlds = np.random.default_rng(0), release.noise, release.sampling_prob, []
    for present in (True, False):
        shift = (rng.random((20_000, 20)) < q) * float(present)
        ratio = (rng.normal(shift, z) - 0.5) / z**2
        worlds.append(np.logaddexp(np.log1p(-q), np.log(q) + ratio).sum(1))
    found = lower_bounds(*worlds, releases=[release])
    assert found.gaussian is not None
    assert 1.0 < found.gaussian < 2.0


def test_without_signal_all_bounds_are_small() -> None:
    rng = np.random.default_rng(0)
    found = lower_bounds(rng.standard_normal(1000), rng.standard_normal(1000))
    coins = rng.random(1000) < 0.5
    assert max(found.clopper_pearson, found.gaussian) < 0.2
    assert one_run(rng.standard_normal(1000), coins) < 0.2


def test_a_perfect_attack_reaches_the_ceiling() -> None:
    found = lower_bounds(np.ones(100), np.zeros(100))
    assert found.clopper_pearson == pytest.approx(found.ceiling)
    assert found.trials == 75
    assert epsilon(noise_multiplier=1.0) > found.ceiling > 2.5
    assert found.to_dict()["confidence"] == 0.95


def test_few_runs_of_a_perfect_attack_reach_the_ceiling() -> None:
    """The threshold is chosen on five runs, whose own intervals would say nothing."""
    found = lower_bounds(np.ones(20) + np.arange(20) / 100, np.zeros(20))
    assert found.clopper_pearson == pytest.approx(found.ceiling)
    assert found.ceiling > 1.0


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 runs"):
        lower_bounds([1.0] * 7, [0.0] * 9)
