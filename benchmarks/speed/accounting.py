"""Seconds of a noise calibration on one core, beside the search of `dp_accounting` with its PLD accountant.

The library's accountant has its default grid (1e-4). That is too coarse for many small steps: it then adds noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import dp_accounting
import torch

from sfumato.engine import noise_multiplier

SETTINGS = [(1.0, 0.001, 200_000), (10.0, 0.001, 200_000), (0.2, 0.001, 200_000), (1.0, 0.01, 10_000), (1.0, 0.1, 300)]


def library(epsilon: float, sampling_prob: float, steps: int) -> float:
    def event(noise: float) -> dp_accounting.DpEvent:
        sampled = dp_accounting.PoissonSampledDpEvent(sampling_prob, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(sampled, steps)

    bracket = dp_accounting.LowerEndpointAndGuess(0.3, 2.0)
    accountant = dp_accounting.pld.PLDAccountant
    return float(dp_accounting.calibrate_dp_mechanism(accountant, event, epsilon, 1e-5, bracket, tol=1e-4))


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    torch.set_num_threads(1)
    for epsilon, sampling_prob, steps in SETTINGS:
        started = time.perf_counter()
        ours = noise_multiplier(epsilon=epsilon, sampling_prob=sampling_prob, steps=steps)
        middle = time.perf_counter()
        theirs = library(epsilon, sampling_prob, steps)
        seconds, their_seconds = middle - started, time.perf_counter() - middle
        measured = {"noise_multiplier": round(ours, 4), "noise_multiplier_library": round(theirs, 4)}
        measured |= {"seconds": round(seconds, 2), "ratio": round(their_seconds / seconds, 2)}
        job = f"epsilon {epsilon:g}, sampling probability {sampling_prob:g}, {steps} steps"
        yield {"job": job, "measured": measured}
