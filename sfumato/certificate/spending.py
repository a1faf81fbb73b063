"""Compute what a run has spent so far, from the charges in its ledger, for display. Certificates state the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting

from sfumato.certificate.dataset_budget import RELEASE_FIELDS, renyi_divergence
from sfumato.privacy.accounting import Release, merge_gaussians, suppress_library_warnings
from sfumato.privacy.budget import Adjacency

ORDERS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


@dataclass(frozen=True)
class Spending:
    """The releases that were charged so far.

    - epsilon: upper bound for them together; inf if there is no guarantee.
    - budget: epsilon of the whole run; inf if there is no guarantee.
    - charged: for each release of the plan, (times charged, times planned).
    """

    epsilon: float
    budget: float
    charged: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        if not math.isfinite(self.budget):
            return "no guarantee"
        return f"ε {self.epsilon:.3g} of {self.budget:g} spent"


class SpendingText:
    """The spending of a growing ledger as text, computed again only when there are new lines."""

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._entries, self._lines, self._text = entries, -1, ""

    def __call__(self) -> str:
        if len(self._entries) != self._lines:
            self._lines = len(self._entries)
            self._text = str(spending(self._entries))
        return self._text


def spending(entries: Sequence[dict[str, Any]]) -> Spending:
    """Return what the lines of a run's ledger have charged. A ledger without lines has charged nothing."""
    if not entries:
        return Spending(0.0, 0.0, {})
    opening, charged = entries[0], Counter[str]()
    for entry in entries:
        if entry["kind"] == "charge":
            charged[entry["name"]] += entry["times"]
    planned = [Release(**{name: event[name] for name in RELEASE_FIELDS}) for event in opening["plan"]]
    counts = {release.name: (charged[release.name], release.times) for release in planned}
    void = any(entry["kind"] == "unprotected" for entry in entries)
    budget = math.inf if void or opening["epsilon"] is None else float(opening["epsilon"])
    made = [replace(release, times=charged[release.name]) for release in planned if charged[release.name]]
    if void or not made or not math.isfinite(budget):
        return Spending(math.inf if void else 0.0, budget, counts)
    epsilon = composed_epsilons(made, opening["adjacency"], [opening["delta"]])[0]
    return Spending(min(epsilon, budget), budget, counts)  # the plan is within the budget by a tighter bound


def composed_epsilons(releases: Sequence[Release], adjacency: Adjacency, deltas: Sequence[float]) -> list[float]:
    """Return an upper bound on epsilon at each delta for all these releases together.

    Exact for Gaussian releases without subsampling, otherwise by Rényi divergences.
    """
    full, sampled = merge_gaussians(releases, adjacency)
    if not sampled:
        with suppress_library_warnings():
            return [max(float(dp_accounting.get_epsilon_gaussian(full, delta)), 0.0) for delta in deltas]
    divergences = {order: renyi_divergence(releases, order, adjacency) for order in ORDERS}
    best = [min(converted(order, value, delta) for order, value in divergences.items()) for delta in deltas]
    return [max(epsilon, 0.0) for epsilon in best]


def converted(order: float, divergence: float, delta: float) -> float:
    """Return epsilon from a Rényi divergence (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
