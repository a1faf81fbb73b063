"""What the command line prints: tables and lines for people, JSON for machines."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sfumato as sf
from sfumato.account import Account
from sfumato.certificate import Verification
from sfumato.data import PublicFacts
from sfumato.evaluate import Detection, summary
from sfumato.privacy.accounting import Plan
from sfumato.synth import Synthesis

out = Console()
err = Console(stderr=True)


def promise(certificate: sf.Certificate) -> str:
    if certificate.epsilon is None:
        return f"[red]guarantee: none[/red] ({escape(str(certificate.void))})"
    return (
        f"[green]differential privacy[/green]: epsilon {certificate.epsilon:.4f}, delta {certificate.delta:g}, "
        f"{certificate.adjacency}; one {certificate.unit} is hidden"
    )


def plan_dict(planned: Plan) -> dict[str, Any]:
    releases = [asdict(release) for release in planned.releases]
    budget = planned.budget
    return {
        "releases": releases,
        "bounds": planned.bounds,
        "epsilon": planned.epsilon,
        "delta": budget.delta,
        "adjacency": budget.adjacency,
        "unit": budget.unit,
    }


def print_plan(planned: Plan, method: str, public: PublicFacts) -> None:
    channels, height, width = public.shape
    classes = ", ".join(public.classes[:10]) + (", …" if len(public.classes) > 10 else "")
    kind = f"{height}×{width} {'grey' if channels == 1 else 'RGB'}"
    labelled = f"{len(public.classes)} classes ({classes})" if public.labelled else "no classes"
    out.print(f"{method} on {kind} images, {safe(labelled)}", soft_wrap=True)
    table = Table("release", "times", "sampling", "noise multiplier", title="to be released; nothing is spent yet")
    for release in planned.releases:
        table.add_row(release.name, str(release.times), f"{release.sampling_prob:g}", f"{release.noise:.4f}")
    out.print(table)
    budget = planned.budget
    total = f"epsilon {planned.epsilon:.4f} of {budget.epsilon:g} at delta {budget.delta:g}, {budget.adjacency}"
    out.print(f"{total}; one {budget.unit} is hidden")


def print_verification(result: Verification) -> None:
    """What is stated, what was found; every text of a stranger's file without control characters."""
    if result.ok and result.epsilon is None:
        out.print("[yellow]consistent[/yellow], but guarantee: none; nothing is protected")
    elif result.ok:
        out.print("[green]holds[/green]: differential privacy")
    else:
        problems = "\n".join(f"  {safe(problem)}" for problem in result.problems)
        out.print(f"[red]does not hold[/red]:\n{problems}", soft_wrap=True)
    if result.guarantee is None:
        return
    number = "none" if result.epsilon is None else f"{result.epsilon:g}"
    rows = {
        "guarantee": result.guarantee,
        "epsilon": number,
        "delta": f"{result.delta:g}",
        "hidden": f"one {result.unit}",
        "relation": result.adjacency,
        "issuer": result.issuer or "not stated",
        "about": result.subject or "not stated",
        "date": result.issued,
        "signed": f"by {result.signer}" if result.signer else "unsigned: anybody could have made it",
        "checked": ", ".join(result.checked),
        "not here": ", ".join(result.missing),
        "not checked": "; ".join(result.not_checked),
        "not covered": ", ".join(result.uncovered),
    }
    rows |= {"caveat": " ".join(result.caveats)} if result.caveats else {}
    for name, text in rows.items():
        if text:
            out.print(f"  {name:<12} {safe(str(text))}", soft_wrap=True)


def print_account(account: Account, *, as_json: bool) -> None:
    """The runs that paid, oldest first, and what is left."""
    rows, budget, voided = account.rows(), account.budget, account.voided
    spent = rows[-1].total if rows else 0.0
    left = 0.0 if voided else account.left
    if as_json:
        facts = {**asdict(budget), "order": account.order, "note": account.note, "spent": spent, "left": left}
        return print_json({"budget": str(account.path), **facts, "void": voided, "runs": [asdict(row) for row in rows]})
    if rows:
        table = Table("date (UTC)", "method", "epsilon alone", "total")
        for row in rows:
            table.add_row(row.date, safe(row.method or ""), f"{row.epsilon:.4g}", f"{row.total:.4g}")
        out.print(table)
    note = f" ({safe(account.note)})" if account.note else ""
    total = f"epsilon {budget.epsilon:g} at delta {budget.delta:g}, {budget.adjacency}, for one {budget.unit}"
    out.print(f"{safe(account.path.name)}{note}: {total}, over all runs", soft_wrap=True)
    if voided:
        out.print(f"[red]guarantees nothing any more[/red]: {safe(voided)}", soft_wrap=True)
    else:
        runs = f"{len(rows)} run{'' if len(rows) == 1 else 's'}"
        out.print(f"{runs}, {spent:.4g} reserved; room for one more of about epsilon {left:.3g}", soft_wrap=True)


def safe(text: str) -> str:
    """Text of a stranger for a terminal: no control characters, no markup."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))


def print_synthesis(result: Synthesis) -> None:
    folder = escape(str(result.folder))
    out.print(promise(result.certificate), soft_wrap=True)
    if result.accuracy is not None:
        out.print(f"a small CNN trained on the synthetic images: {result.accuracy} on the test images")
    out.print(f"look at  {folder}/samples.png\nimages   {folder}/images/ and images.npz ({result.number})")
    if result.soft_labels:
        out.print("         soft labels are in images.npz only: a folder of PNG files cannot hold them")
    out.print(f"check    sfumato verify {folder}/certificate.json")


def print_comparison(found: dict[str, dict[str, Any]]) -> None:
    """Figures down, sets across: names of measures are long, and sets few."""
    lines = {name: summary(metrics) for name, metrics in found.items()}
    table = Table("", *(escape(name) for name in lines))
    for measure in dict.fromkeys(key for line in lines.values() for key in line):
        table.add_row(measure, *(line.get(measure, "") for line in lines.values()))
    out.print(table)


def print_detections(found: dict[str, Detection], false_alarms: float) -> None:
    table = Table("scored as", "images", "threshold", "flagged", "of inliers", "of outliers", "AUROC")
    for name, detection in found.items():
        figures = detection.to_dict()
        rates = [f"{figures[key]:.1%}" if key in figures else "" for key in ("flagged_inliers", "flagged_outliers")]
        auroc = "" if detection.auroc is None else f"{detection.auroc:.3f}"
        share = f"{figures['flagged'] / figures['images']:.1%}"
        table.add_row(escape(name), str(figures["images"]), f"{figures['threshold']:.4g}", share, *rates, auroc)
    out.print(table)
    known = [detection.auroc for detection in found.values() if detection.auroc is not None]
    if len(known) > 1:
        out.print(f"average AUROC [bold]{sum(known) / len(known):.3f}[/bold]")
    out.print(f"threshold: {false_alarms:.1%} of synthetic images are below it")


def warn(lines: Sequence[str]) -> None:
    for line in lines:
        err.print(f"[yellow]warning[/yellow]: {safe(line)}", soft_wrap=True)


def print_warnings(caught: list[warnings.WarningMessage]) -> None:
    for warning in caught:
        err.print(f"[yellow]warning[/yellow]: {escape(str(warning.message))}", soft_wrap=True)


def print_json(content: Any) -> None:
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(content), indent=2, ensure_ascii=False))
