"""What the command line prints: tables and lines for people, JSON for machines."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sfumato as sf
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
        f"{certificate.adjacency}"
    )


def plan_dict(planned: Plan) -> dict[str, Any]:
    releases = [release.to_dict() for release in planned.releases]
    return {"releases": releases, "bounds": planned.bounds, "epsilon": planned.epsilon, "delta": planned.budget.delta}


def print_plan(planned: Plan) -> None:
    table = Table("release", "times", "sampling", "noise multiplier", title="to be released; nothing is spent yet")
    for release in planned.releases:
        table.add_row(release.name, str(release.times), f"{release.sampling_prob:g}", f"{release.noise:.4f}")
    out.print(table)
    budget = planned.budget
    out.print(f"epsilon {planned.epsilon:.4f} of {budget.epsilon:g} at delta {budget.delta:g}, {budget.adjacency}")


def print_synthesis(result: Synthesis) -> None:
    folder = escape(str(result.folder))
    out.print(promise(result.certificate))
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
