"""The audit of one method: structural checks, white box, black box, in one report with a verdict."""

from __future__ import annotations

import io
import math
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from sfumato.audit.black_box import MIN_RUNS, Game, OneRunAudit, audit_one_run, distinguish
from sfumato.audit.faults import fault_named
from sfumato.audit.lower_bounds import CONFIDENCE, LowerBounds, runs_needed
from sfumato.audit.mechanism import audit_mechanism
from sfumato.audit.membership import estimate_release_seconds
from sfumato.audit.neighbours import neighbours, small_set
from sfumato.audit.published import STEPS, audit_published
from sfumato.audit.reference import SmallClassifier
from sfumato.audit.small_settings import Make, small, with_vault
from sfumato.audit.structural import Finding, check_structure, structure_to_dict
from sfumato.audit.white_box import MIN_HISTORIES, exact_sums, score_trials, white_box
from sfumato.engine import GradientVault
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import list_methods, method_type
from sfumato.progress import bar
from sfumato.testing import UnsoundError

MECHANISMS = ("gaussian", "discrete-gaussian")  # audited without a method around them
STRUCTURAL_FITS = 24
TIMING_IMAGES = 200  # images of a run that measures the cost
WHITE_BOX, BLACK_BOX, RUNS = "white-box", "black-box", 40
CAVEAT = "A lower bound below the claim is no proof of privacy: it may show only that the attack is weak."


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how much.

    - epsilon, delta: the claim.
    - kind: neighbouring sets, a name in `neighbours.KINDS`.
    - structural: structural checks only, default False.
    - trials: white-box trials in each world.
    - runs: black-box runs in each world; 0 leaves them out.
    - seconds: no new run of an attack is started after this time.
    - fault: a planted fault (`faults.FAULTS`), to see the audit find it.
    - settings: parameters of the method, in place of the small ones.
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    kind: str = "worst-case"
    structural: bool = False
    trials: int = 100_000
    runs: int = RUNS
    seconds: float = 120.0
    confidence: float = CONFIDENCE
    fault: str | None = None
    settings: dict[str, Any] | None = None


@dataclass
class AuditReport:
    """Results of an audit.

    - certified: epsilon of the plan, or None if the method certifies nothing.
    - structure: a finding for each rule, or None if it was not checked.
    - bounds: lower bounds by threat model.
    - interrupted: whether time or Ctrl-C ended the audit early.
    """

    target: str
    options: AuditOptions
    certified: float | None
    structure: list[Finding] | None = None
    bounds: dict[str, LowerBounds] | None = None
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def violations(self) -> list[str]:
        """What contradicts the claim."""
        failed = [f"rule {each.rule!r}: {each.detail}" for each in self.structure or [] if each.result == "fail"]
        claim, level = self.options.epsilon, f"{self.options.confidence:.0%}"
        for name, found in (self.bounds or {}).items():
            if found.bound > claim:
                failed.append(
                    f"{name}: epsilon is at least {found.bound:.2f} with {level} confidence, the claim is {claim:g}"
                )
        return failed

    @property
    def notes(self) -> list[str]:
        """How much the lower bounds can say."""
        lines = []
        for name, found in (self.bounds or {}).items():
            if found.ceiling < self.options.epsilon:
                need = f"{found.trials} counted runs can show at most {found.ceiling:.2f}"
                lines.append(f"{name}: without an assumption, {need}; more runs could show more")
            if found.bound < 0.1 * self.options.epsilon:
                lines.append(f"{name}: {explain_small_bound(self.options, found)}")
        if self.interrupted:
            lines.append("ended early: the bounds are of what was counted until then")
        return [*lines, CAVEAT] if self.bounds else lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            **{name: value for name, value in vars(self.options).items() if value is not None},
            "certified": self.certified,
            "structure": None if self.structure is None else structure_to_dict(self.structure),
            "bounds": {name: found.to_dict() for name, found in (self.bounds or {}).items()},
            "violations": self.violations,
            "notes": self.notes,
            "took_seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
        }


def explain_small_bound(options: AuditOptions, found: LowerBounds) -> str:
    """Explain a small bound: what more runs of this attack, or of an ideal one, could show."""
    ideal = runs_needed(options.epsilon, delta=options.delta, confidence=found.confidence)
    return (
        "this attack has no power here; its bound says nothing about privacy. With the errors that it made, any number "
        f"of runs would show about {found.limit:.2f}. An attack that loses nothing would need about {ideal} runs in "
        "each world to show half of the claim"
    )


def prepare(target: str, options: AuditOptions) -> tuple[Make, type[GradientVault] | None]:
    """Return the method to audit, and a faulty vault if one is planted."""
    fault = None if options.fault is None else fault_named(options.fault)
    kind: type[Synthesizer] = SmallClassifier if target == SmallClassifier.key else method_type(target)
    if fault is not None and fault.method is not None:
        if target != fault.method.key:
            raise ValueError(f"the fault {options.fault!r} is planted in {fault.method.key}; audit that method")
        kind = fault.method
    given = {"epsilon": options.epsilon, "delta": options.delta, "secure": False, **(options.settings or {})}
    make = small(kind, **given)
    make().validate()
    return make, fault.vault if fault else None


