"""Derive the fields of a certificate from the lines of a ledger.

The guarantee is that of the *plan* on the first line: a run that stopped early may have stopped because of its results,
and then only the plan's epsilon holds. Nothing depends on the private images except through releases. Numbers are
rounded up.
"""

from __future__ import annotations

import math
from collections import Counter
from decimal import ROUND_CEILING, Context, Decimal
from functools import lru_cache
from typing import Any

from sfumato.privacy.accounting import Release, bounds, tightest
from sfumato.privacy.budget import Adjacency, Budget
from sfumato.privacy.ledger import LedgerError

GENERATOR = "operating system entropy; secure: OpenDP discrete Gaussian; fast: Philox, floating point"
EVENT_FIELDS = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative", "noise")
EVENT_TYPES = [str, int, float, float, bool, str]
MAX_EVENTS = 1000
# Part of the certificate format: `verify` compares the text.
PUBLIC_SIZES_CAVEAT = (
    "Class sizes were taken as public: what one {0} looks like is hidden, not that a class has one {0} more or less."
)

TAKEN_AS_PUBLIC = "The {2} was taken as public. No {0} is protected that was among what it was trained on: {1}."


def statement(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the lines of a ledger certify.

    Guarantee: epsilon is that of the whole plan, which contains every charge. With an `unprotected` line, or a release
    without noise, the guarantee is "none".
    """
    if not entries:
        raise LedgerError("the ledger is empty: there is nothing to certify")
    opening, events = entries[0], entries[0]["plan"]
    planned = {event["name"]: event for event in events}
    charged: Counter[str] = Counter()
    for entry in entries:
        if entry["kind"] == "charge":
            charged[entry["name"]] += entry["times"]
            event = {name: entry.get(name) for name in EVENT_FIELDS}
            if {**event, "times": None} != {**planned.get(entry["name"], {}), "times": None}:
                raise LedgerError(f"line {entry['seq'] + 1} charges a release that is not in the plan")
    if exceeded := [name for name, times in charged.items() if times > planned[name]["times"]]:
        raise LedgerError(f"release {exceeded[0]!r} was charged more often than planned")
    found, epsilon = account_events(events, opening["delta"], opening["adjacency"])
    reasons = [entry["reason"] for entry in entries if entry["kind"] == "unprotected"]
    reasons += ["no noise was asked for (epsilon = inf)"] if epsilon is None else []
    facts = opening.get("public_facts", {})
    return {
        "guarantee": "none" if reasons else "differential-privacy",
        "epsilon": None if reasons or epsilon is None else rounded_up(epsilon),
        **{name: opening[name] for name in ("delta", "adjacency", "unit")},
        "caveats": [*opening.get("caveats", []), *caveats(facts, opening["unit"])],
        "bounds": {name: None if value is None else rounded_up(value) for name, value in found.items()},
        "events": events,
        "void": reasons[0] if reasons else None,
        "noise": {"generator": GENERATOR, **{event["name"]: event["noise"] for event in events}},
        **{name: opening.get(name) for name in ("method", "account")},
        "parameters": opening.get("parameters", {}),
        "public_facts": facts,
        "ledger": entries[-1]["hash"],
    }


def caveats(facts: dict[str, Any], unit: str) -> list[str]:
    """Return what the guarantee does not cover, from facts that were taken as public."""
    found = [] if facts.get("sizes") is None else [PUBLIC_SIZES_CAVEAT.format(unit)]
    for name in ("prior", "encoder"):
        if isinstance(network := facts.get(name), dict) and "trained_on" in network:
            found.append(TAKEN_AS_PUBLIC.format(unit, network["trained_on"], name))
    return found


def account_events(
    events: list[dict[str, Any]], delta: float, adjacency: Any
) -> tuple[dict[str, float | None], float | None]:
    """Return (each bound, the tightest), with None for infinity. Guarantee: raises for fields of other types."""
    budget = Budget(math.inf, delta, adjacency)  # raises for an unknown adjacency
    for event in events:
        types = [type(event.get(name)) for name in EVENT_FIELDS]
        if len(events) > MAX_EVENTS or types != EVENT_TYPES or len(event) > len(EVENT_FIELDS):
            raise ValueError(f"an event must have the fields {', '.join(EVENT_FIELDS)}; at most {MAX_EVENTS} events")
    releases = [Release(**{name: event[name] for name in EVENT_FIELDS[:-1]}) for event in events]
    found = dict(_bounds(tuple(releases), budget.delta, budget.adjacency))
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
    return finite, tightest(found) if math.isfinite(tightest(found)) else None


@lru_cache(maxsize=256)
def _bounds(releases: tuple[Release, ...], delta: float, adjacency: Adjacency) -> dict[str, float | None]:
    """Return `bounds`; cached, because fit, report and check of a run ask for the same ones, a second each time."""
    return bounds(releases, delta, adjacency)


def rounded_up(value: float, digits: int = 6) -> float:
    """Round up to six significant digits. Guarantee: never below `value`."""
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value)))
