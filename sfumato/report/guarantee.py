"""The guarantee of a certificate in numbers and plain words. All of it follows from the certificate alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from sfumato.certificate import Certificate
from sfumato.certificate.dataset_budget import renyi_divergence
from sfumato.certificate.spending import ORDERS, composed_epsilons, converted
from sfumato.certificate.statement import EVENT_FIELDS
from sfumato.privacy.accounting import Release
from sfumato.privacy.budget import Adjacency

DELTAS = tuple(float(delta) for delta in [*10.0 ** np.arange(-10, -1, 0.25), *np.linspace(0.1, 0.98, 45)])


@dataclass(frozen=True)
class Stage:
    """One release: its share of the whole privacy loss (Rényi divergence, which adds up), and its parameters."""

    name: str
    share: float
    times: int
    sampling_prob: float
    noise_multiplier: float
    noise: str


def releases_of(certificate: Certificate) -> list[Release]:
    """Return the releases that the certificate states."""
    return [Release(**{name: event[name] for name in EVENT_FIELDS[:-1]}) for event in certificate.events]


def epsilon_curve(certificate: Certificate, deltas: Sequence[float] = DELTAS) -> list[tuple[float, float]]:
    """Return (delta, epsilon) for other deltas. Each pair is a valid guarantee of the same releases."""
    adjacency = cast(Adjacency, certificate.adjacency)
    stated = math.inf if certificate.epsilon is None else certificate.epsilon
    return curve_of(releases_of(certificate), adjacency, stated, certificate.delta, deltas)


def curve_of(
    releases: Sequence[Release],
    adjacency: Adjacency,
    epsilon: float,
    delta: float,
    deltas: Sequence[float] = DELTAS,
) -> list[tuple[float, float]]:
    """Return (delta, epsilon) for other deltas, of releases that give `epsilon` at `delta`.

    Exact for Gaussian releases without subsampling; otherwise by Rényi divergences, and never above `epsilon` for
    deltas above `delta`.
    """
    found = composed_epsilons(releases, adjacency, deltas)
    return [(d, min(value, epsilon) if d >= delta else value) for d, value in zip(deltas, found, strict=True)]


def attack_success(curve: Sequence[tuple[float, float]]) -> float:
    """Return an upper bound on how often an attacker is right who guesses a fair coin.

    The coin decides whether one unit is in the set. (epsilon, delta) bounds the guess by (e^epsilon + delta) /
    (1 + e^epsilon); every point of the curve is a valid bound, so the smallest is.
    """
    return min((math.exp(min(epsilon, 700)) + delta) / (1 + math.exp(min(epsilon, 700))) for delta, epsilon in curve)


def stages(certificate: Certificate) -> list[Stage]:
    """Return the releases with their shares of the budget."""
    releases = releases_of(certificate)
    shares = shares_of(releases, cast(Adjacency, certificate.adjacency), certificate.delta)
    return [
        Stage(release.name, share, release.times, release.sampling_prob, release.noise, event["noise"])
        for release, share, event in zip(releases, shares, certificate.events, strict=True)
    ]


def shares_of(releases: Sequence[Release], adjacency: Adjacency, delta: float) -> list[float]:
    """Return the share of each release in the whole privacy loss, at the order that gives the smallest epsilon."""
    totals = {order: renyi_divergence(releases, order, adjacency) for order in ORDERS}
    order = min(ORDERS, key=lambda each: converted(each, totals[each], delta))
    return [renyi_divergence([release], order, adjacency) / totals[order] for release in releases]


def public_facts(certificate: Certificate) -> list[tuple[str, str]]:
    """Return what was taken as public, as (what, value)."""
    facts = certificate.public_facts
    channels, height, width = facts.get("shape") or (0, 0, 0)
    colour = "grey" if channels == 1 else "RGB"
    found = [("image size and colour", f"{width} × {height} pixels, {colour}")]
    if facts.get("labelled"):
        names = [str(name) for name in facts.get("classes", [])]
        found.append((f"names of {len(names)} classes", ", ".join(names[:20]) + (", …" if len(names) > 20 else "")))
    if facts.get("sizes") is not None:
        found.append(("class sizes", ", ".join(f"{size:g}" for size in facts["sizes"][:20])))
    for name, value in facts.items():
        if name not in ("shape", "classes", "labelled", "sizes", "unit") and value is not None:
            found.append((name.replace("_", " "), _fact(value)))
    return found


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        shown = {key: text for key, text in value.items() if key != "sha256" and isinstance(text, str | int | float)}
        return ", ".join(f"{key.replace('_', ' ')}: {text}" for key, text in shown.items())
    return str(value)


def not_protected(certificate: Certificate, *, tested: bool) -> list[str]:
    """Return, in sentences, what the guarantee does not cover. `tested`: whether metrics were measured."""
    unit = certificate.unit
    found = list(certificate.caveats)
    found.append(f"What is true of many {unit}s of the set: the synthetic images show it, and are meant to.")
    if unit == "image":
        found.append(
            "A person with several images: the guarantee covers one image, and k images about k times epsilon."
        )
    found.append("Everything that was taken as public (below).")
    if tested:
        found.append("The test images: the quality was measured on them, and they were declared public.")
    if certificate.account is None:
        found.append("Other releases from the same images: their epsilons add up, and this file does not list them.")
    else:
        found.append(
            f"This run is charged to the budget {certificate.account!r}, which adds up all runs on these images."
        )
    return found
