"""Audits: lower bounds on epsilon beside what is certified, planted faults, and the published forms; on digits.

Methods have small settings (`sfumato/audit/small_settings.py`); those for the black box are chosen so that images say
much about the releases. Noise is calibrated to the settings, so the guarantee is the same. No GPU is needed.

The numbers of trials, runs and canaries below were fixed before the run that is kept; settings of the black box were
chosen in earlier trials, whose runs are not counted.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from dp_accounting import get_sigma_gaussian

import sfumato as sf
from benchmarks.runner import Job
from sfumato.audit import lower_bounds as estimators
from sfumato.audit.black_box import audit_one_run, distinguish, new_game
from sfumato.audit.faults import FAULTS
from sfumato.audit.mechanism import audit_mechanism
from sfumato.audit.neighbours import neighbours
from sfumato.audit.published import STEPS, audit_published
from sfumato.audit.reference import SmallClassifier
from sfumato.audit.small_settings import small, with_vault
from sfumato.audit.structural import check_structure
from sfumato.audit.white_box import white_box
from sfumato.engine import calibrate
from sfumato.privacy import Budget, Release

METHODS = (
    *("atelier", "dp-kernel", "dp-lflow", "pge", "dp-diffusion", "private-evolution", "dp-mepf", "dp-merf", "ndpdc"),
    *("ldpdc", "dpmix", "tuned"),
)
EPSILONS = (1.0, 10.0)
TRIALS, FEWER, DP_SGD_TRIALS = 40_000, {"pge": 16_000, "dpmix": 16_000}, 8_000  # white box
FAULT_TRIALS = 60_000
RUNS = {  # black box
    **{"ldpdc": 400, "dpmix": 400, "ndpdc": 200, "dp-merf": 120, "dp-mepf": 40, "dp-lflow": 40, "dp-kernel": 40},
    **{
        "pge": 24,
        "dp-diffusion": 24,
        "private-evolution": 24,
        "tuned": 24,
        "atelier": 24,
        "dp-kernel-as-published": 120,
        "pge-as-published": 24,
    },
}
FAULT_RUNS = 60
CANARIES, PERSONS, SHADOWS = 500, 140, 2
ONE_RELEASE = {"images_per_class": 1, "sampling_prob": 1.0}
TELLING: dict[str, dict[str, Any]] = {  # settings for the black box
    "ldpdc": ONE_RELEASE,
    "dpmix": ONE_RELEASE,
    "ndpdc": {"images_per_class": 2, "sampling_prob": 1.0},
    "dp-merf": {"steps": 50},
    **{key: {"steps": 20} for key in ("atelier", "dp-kernel", "dp-mepf")},
    "dp-kernel-as-published": {"steps": 200},
    "pge-as-published": {"steps": 60},
}
BLACK_BOX_FAULTS = (("no-noise", "ldpdc"), ("no-noise", "dp-merf"), ("private-mean", "dpmix"))
IMAGES: dict[str, dict[str, Any]] = {  # settings with which digits are recognisable, or mixtures are of few images
    "dp-merf": {"features": 2000, "steps": 500, "batch_size": 200},
    "ndpdc": {"iterations": 100, "images_per_class": 20},
    "dpmix": {"images_per_class": 600, "sampling_prob": 0.0006},
}
# Named constants of the methods, for the black box and for one run.
EMA, WIDTH = {"dp-kernel-as-published": {"ema": 0.9}}, {"ndpdc": {"width": 32}}
SIMULATIONS = 2000
Rows = dict[str, dict[str, Any]]


def mechanism(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    return {job.name: audit_mechanism(job.epsilon, secure="discrete" in job.name).to_dict()}


def dp_sgd(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    kind = "worst-case" if "canary" in job.name else "outlier"
    found = white_box(small(SmallClassifier, epsilon=job.epsilon), neighbours(kind), trials=DP_SGD_TRIALS)
    return {job.name: {"certified": round(found.plan.epsilon, 4), **found.bounds().to_dict()}}


def see_all(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    if job.method in STEPS:
        return {job.name: audit_published(job.method, epsilon=job.epsilon).to_dict()}
    make = small(job.method, epsilon=job.epsilon, secure=False)
    found = white_box(make, neighbours("worst-case"), trials=FEWER.get(job.method, TRIALS))
    return {job.name: {"certified": round(found.plan.epsilon, 4), **found.bounds().to_dict()}}


def see_images(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    make = small(job.method, epsilon=job.epsilon, secure=False, **job.params, **job.constants)
    runs = RUNS[job.method]
    if job.name.startswith("black box, fault "):
        make, runs = with_vault(make, FAULTS[job.name.removeprefix("black box, fault ")].vault), FAULT_RUNS
    return {job.name: distinguish(make, neighbours("outlier"), runs=runs).bounds().to_dict()}


def plant(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    fault = FAULTS[job.name.removeprefix("fault ")]
    make = small(fault.method or job.method, epsilon=job.epsilon, secure=False)
    failed = [each.rule for each in check_structure(make, vault=fault.vault) if each.result == "fail"]
    measured: dict[str, Any] = {"what": fault.description, "found_by": failed}
    if fault.statistical:
        measured |= white_box(make, neighbours("outlier"), trials=FAULT_TRIALS, vault=fault.vault).bounds().to_dict()
    return {job.name: measured}


def one_run(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    """Canaries in distribution with a detail, a person's worth of them, and a random part without canaries."""
    digits = sf.load_images("digits")
    games = {
        "detail": new_game(digits, canaries=CANARIES, seed=seed),
        "persons": new_game(digits, canaries=PERSONS, per_person=5, seed=seed),
        "split": new_game(digits, canaries=CANARIES, detail=False, seed=seed),
    }
    make = small(job.method, epsilon=job.epsilon, secure=False, **job.params, **job.constants)
    if job.name.startswith("one run, fault "):
        make = with_vault(make, FAULTS[job.name.removeprefix("one run, fault ")].vault)
    shadows = {"split": SHADOWS if job.method != "dpmix" else 0}
    return {
        job.name: {
            name: audit_one_run(make, game, shadows=shadows.get(name, 0)).to_dict() for name, game in games.items()
        }
    }


