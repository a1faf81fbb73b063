"""Audit of one mechanism: hundreds of thousands of single releases of one number, 0 or 1, an outlier against nothing.

This measures the noise that the vault adds, without a method around it. The true epsilon is known exactly, so it also
calibrates the auditor: what share of the true epsilon do the bounds reach?
"""

from __future__ import annotations

import torch

from sfumato.audit.lower_bounds import CONFIDENCE, LowerBounds, lower_bounds
from sfumato.data import ImageSet
from sfumato.engine import GradientVault, calibrate
from sfumato.privacy import Budget, Release

TRIALS = 400_000  # in each world
SECURE_TRIALS = 40_000  # exact discrete noise is drawn at about 50,000 numbers a second
STEPS = 2**20  # integer steps of the discrete form per unit


def audit_mechanism(
    epsilon: float,
    *,
    delta: float = 1e-5,
    secure: bool = False,
    trials: int | None = None,
    vault: type[GradientVault] = GradientVault,
    confidence: float = CONFIDENCE,
) -> LowerBounds:
    """Return lower bounds on the epsilon of the vault's Gaussian mechanism, calibrated to `epsilon`.

    - secure: audit the exact discrete form, default False.
    - trials: releases in each world, default 400,000, and 40,000 for the discrete form.
    - vault: class of the vault, for planted faults.
    """
    plan = calibrate([Release("sum")], Budget(epsilon, delta))
    mechanism = vault(ImageSet(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), plan)
    sensitivity = float(STEPS if secure else 1)
    count = trials or (SECURE_TRIALS if secure else TRIALS)
    present, absent = (
        mechanism._noised(plan["sum"], torch.full((count,), value, dtype=torch.float64), sensitivity, secure).numpy()
        for value in (sensitivity, 0.0)
    )
    return lower_bounds(present, absent, delta=delta, confidence=confidence)