def estimate_seconds(target: str, options: AuditOptions) -> float:
    """Return about how long an audit takes, from one recorded run and a few trials."""
    if target in MECHANISMS:
        return 10.0 if target != MECHANISMS[0] else 2.0
    make, vault = prepare(target, options)
    pair, started = neighbours(options.kind), time.monotonic()
    try:
        with redirect_stdout(io.StringIO()):  # a faulty method may print
            recorded, replayed = exact_sums(make, pair, seed=0, vault=vault)
    except (UnsoundError, ValueError):
        return 10.0  # a method that is refused at once
    fit = (time.monotonic() - started) / 2
    total = STRUCTURAL_FITS * fit * (target in method_keys())
    if not options.structural:
        started = time.monotonic()
        score_trials(recorded, replayed, 100, True)
        attack = 2 * (MIN_HISTORIES + options.runs) * fit + options.trials * 2 * (time.monotonic() - started) / 100
        total += min(attack, options.seconds)
    return total


def audit_method(target: str, options: AuditOptions) -> AuditReport:
    """Audit a method, `dp-sgd` (a small classifier, for reference) or one of `MECHANISMS`.

    Ctrl-C ends the audit; what was found until then is in the report.
    """
    started = time.monotonic()
    if target in MECHANISMS:
        fault = None if options.fault is None else fault_named(options.fault).vault
        report = AuditReport(target, options, options.epsilon)
        found = audit_mechanism(
            options.epsilon,
            delta=options.delta,
            secure=target != MECHANISMS[0],
            trials=None if options.trials == AuditOptions.trials else options.trials,
            vault=GradientVault if fault is None else fault,
            confidence=options.confidence,
        )
        report.bounds = {WHITE_BOX: found}
        report.seconds = time.monotonic() - started
        return report
    make, vault = prepare(target, options)
    pair = neighbours(options.kind)
    model = make()
    plan = model.plan(model.public_facts(pair.with_unit))
    report = AuditReport(target, options, plan.epsilon if math.isfinite(plan.epsilon) else None)
    try:
        if target in method_keys():
            with bar("structural checks") as advance:
                images = small_set(persons=options.kind == "person")
                report.structure = check_structure(make, images, vault=vault, advance=advance)
        if not options.structural:
            report.bounds = {}
            with redirect_stdout(io.StringIO()):
                _attack(report, make, vault)
    except KeyboardInterrupt:
        report.interrupted = True
    report.seconds = time.monotonic() - started
    return report


def audit_canaries(target: str, options: AuditOptions, game: Game, shadows: int = 0) -> OneRunAudit:
    """Audit a method by canaries in one run on the auditor's own images.

    - options: claim, confidence, seconds, fault and settings are used.
    - game: the images, which of them are canaries, and their coins.
    - shadows: further runs for LiRA.
    """
    make, vault = prepare(target, options)
    with bar("one run") as advance, redirect_stdout(io.StringIO()):  # a faulty method may print
        return audit_one_run(
            with_vault(make, vault),
            game,
            shadows=shadows,
            seconds=options.seconds,
            confidence=options.confidence,
            advance=advance,
        )


def estimate_canary_seconds(target: str, options: AuditOptions, game: Game, shadows: int = 0) -> float:
    """Return about how long `audit_canaries` takes, from a run on a few of the images."""
    make, vault = prepare(target, options)
    few = game.images.subset(range(min(TIMING_IMAGES, len(game.images))))
    started = time.monotonic()
    with redirect_stdout(io.StringIO()):
        with_vault(make, vault)().fit(few)
    fit = (time.monotonic() - started) * max(1.0, len(game.images) / 4 / len(few))  # a part does not grow with the set
    background = game.images.subset(game.unit_of < 0)
    return (1 + shadows) * (fit + estimate_release_seconds(game.images, game.canaries, background))


def method_keys() -> list[str]:
    """Return the keys of all methods."""
    return [info.key for info in list_methods()]


def _attack(report: AuditReport, make: Make, vault: type[GradientVault] | None) -> None:
    """Add the lower bounds of the white-box and the black-box attack to a report.

    Either bound may refute the claim, so they hold together with the confidence that is asked for.
    """
    options, started = report.options, time.monotonic()
    both = options.runs >= MIN_RUNS
    confidence = 1 - (1 - options.confidence) / (2 if both else 1)
    assert report.bounds is not None
    pair = neighbours(options.kind)
    if report.target in STEPS:
        report.bounds[WHITE_BOX] = audit_published(
            report.target, epsilon=options.epsilon, delta=options.delta, confidence=confidence
        )
    elif report.certified is not None and not (report.structure and _refused(report.structure)):
        with bar("white box") as advance:
            trials = white_box(make, pair, trials=options.trials, seconds=options.seconds, vault=vault, advance=advance)
        report.bounds[WHITE_BOX] = trials.bounds(confidence)
        report.interrupted |= trials.interrupted
    left = options.seconds - (time.monotonic() - started)
    if both and not report.interrupted and left > 0:
        with bar("black box") as advance:
            runs = distinguish(with_vault(make, vault), pair, runs=options.runs, seconds=left, advance=advance)
        report.bounds[BLACK_BOX] = runs.bounds(confidence)
        report.interrupted |= runs.interrupted


def _refused(findings: list[Finding]) -> bool:
    """Return whether the method could not be recorded at all."""
    return any(each.rule in ("charges", "control flow", "derivatives") and each.result == "fail" for each in findings)
