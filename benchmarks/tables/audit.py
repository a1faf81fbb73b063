"""Audits: lower bounds on epsilon beside what is certified, planted faults, and the published forms; on digits.

Methods have small settings (`sfumato/audit/small_settings.py`); those for the black box train a little longer. Noise is
calibrated to the settings, so the guarantee is the same. No GPU is needed.
"""

from __future__ import annotations

import argparse
from typing import Any

import sfumato as sf
from benchmarks.runner import Job
from sfumato.audit.black_box import audit_one_run, distinguish, new_game
from sfumato.audit.faults import FAULTS
from sfumato.audit.mechanism import audit_mechanism
from sfumato.audit.neighbours import neighbours
from sfumato.audit.published import STEPS, audit_published
from sfumato.audit.reference import SmallClassifier
from sfumato.audit.small_settings import small
from sfumato.audit.structural import check_structure
from sfumato.audit.white_box import white_box

METHODS = ("atelier", "dp-kernel", "dp-lflow", "pge", "dp-diffusion", "dp-mepf", "dp-merf", "ndpdc", "ldpdc", "dpmix")
EPSILONS = (1.0, 10.0)
TRIALS, RUNS, CANARIES, PERSONS, SHADOWS = 24_000, 24, 500, 100, 2
FEWER = {"pge": 6000, "dp-diffusion": 6000}  # white-box trials of large networks
MORE = {"batch-statistics": 60_000}  # white-box trials of a fault that shows less
LONGER: dict[str, dict[str, Any]] = {
    **{key: {"steps": 50} for key in ("atelier", "dp-kernel", "dp-mepf", "dp-merf")},
    **{key: {"steps": 10} for key in ("dp-lflow", "pge")},
    "pge-as-published": {"steps": 200},
    "dp-kernel-as-published": {"steps": 200},
}
IMAGES: dict[str, dict[str, Any]] = {  # settings with which digits are recognisable
    "dp-merf": {"features": 2000, "steps": 500, "batch_size": 200},
    "ndpdc": {"iterations": 100, "images_per_class": 20},
}
CONSTANTS: dict[str, dict[str, Any]] = {"dp-merf": {}, "ndpdc": {"width": 32}}
Rows = dict[str, dict[str, Any]]


def mechanism(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    return {job.name: audit_mechanism(job.epsilon, secure="discrete" in job.name).to_dict()}


def dp_sgd(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    found = white_box(small(SmallClassifier, epsilon=job.epsilon), neighbours("outlier"), trials=TRIALS // 3)
    return {job.name: {"certified": round(found.plan.epsilon, 4), **found.bounds().to_dict()}}


def see_all(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    if job.method in STEPS:
        return {job.name: audit_published(job.method, epsilon=job.epsilon).to_dict()}
    make = small(job.method, epsilon=job.epsilon, secure=False)
    found = white_box(make, neighbours("outlier"), trials=FEWER.get(job.method, TRIALS))
    return {job.name: {"certified": round(found.plan.epsilon, 4), **found.bounds().to_dict()}}


def see_images(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    make = small(job.method, epsilon=job.epsilon, secure=False, **job.params)
    return {job.name: distinguish(make, neighbours("outlier"), runs=RUNS).bounds().to_dict()}


def plant(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    name = job.name.removeprefix("fault ")
    fault = FAULTS[name]
    make = small(fault.method or job.method, epsilon=job.epsilon, secure=False)
    failed = [each.rule for each in check_structure(make, vault=fault.vault) if each.result == "fail"]
    measured: dict[str, Any] = {"what": fault.description, "found_by": failed}
    if fault.statistical:
        trials = MORE.get(name, TRIALS)
        measured |= white_box(make, neighbours("outlier"), trials=trials, vault=fault.vault).bounds().to_dict()
    return {job.name: measured}


def one_run(job: Job, seed: int, options: argparse.Namespace) -> Rows:  # noqa: ARG001
    """Canaries in distribution with a detail, a person's worth of them, and a random half without canaries."""
    digits = sf.load_images("digits")
    games = {
        "detail": new_game(digits, canaries=CANARIES, seed=seed),
        "persons": new_game(digits, canaries=PERSONS, per_person=5, seed=seed),
        "split": new_game(digits, canaries=CANARIES, detail=False, seed=seed),
    }
    make = small(job.method, epsilon=job.epsilon, secure=False, **job.params, **job.constants)
    found = {}
    for name, game in games.items():
        results = audit_one_run(make, game, shadows=SHADOWS if name == "split" else 0)
        found[name] = [each.to_dict() for each in results]
    return {job.name: found}


JOBS = [
    *[Job("gaussian", None, "digits", epsilon, seeds=1, run=mechanism) for epsilon in (1.0, 4.0, 10.0)],
    *[Job("discrete gaussian", None, "digits", epsilon, seeds=1, run=mechanism) for epsilon in (1.0, 4.0, 10.0)],
    *[Job("dp-sgd", None, "digits", epsilon, seeds=1, run=dp_sgd) for epsilon in (1.0, 4.0, 10.0)],
    *[Job("white box", m, "digits", epsilon, seeds=1, run=see_all) for m in METHODS for epsilon in EPSILONS],
    *[Job("white box", m, "digits", 1.0, seeds=1, run=see_all) for m in STEPS],
    *[
        Job(f"fault {name}", "dp-merf" if fault.method else "ndpdc", "digits", 1.0, seeds=1, run=plant)
        for name, fault in FAULTS.items()
    ],
    *[
        Job("one run", m, "digits", epsilon, IMAGES[m], CONSTANTS[m], seeds=1, run=one_run)
        for m in IMAGES
        for epsilon in EPSILONS
    ],
    *[Job("black box", m, "digits", 1.0, LONGER[m], seeds=1, run=see_images) for m in STEPS],
    *[
        Job("black box", m, "digits", epsilon, LONGER.get(m, {}), seeds=1, run=see_images)
        for m in reversed(METHODS)  # the slow ones last
        for epsilon in EPSILONS
    ],
]