def false_alarms(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    """Simulate each estimator on mechanisms that keep their epsilon: how often is a 95 % lower bound too large?"""
    rng, delta, epsilon = np.random.default_rng(seed), 1e-5, float(job.epsilon or 1)
    mu = 1 / get_sigma_gaussian(epsilon, delta)
    (sampled,) = calibrate([Release("a", times=4, sampling_prob=0.5)], Budget(epsilon, delta)).releases
    allowed = np.asarray(
        estimators._composed([sampled], 1.0, "add-remove").get_delta_for_epsilon(estimators.EPSILON_GRID.tolist())
    )
    failures = dict.fromkeys(("clopper_pearson", "gaussian", "planned_gaussian", "one_run", "one_run_gaussian"), 0)
    least = {
        name: {k: _fewest_correct(bound, 400, k, epsilon, delta) for k in (int(s * 400) for s in estimators.GUESSED)}
        for name, bound in (("one_run", estimators._steinke), ("one_run_gaussian", estimators._mahloujifar))
    }
    for _ in range(SIMULATIONS):
        # Randomised response is the tightest mechanism for the bound without an assumption.
        truth = 1 / (1 + np.exp(epsilon))
        told = [(rng.random(400) < rate).astype(float) for rate in (1 - truth, truth)]
        counts = estimators._counted(*told, lambda fnr, fpr: estimators.clopper_pearson(fnr, fpr, 0.0))
        failures["clopper_pearson"] += estimators.clopper_pearson(*counts.rates(0.95), 0.0) > epsilon
        scores = rng.standard_normal(400) + mu, rng.standard_normal(400)
        rates = estimators._counted(*scores, estimators._mu, np.array([0.5])).rates(0.95)
        failures["gaussian"] += estimators._mu(*rates) > mu
        worlds = []
        for present in (1.0, 0.0):
            shift = (rng.random((400, 4)) < 0.5) * present
            ratio = (shift + sampled.noise * rng.standard_normal((400, 4)) - 0.5) / sampled.noise**2
            worlds.append(np.logaddexp(np.log(0.5), np.log(0.5) + ratio).sum(1))
        fnr, fpr = estimators._counted(*worlds, estimators._mu, estimators.CENTRAL_LEVELS).rates(0.95)
        refuted = max(
            (1 - a - np.exp(estimators.EPSILON_GRID) * b - allowed).max() for a, b in ((fnr, fpr), (fpr, fnr))
        )
        failures["planned_gaussian"] += refuted > 0
        coins = rng.random(400) < 0.5
        for name, outcome in (
            ("one_run", np.where(rng.random(400) < truth, ~coins, coins) + 1e-6 * rng.random(400)),
            ("one_run_gaussian", rng.standard_normal(400) + mu * coins),
        ):
            order = coins[np.argsort(outcome)]
            failures[name] += any(order[-k:].sum() + (~order[:k]).sum() >= n for k, n in least[name].items())
    return {job.name: {name: float(count) / SIMULATIONS for name, count in failures.items()}}


def _fewest_correct(bound: Any, canaries: int, k: int, epsilon: float, delta: float) -> int:
    """Return with how many correct guesses of 2 k a one-run bound exceeds epsilon."""
    low, high = 0, 2 * k + 1
    while low < high:
        middle = (low + high) // 2
        above = bound(canaries, 2 * k, middle, 0.05 / len(estimators.GUESSED), delta) > epsilon
        low, high = (low, middle) if above else (middle + 1, high)
    return low


JOBS = [
    *[Job("false alarms", None, "simulated", epsilon, seeds=1, run=false_alarms) for epsilon in (1.0, 4.0)],
    *[Job("gaussian", None, "digits", epsilon, seeds=1, run=mechanism) for epsilon in (1.0, 4.0, 10.0)],
    *[Job("discrete gaussian", None, "digits", epsilon, seeds=1, run=mechanism) for epsilon in (1.0, 4.0, 10.0)],
    *[Job("white box", m, "digits", epsilon, seeds=1, run=see_all) for m in METHODS for epsilon in EPSILONS],
    *[Job("white box", m, "digits", 1.0, seeds=1, run=see_all) for m in STEPS],
    *[
        Job(f"fault {name}", "dp-merf" if fault.method else "ndpdc", "digits", 1.0, seeds=1, run=plant)
        for name, fault in FAULTS.items()
    ],
    *[
        Job(f"black box, fault {name}", m, "digits", 1.0, TELLING[m], seeds=1, run=see_images)
        for name, m in BLACK_BOX_FAULTS
    ],
    Job("one run, fault no-noise", "dpmix", "digits", 1.0, IMAGES["dpmix"], seeds=1, run=one_run),
    *[Job("one run", m, "digits", 1.0, IMAGES[m], WIDTH.get(m, {}), seeds=1, run=one_run) for m in IMAGES],
    *[Job(name, None, "digits", 4.0, seeds=1, run=dp_sgd) for name in ("dp-sgd", "dp-sgd, canary")],
    *[Job("black box", m, "digits", 1.0, TELLING[m], EMA.get(m, {}), seeds=1, run=see_images) for m in STEPS],
    *[
        Job("black box", m, "digits", epsilon, TELLING.get(m, {}), seeds=1, run=see_images)
        for m in reversed(METHODS)  # the slow ones last
        for epsilon in EPSILONS
    ],
    *[
        Job("one run", m, "digits", 10.0, IMAGES[m], WIDTH.get(m, {}), seeds=1, run=one_run)
        for m in IMAGES
        if m != "dpmix"
    ],
    *[Job(n, None, "digits", e, seeds=1, run=dp_sgd) for n in ("dp-sgd", "dp-sgd, canary") for e in (1.0, 10.0)],
]
