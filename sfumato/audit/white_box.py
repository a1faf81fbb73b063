"""White-box audit: the attacker sees every release of a run and knows all records but one.

He also knows which of the other units are in each sample and the random numbers of each record, which the guarantee
allows. He does not know whether the differing unit is in a sample.

A run of the method on the set with the unit is recorded (`testing.py`); a second run on the set without it replays the
same releases. Both give the exact sums of each query, given what was released before: all that this attacker can know.
Then each release is drawn again many times by the vault's own code, in both worlds: Poisson sample of the unit, noise.
The score of a trial is the log-likelihood ratio, which no attack on the same releases can beat.

The recorded history has the differing unit in every sample: a history like any other, since the guarantee holds given
every history. A unit that is present but not in a sample is taken to change nothing. This is so in the vault; for a
fault that depends on it (a private size) the trials model a little less than the leak.

Validity: given the history of a run, trials are independent, and both worlds share the history. The rates are means
over histories, so they obey the inequality of differential privacy if every history does (it is linear), and binomial
intervals hold for such means (Hoeffding 1956).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sfumato.audit.lower_bounds import CONFIDENCE, Array, LowerBounds, lower_bounds
from sfumato.audit.neighbours import Neighbours
from sfumato.audit.small_settings import Make
from sfumato.audit.worst_case_rows import with_worst_case_rows
from sfumato.engine import GradientVault
from sfumato.privacy import Plan
from sfumato.testing import Answer, Tape, UnsoundError, record

MIN_HISTORIES = 8  # runs of the method, each with its own releases
MAX_NUMBERS = 2_000_000  # noise values in memory at a time


@dataclass
class Trials:
    """Scores of trials in both worlds, and the plan of the method."""

    plan: Plan
    present: list[Array] = field(default_factory=list)
    absent: list[Array] = field(default_factory=list)
    interrupted: bool = False

    def bounds(self, confidence: float = CONFIDENCE) -> LowerBounds:
        """Return lower bounds on epsilon at the plan's delta."""
        budget = self.plan.budget
        return lower_bounds(
            np.concatenate(self.present),
            np.concatenate(self.absent),
            delta=budget.delta,
            confidence=confidence,
            releases=self.plan.releases,
            adjacency=budget.adjacency,
        )


def white_box(
    make: Make,
    pair: Neighbours,
    *,
    trials: int = 100_000,
    seconds: float = math.inf,
    vault: type[GradientVault] | None = None,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Trials:
    """Return scores of at least `trials` trials in each world, from `MIN_HISTORIES` or more runs of a method.

    - make: returns the method; add-remove adjacency.
    - pair: the neighbouring sets.
    - seconds: no further run is started after this time. Ctrl-C ends the audit and keeps what was counted.
    - vault: class of the vault, for planted faults.
    """
    model = make()
    if model.adjacency != "add-remove":
        raise ValueError("the white-box audit covers add-remove adjacency; structural checks cover both")
    found = Trials(model.plan(model.public_facts(pair.with_unit)))
    if not found.plan.releases or not found.plan.budget.private:
        raise ValueError(f"{model.key} makes no noised releases; use the black-box audit")
    each, started = math.ceil(trials / MIN_HISTORIES), time.monotonic()
    try:
        for number in range(MIN_HISTORIES):
            if found.present and time.monotonic() - started > seconds:
                found.interrupted = True
                break
            recorded, replayed = exact_sums(make, pair, seed=number, vault=vault)
            present, absent = (score_trials(recorded, replayed, each, world) for world in (True, False))
            found.present.append(present)
            found.absent.append(absent)
            advance(number + 1, MIN_HISTORIES)
    except KeyboardInterrupt:
        if not found.present:
            raise
        found.interrupted = True
    return found


def exact_sums(
    make: Make, pair: Neighbours, *, seed: int, vault: type[GradientVault] | None = None
) -> tuple[list[Answer], list[Answer]]:
    """Return the queries of a run with the unit, and those of a run without it that saw the same releases."""
    base = vault or make().vault_type
    if pair.worst_case:
        base = with_worst_case_rows(base, pair.canaries)
    tape = Tape(pair.place, torch.arange(len(pair.with_unit)))
    record(make(seed=seed), pair.with_unit, tape, base)
    replay = Tape(pair.place, pair.origin, present=False, replay=tape.answers)
    record(make(seed=seed), pair.without, replay, base)
    if len(tape.answers) != len(replay.answers):
        raise UnsoundError("the number or order of queries depends on a single record", "control flow")
    return tape.answers, replay.answers


def score_trials(recorded: list[Answer], replayed: list[Answer], trials: int, present: bool) -> Array:
    """Return log-likelihood ratios of fresh draws of all releases in one world, [trials]."""
    total = torch.zeros(trials, dtype=torch.float64)
    for with_unit, without in zip(recorded, replayed, strict=True):
        q, scale = without.release.sampling_prob, without.release.noise * without.sensitivity
        moved = (with_unit.exact.double() - without.exact.double()).flatten()
        square = float(moved.square().sum())
        if square == 0:
            continue
        own = with_unit if present else without
        coins = torch.full((trials,), float(present), dtype=torch.float64)
        if present and q < 1:
            coins = torch.tensor([float(own.vault.draw_unit(own.release)) for _ in range(trials)], dtype=torch.float64)
        shifts = []
        for part in coins.split(max(1, MAX_NUMBERS // moved.numel())):
            exact = without.exact.double() + part.view(-1, 1, 1) * moved.view_as(without.exact)
            noised = own.vault.draw_noise(own, exact).double() - without.exact.double()
            shifts.append(noised.flatten(1) @ moved)
        ratio = (torch.cat(shifts) - square / 2) / scale**2
        total += torch.logaddexp(torch.tensor(math.log1p(-q)), ratio + math.log(q)) if q < 1 else ratio
    return total.numpy()
