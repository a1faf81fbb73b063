"""Layouts of the audit: lower bounds beside certified epsilons, planted faults, one-run audits of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.markdown import markdown, source, table

EPSILONS = (1.0, 10.0)
METHODS = ("atelier", "dp-kernel", "dp-lflow", "pge", "dp-diffusion", "dp-mepf", "dp-merf", "ndpdc", "ldpdc", "dpmix")
PUBLISHED = ("dp-kernel-as-published", "pge-as-published")
REFERENCES = {"gaussian": "Gaussian mechanism", "discrete gaussian": "its exact discrete form", "dp-sgd": "DP-SGD"}
ATTACKS = ("nearest", "density", "loss", "detail", "calibrated loss")
GAMES = {"detail": "images with a detail", "persons": "persons with a detail", "split": "random half, no canaries"}


def measured(job: str, method: str | None, epsilon: float) -> dict[str, Any]:
    """Return what was measured in a row, or nothing."""
    for row in table("audit")["rows"]:
        if (row["job"], row["method"], row["epsilon"]) == (job, method, epsilon):
            found: dict[str, Any] = row["measured"]
            return found
    return {}


def bounds_of(found: dict[str, Any]) -> str:
    """Return "no assumption / Gaussian" of a measured row."""
    if not found:
        return "–"
    gaussian = "" if found["gaussian"] is None else f" / {found['gaussian']:.2f}"
    return f"{found['clopper_pearson']:.2f}{gaussian}"


def bound_of(found: dict[str, Any]) -> float:
    """Return the bound to report: the Gaussian one where it applies."""
    gaussian = found.get("gaussian")
    return float(found.get("clopper_pearson", 0.0) if gaussian is None else gaussian)


def _counted(job: str, methods: tuple[str, ...]) -> str:
    """Return the numbers of counted trials of some methods, largest first."""
    found = {measured(job, method, epsilon).get("trials", 0) for method in methods for epsilon in EPSILONS} - {0}
    return " or ".join(f"{count:,}" for count in sorted(found, reverse=True))


def methods() -> str:
    """Lower bounds of all methods at both epsilons, and of the published forms."""
    header = ["", *(f"{box}, ε = {e:g}" for e in EPSILONS for box in ("certified", "white box", "black box"))]
    rows = []
    for method in (*METHODS, *PUBLISHED):
        line = [f"`{method}`"]
        for epsilon in EPSILONS:
            white, black = (measured(job, method, epsilon) for job in ("white box", "black box"))
            certified = f"{white['certified']:.4g}" if "certified" in white else "none" if white else "–"
            line += [certified, bounds_of(white), bounds_of(black)]
        rows.append(line)
    note = (
        "Lower bounds on ε at δ = 10⁻⁵, each with 95 % confidence, without an assumption / for a Gaussian mechanism. "
        f"Counted trials in each world: white box {_counted('white box', METHODS)}, black box "
        f"{_counted('black box', METHODS)}, one step of the published forms {_counted('white box', PUBLISHED)}."
    )
    return f"{markdown(header, rows)}\n\n{source(note, 'audit', seeds=False)}"


def references() -> str:
    """Lower bounds of mechanisms whose epsilon is tight: the power of the auditor."""
    epsilons = (1.0, 4.0, 10.0)
    rows = [[title, *(bounds_of(measured(job, None, e)) for e in epsilons)] for job, title in REFERENCES.items()]
    note = "Lower bounds on ε, without an assumption / for a Gaussian mechanism."
    text = markdown(["", *(f"ε = {e:g}" for e in epsilons)], rows)
    return f"{text}\n\n{source(note, 'audit', seeds=False)}"


def faults() -> str:
    """The rule that finds each planted fault, and the lower bound where a bound can show it."""
    rows = []
    for row in table("audit")["rows"]:
        if row["job"].startswith("fault "):
            found = row["measured"]
            bound = bounds_of(found) if "gaussian" in found else ""
            rules = ", ".join(found["found_by"])
            rows.append([f"`{row['job'].removeprefix('fault ')}`", found["what"], f"`{row['method']}`", rules, bound])
    rows.sort(key=lambda line: bool(line[-1]))  # those that a lower bound shows, too, at the end
    note = "Claim: ε = 1. The last column: lower bounds, without an assumption / for a Gaussian mechanism."
    text = markdown(["fault", "what it does", "in", "found by rule", "white box"], rows)
    return f"{text}\n\n{source(note, 'audit', seeds=False)}"


def one_run() -> str:
    """AUROC and one-run bound of each attack on the images of one run."""
    rows = []
    for row in table("audit")["rows"]:
        if row["job"] == "one run":
            for game, title in GAMES.items():
                cells = {each["name"]: _attack(each) for each in row["measured"][game]}
                name = f"`{row['method']}`, ε = {row['epsilon']:g}, {title}"
                rows.append([name, *(cells.get(attack, "") for attack in ATTACKS)])
    note = (
        "AUROC with half the width of its 95 % interval, 0.5 is guessing; then the one-run bound on ε without an "
        "assumption. Empty: no detail, or no shadow runs."
    )
    return f"{markdown(['', *ATTACKS], rows)}\n\n{source(note, 'audit', seeds=False)}"


def _attack(found: dict[str, Any]) -> str:
    area = found["auroc"]
    return f"{area['value']:.2f} ± {(area['high'] - area['low']) / 2:.2f}, ≥ {found['one_run']:.2f}"


LAYOUTS: dict[str, Callable[[], str]] = {
    "audit": methods,
    "audit-references": references,
    "audit-faults": faults,
    "audit-one-run": one_run,
}
