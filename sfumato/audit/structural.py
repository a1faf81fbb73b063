"""Structural checks of a method, rule by rule: record and replay on small public sets (`testing.py`).

They are deterministic, but for tests of the noise and of the sampling that a sound method fails with a probability of
about 1e-9. They find what no lower bound can: a file, a printed number or a branch that depends on one image.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from sfumato.audit.neighbours import small_set
from sfumato.audit.small_settings import Make
from sfumato.data import ImageSet
from sfumato.engine import GradientVault
from sfumato.privacy import BudgetExceeded, RedactedError
from sfumato.testing import RULES, UnsoundError, soundness_checks


@dataclass(frozen=True)
class Finding:
    """The result for one rule: `pass`, `fail`, or `not reached` because another rule failed before."""

    rule: str
    result: str
    detail: str

    @property
    def passed(self) -> bool:
        return self.result == "pass"


def check_structure(
    make: Make,
    images: ImageSet | None = None,
    *,
    vault: type[GradientVault] | None = None,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> list[Finding]:
    """Return a finding for each rule.

    - make: returns the method, `make(**params)`.
    - images: a small public set as `check_synthesizer` needs it, default: 22 digits.
    - vault: class of the vault, for planted faults; default: that of the method.
    """
    failed: dict[str, str] = {}
    reached: set[str] = set()
    checks = list(soundness_checks(make, images or small_set(), vault))
    for number, (rules, check) in enumerate(checks, 1):
        advance(number, len(checks))
        if failed.keys() & set(rules):
            continue
        try:
            with redirect_stdout(io.StringIO()):  # a faulty method may print
                check()
            reached |= set(rules)
        except UnsoundError as error:
            failed.setdefault(error.rule, str(error))
            if error.rule in rules:  # a check goes through its rules in order
                reached |= set(rules[: rules.index(error.rule)])
        except (BudgetExceeded, RedactedError, ValueError) as error:  # the vault or the tracer refuses the method
            failed.setdefault("control flow", f"refused: {error}")
    return [_finding(rule, failed, reached) for rule in RULES]


def _finding(rule: str, failed: dict[str, str], reached: set[str]) -> Finding:
    if rule in failed:
        return Finding(rule, "fail", failed[rule])
    return Finding(rule, "pass", RULES[rule]) if rule in reached else Finding(rule, "not reached", RULES[rule])


def structure_to_dict(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings as JSON holds them."""
    return {"sound": all(each.passed for each in findings), "rules": [vars(each) for each in findings]}
