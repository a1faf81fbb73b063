"""Layouts of the audit: lower bounds beside certified epsilons, planted faults, one-run audits, false alarms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.markdown import markdown, source, table

EPSILONS = (1.0, 10.0)
METHODS = (
    *("atelier", "dp-kernel", "dp-lflow", "pge", "dp-diffusion", "private-evolution", "dp-mepf", "dp-merf", "ndpdc"),
    *("ldpdc", "dpmix", "tuned"),
)
PUBLISHED = ("dp-kernel-as-published", "pge-as-published")
REFERENCES = {
    "gaussian": "Gaussian mechanism",
    "discrete gaussian": "its exact discrete form",
    "dp-sgd": "DP-SGD, an extreme image",
    "dp-sgd, canary": "DP-SGD, gradients of full length",
}
ATTACKS = ("nearest", "density", "loss", "detail", "calibrated loss")
GAMES = {"detail": "images with a detail", "persons": "persons with a detail", "split": "random part, no canaries"}
ESTIMATORS = {
    "clopper_pearson": "two worlds, no assumption",
    "gaussian": "two worlds, Gaussian",
    "planned_gaussian": "two worlds, Gaussian with Poisson samples",
    "one_run": "one run, no assumption",
    "one_run_gaussian": "one run, Gaussian",
}


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


def _line(method: str) -> list[str]:
    """Return certified epsilon, white-box and black-box bound of a method at each epsilon."""
    line = [f"`{method}`"]
    for epsilon in EPSILONS:
        white, black = (measured(job, method, epsilon) for job in ("white box", "black box"))
        certified = f"{white['certified']:.4g}" if "certified" in white else "none" if white else "–"
        line += [certified, *(f"{bound_of(found):.2f}" if found else "–" for found in (white, black))]
    return line


def methods() -> str:
    """The bounds to report of all methods at both epsilons, and of the published forms."""
    header = ["", *(f"{box}, ε = {e:g}" for e in EPSILONS for box in ("certified", "white box", "black box"))]
    note = "Lower bounds on ε at δ = 10⁻⁵, each with 95 % confidence; Gaussian ones for certified methods."
    return f"{markdown(header, [_line(m) for m in (*METHODS, *PUBLISHED)])}\n\n{source(note, 'audit', seeds=False)}"


def trials() -> str:
    """Both bounds of each attack, its counted trials, and what more of them would show."""
    rows = []
    for method in (*METHODS, *PUBLISHED):
        for job in ("white box", "black box"):
            for epsilon in EPSILONS:
                if found := measured(job, method, epsilon):
                    numbers = f"2 × {found['trials']:,}", f"{found['ceiling']:.2f}", f"{found['limit']:.2f}"
                    rows.append([f"`{method}`", job, f"{epsilon:g}", bounds_of(found), *numbers])
    note = (
        "No assumption / Gaussian. The ceiling: what a perfect attack would show without an assumption. The last "
        "column is an estimate, not a bound: what any number of trials would show at the error rates of this attack."
    )
    header = ["", "attack", "claim", "lower bound", "counted trials", "ceiling", "with more trials, about"]
    return f"{markdown(header, rows)}\n\n{source(note, 'audit', seeds=False)}"


def references() -> str:
    """Lower bounds of mechanisms whose epsilon is tight: the power of the auditor."""
    epsilons = (1.0, 4.0, 10.0)
    rows = [[title, *(bounds_of(measured(job, None, e)) for e in epsilons)] for job, title in REFERENCES.items()]
    note = "Lower bounds on ε, without an assumption / for a Gaussian mechanism."
    text = markdown(["", *(f"ε = {e:g}" for e in epsilons)], rows)
    return f"{text}\n\n{source(note, 'audit', seeds=False)}"


def faults() -> str:
    """The rule that finds each planted fault, and the lower bounds where a bound can show it."""
    rows = []
    for row in table("audit")["rows"]:
        if row["job"].startswith("fault "):
            name, found = row["job"].removeprefix("fault "), row["measured"]
            bound = bounds_of(found) if "gaussian" in found else ""
            seen = [
                f"{other['measured']['clopper_pearson']:.2f} (`{other['method']}`)"
                for other in table("audit")["rows"]
                if other["job"] == f"black box, fault {name}"
            ]
            rules = ", ".join(found["found_by"])
            rows.append([f"`{name}`", found["what"], f"`{row['method']}`", rules, bound, ", ".join(seen)])
    rows.sort(key=lambda line: bool(line[-2]))  # those that a lower bound shows, too, at the end
    note = (
        "Claim: ε = 1. White box: lower bounds, without an assumption / for a Gaussian mechanism. Images alone: "
        "without an assumption, and in which method."
    )
    text = markdown(["fault", "what it does", "in", "found by rule", "white box", "images alone"], rows)
    return f"{text}\n\n{source(note, 'audit', seeds=False)}"


def one_run() -> str:
    """AUROC and one-run bound of each attack on the images of one run."""
    rows = []
    for row in table("audit")["rows"]:
        if row["job"].startswith("one run"):
            fault = row["job"].removeprefix("one run").removeprefix(", fault ")
            for game, title in GAMES.items():
                cells = {each["name"]: _attack(each) for each in row["measured"][game]["attacks"]}
                planted = f", fault `{fault}`" if fault else ""
                name = f"`{row['method']}`{planted}, ε = {row['epsilon']:g}, {title}"
                rows.append([name, *(cells.get(attack, "") for attack in ATTACKS)])
    note = (
        "AUROC with half the width of its interval, 0.5 is guessing; then the one-run bound on ε without an "
        "assumption. Intervals and bounds of a row hold together with 95 % confidence. Empty: no detail, or no shadow "
        "runs."
    )
    return f"{markdown(['', *ATTACKS], rows)}\n\n{source(note, 'audit', seeds=False)}"


def _attack(found: dict[str, Any]) -> str:
    area = found["auroc"]
    return f"{area['value']:.2f} ± {(area['high'] - area['low']) / 2:.2f}, ≥ {found['one_run']:.2f}"


def false_alarms() -> str:
    """How often the bounds exceed the truth in simulations of mechanisms that keep their epsilon."""
    found = {epsilon: measured("false alarms", None, epsilon) for epsilon in (1.0, 4.0)}
    rows = [
        [title, *(f"{values[name]:.2%}" if values else "–" for values in found.values())]
        for name, title in ESTIMATORS.items()
    ]
    note = "Share of 2,000 simulated audits whose 95 % lower bound exceeds the true ε: at most 5 % is allowed."
    return f"{markdown(['', *(f'ε = {e:g}' for e in found)], rows)}\n\n{source(note, 'audit', seeds=False)}"


LAYOUTS: dict[str, Callable[[], str]] = {
    "audit": methods,
    "audit-trials": trials,
    "audit-references": references,
    "audit-faults": faults,
    "audit-one-run": one_run,
    "audit-false-alarms": false_alarms,
}
