"""What a ledger certifies: the guarantee of a run, from its lines alone.

It is that of the *plan* on the first line: a run that stopped early may have stopped because of what it saw, and then
only the plan's epsilon holds. Nothing here depends on the private images except through a release. Numbers are rounded
up, never down.
"""

from __future__ import annotations

import math
from collections import Counter
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import LedgerError

GENERATOR = "operating system entropy; secure: OpenDP discrete Gaussian; fast: Philox, floating point"
EVENT = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative", "noise")
KINDS = [str, int, float, float, bool, str]  # of an event's fields
MOST_EVENTS = 1000
SIZES = (
    "Class sizes were taken as public: what one {0} looks like is hidden, not that a class has one {0} more or less."
)


def statement(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What a ledger's lines certify.

    Guarantee: epsilon is that of the whole plan, which contains every charge; an `unprotected` line, or a release
    without noise, makes the guarantee "none".
    """
    if not entries:
        raise LedgerError("the ledger is empty: there is nothing to certify")
    opening, events = entries[0], entries[0]["plan"]
    planned = {event["name"]: event for event in events}
    charged: Counter[str] = Counter()
    for entry in entries:
        if entry["kind"] == "charge":
            charged[entry["name"]] += entry["times"]
            event = {name: entry.get(name) for name in EVENT}
            if {**event, "times": None} != {**planned.get(entry["name"], {}), "times": None}:
                raise LedgerError(f"line {entry['seq'] + 1} charges for something that is not in the plan")
    if over := [name for name, times in charged.items() if times > planned[name]["times"]]:
        raise LedgerError(f"release {over[0]!r} was charged more often than planned")
    found, epsilon = accounted(events, opening["delta"], opening["adjacency"])
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
    return [] if facts.get("sizes") is None else [SIZES.format(unit)]


def accounted(
    events: list[dict[str, Any]], delta: float, adjacency: Any
) -> tuple[dict[str, float | None], float | None]:
    """(each bound, the least), infinities as None. Guarantee: refuses fields of another kind than were written."""
    budget = Budget(math.inf, delta, adjacency)  # refuses an unknown relation
    for event in events:
        kinds = [type(event.get(name)) for name in EVENT]
        if len(events) > MOST_EVENTS or kinds != KINDS or len(event) > len(EVENT):
            raise ValueError(f"an event has the fields {', '.join(EVENT)}")
    releases = [Release(**{name: event[name] for name in EVENT[:-1]}) for event in events]
    found = bounds(releases, budget.delta, budget.adjacency)
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
    return finite, least(found) if math.isfinite(least(found)) else None


def rounded_up(value: float) -> float:
    """Round up to six significant digits. Guarantee: never below `value`."""
    return float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(value)))
