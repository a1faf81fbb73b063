"""Audit of one mechanism: hundreds of thousands of single releases of one number, 0 or 1, an outlier against nothing.

This measures the noise that the vault adds, without a method around it. The true epsilon is known exactly, so it also
calibrates the auditor: what share of the true epsilon do the bounds reach?
"""

from __future__ import annotations

import torch

from sfumato.audit.lower_bounds import CONFIDENCE, LowerBounds, lower_bounds
from sfumato.engine import noise_multiplier
from sfumato.privacy.mechanisms import add_discrete_gaussian, add_gaussian

TRIALS = 400_000  # in each world
SECURE_TRIALS = 40_000  # exact discrete noise is drawn at about 50,000 numbers a second
STEPS = 2**20  # integer steps of the discrete form per unit


def audit_mechanism(
    epsilon: float,
    *,
    delta: float = 1e-5,
    secure: bool = False,
    trials: int | None = None,
    noise_factor: float = 1.0,
    confidence: float = CONFIDENCE,
) -> LowerBounds:
    """Return lower bounds on the epsilon of the Gaussian mechanism, calibrated to `epsilon`.

    - secure: audit the exact discrete form, default False.
    - trials: releases in each world, default 400,000, and 40,000 for the discrete form.
    - noise_factor: a planted fault: this factor times the noise that is needed, default 1.
    """
    count = trials or (SECURE_TRIALS if secure else TRIALS)
    scale = noise_multiplier(epsilon=epsilon, delta=delta) * noise_factor
    scores = []
    for value in (1, 0):
        if secure:
            exact = torch.full((count,), value * STEPS, dtype=torch.int64)
            scores.append(add_discrete_gaussian(exact, scale * STEPS).double().numpy())
        else:
            scores.append(add_gaussian(torch.full((count,), float(value), dtype=torch.float64), scale).numpy())
    return lower_bounds(*scores, delta=delta, confidence=confidence)
