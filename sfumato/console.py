"""Print results: tables and lines for people, JSON for programs."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import sfumato as sf
from sfumato.certificate import Verification
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.data import NamedSet
from sfumato.evaluate import Detection, summary
from sfumato.evaluate.measure_descriptions import chance_level, chance_of, description_of, judge_accuracy
from sfumato.methods.parameters import Setting
from sfumato.methods.registry import MethodInfo
from sfumato.preview import Preview
from sfumato.synthesize import Synthesis

TYPED = re.compile(r"((?:int|float|bool|text)(?: or None)?)(?:, [^;]*)?; ")  # how the bullet of a parameter begins
CHANCE = "chance level of accuracy"
out = Console()
err = Console(stderr=True)

SIGNATURES = {  # that name no signer, as people read them
    "missing": "unsigned: anybody could have made it",
    "invalid": "not valid for this certificate",
    "by another key": "signed by another key",
    "not checked": "signed, but not checked",
}


def program() -> str:
    """Return the command as this shell finds it: `sfumato`, or the path of the program where it is not on the PATH."""
    return "sfumato" if shutil.which("sfumato") else escape(f"{Path(sys.executable).parent / 'sfumato'}")


def peak_memory() -> float:
    """Return the largest memory of this process so far, in GiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def sanitize(text: str) -> str:
    """Remove control characters and escape markup, so that untrusted text is safe on a terminal."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))


def format_guarantee(certificate: sf.Certificate) -> str:
    """Format the guarantee of a certificate in one line."""
    if certificate.epsilon is None:
        return f"[red]guarantee: none[/red] ({escape(str(certificate.void))})"
    return (
        f"[green]differential privacy[/green]: epsilon {certificate.epsilon:.4f}, delta {certificate.delta:g}, "
        f"{certificate.adjacency}, for one {certificate.unit}"
    )


def print_methods(infos: Sequence[MethodInfo]) -> None:
    """Print a table of the methods."""
    table = Table(Column("key", no_wrap=True), "private", "what it does", "paper", box=None, pad_edge=False)
    for info in infos:
        private = "yes" if info.guarantee == "differential-privacy" else "[red]no[/red]"
        table.add_row(info.key, private, info.summary, info.paper)
    out.print(table)


def print_parameters(key: str, found: Sequence[dict[str, Any]]) -> None:
    """Print the parameters of a method."""
    table = Table(
        Column("parameter", no_wrap=True), "type, default", "what it does", title=key, box=None, pad_edge=False
    )
    for each in found:
        typed, text, default = TYPED.match(each["what"]), each["what"], each["default"]
        shown = "none" if default in ("", None) else str(default)
        if typed is not None:  # the docstring states type and default, too
            shown, text = f"{typed[1]}, {shown}", text[typed.end() :]
        table.add_row(each["name"], escape(shown), escape(text))
    out.print(table)
    out.print("Set a parameter with --set NAME=VALUE.")
    out.print("epsilon, delta, adjacency, prior, seed and device have their own options.")


def print_plan(found: Preview) -> None:
    """Print the public facts, the releases, the settings of the method, the total epsilon and notes."""
    planned, public = found.plan, found.public
    channels, height, width = public.shape
    classes = ", ".join(public.classes[:10]) + (", …" if len(public.classes) > 10 else "")
    labelled = f"{len(public.classes)} classes ({classes})" if public.labelled else "no classes"
    colour = "grey" if channels == 1 else "RGB"
    start = f", prior {found.prior}" if found.prior else ""
    text = f"{found.method}{start} on {height}×{width} {colour} images, {labelled}, unit: one {public.unit}"
    out.print(sanitize(text), soft_wrap=True)
    table = Table("release", "times", "sampling", "noise multiplier", title="planned releases (nothing is spent yet)")
    for release in planned.releases:
        table.add_row(release.name, str(release.times), f"{release.sampling_prob:g}", f"{release.noise:.4f}")
    out.print(table)
    out.print(_settings_table(found.settings))
    budget = planned.budget
    if public.sizes is not None:
        out.print(f"declared public: {sum(public.sizes):g} {public.unit}s in all")
    total = f"epsilon {planned.epsilon:.4f} of {budget.epsilon:g} at delta {budget.delta:g}, {budget.adjacency}"
    out.print(f"{total}, for one {budget.unit}")
    for note in found.notes:
        out.print(escape(note), soft_wrap=True)


def _settings_table(settings: Sequence[Setting]) -> Table:
    table = Table("setting", "value", "source", title="settings of the method", box=None, pad_edge=False)
    for setting in settings:
        text = f"{setting.value:g}" if isinstance(setting.value, float) else str(setting.value)
        table.add_row(setting.name, escape(text) or '""', escape(setting.source))
    return table


def print_verification(result: Verification) -> None:
    """Print the statements of a certificate and the results of the checks."""
    if result.ok and result.epsilon is None:
        out.print("[yellow]consistent[/yellow], but guarantee: none; nothing is protected")
    elif result.ok:
        out.print("[green]the guarantee holds[/green]: differential privacy")
    else:
        problems = "\n".join(f"  {sanitize(problem)}" for problem in result.problems)
        out.print(f"[red]the guarantee does not hold[/red]:\n{problems}", soft_wrap=True)
    if result.guarantee is None:
        return
    rows = {
        "guarantee": result.guarantee,
        "epsilon": "none" if result.epsilon is None else f"{result.epsilon:g}",
        "delta": f"{result.delta:g}",
        "unit": f"one {result.unit}",
        "adjacency": result.adjacency,
        "issuer": result.issuer or "not stated",
        "subject": result.subject or "not stated",
        "date": result.issued,
        "signature": f"by {result.signer}" if result.signer else SIGNATURES[result.signature],
        "checked": ", ".join(result.checked),
        "missing": ", ".join(result.missing),
        "not checked": "; ".join(result.not_checked),
        "not covered": ", ".join(result.uncovered),
        "caveats": " ".join(result.caveats),
    }
    for name, text in rows.items():
        if text:
            out.print(f"  {name:<12} {sanitize(str(text))}", soft_wrap=True)


def print_budget(account: DatasetBudget, *, as_json: bool) -> None:
    """Print the runs that are charged to the budget of a data set, oldest first, and what is left."""
    rows, budget, voided = account.rows(), account.budget, account.voided
    spent = rows[-1].total if rows else 0.0
    left = 0.0 if voided else account.left
    if as_json:
        facts = {**asdict(budget), "order": account.order, "note": account.note, "spent": spent, "left": left}
        return print_json({"budget": str(account.path), **facts, "void": voided, "runs": [asdict(row) for row in rows]})
    if rows:
        table = Table("date (UTC)", "method", "epsilon of the run", "total epsilon")
        for row in rows:
            table.add_row(row.date, sanitize(row.method or ""), f"{row.epsilon:.4g}", f"{row.total:.4g}")
        out.print(table)
    note = f" ({sanitize(account.note)})" if account.note else ""
    total = f"epsilon {budget.epsilon:g} at delta {budget.delta:g}, {budget.adjacency}, for one {budget.unit}"
    out.print(f"{sanitize(account.path.name)}{note}: {total}, over all runs", soft_wrap=True)
    if voided:
        out.print(f"[red]this budget no longer gives a guarantee[/red]: {sanitize(voided)}", soft_wrap=True)
    else:
        runs = f"{len(rows)} run{'' if len(rows) == 1 else 's'}"
        out.print(f"{runs}, epsilon {spent:.4g} reserved; room for one more run of about {left:.3g}", soft_wrap=True)


def print_synthesis(result: Synthesis) -> None:
    """Print the guarantee and the content of a folder that `synthesize` wrote."""
    folder = escape(str(result.folder))
    out.print(format_guarantee(result.certificate), soft_wrap=True)
    if result.accuracy is not None:
        chance = chance_level(result.accuracy.confusion)
        word = judge_accuracy(result.accuracy.mean, chance)
        text = f"accuracy of a small CNN trained on the synthetic images: {result.accuracy} on the test images"
        out.print(f"{text} (chance {chance:.1f} %: {word})", soft_wrap=True)
    out.print(f"report       {folder}/report.html", soft_wrap=True)
    out.print(f"images       {folder}/images/ and {folder}/images.npz ({result.number} images)", soft_wrap=True)
    if result.soft_labels:
        out.print("             soft labels are in images.npz only, because PNG files cannot hold them")
    out.print(f"certificate  check it with: {program()} verify {folder}/certificate.json", soft_wrap=True)
    minutes = f"{result.seconds / 60:.1f} minutes, up to {peak_memory():.1f} GiB of memory"
    out.print(f"this run     {minutes} (not in the report: both depend on the number of images)", soft_wrap=True)


def print_comparison(found: dict[str, dict[str, Any]]) -> None:
    """Print the measures of several sets, one row for each measure and one column for each set."""
    columns = {name: summary(metrics) for name, metrics in found.items()}
    for name, metrics in found.items():
        if (chance := chance_of(metrics)) is not None:
            columns[name][CHANCE] = f"{chance:.1f}"
    table = Table("", *(escape(name) for name in columns), "good")
    for measure in dict.fromkeys(key for column in columns.values() for key in column):
        good = "" if measure == CHANCE else description_of(measure).good
        table.add_row(measure, *(column.get(measure, "") for column in columns.values()), good)
    out.print(table)


def print_sweep(results: dict[str, Any], folder: Path) -> None:
    """Print the results of a comparison of methods."""
    table = Table("method", "epsilon", "accuracy in %", "seeds")
    for row in results["rows"]:
        spread = "" if row["sd"] is None else f" ± {row['sd']:.1f}"
        accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.1f}{spread}"
        table.add_row(row["method"], f"{row['epsilon']:g}", accuracy, str(row["seeds"]))
    out.print(table)
    if results["missing"]:
        out.print(f"{results['missing']} runs are missing; start the same command again to make them")
    out.print(f"report, plot and table: {escape(str(folder))}/report.html, plot.svg, results.md", soft_wrap=True)


def print_detections(found: dict[str, Detection], false_alarms: float) -> None:
    """Print the results of out-of-distribution detection, one row for each class."""
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


def print_named_sets(infos: Sequence[NamedSet], *, as_json: bool) -> None:
    """Print the named data sets and their paths on this machine."""
    if as_json:
        found = [(info, info.found and str(info.found)) for info in infos]
        return print_json([{"name": info.name, "what": info.description, "found": path} for info, path in found])
    table = Table("name", "description", "licence", "path")
    for info in infos:
        path = escape(str(info.found)) if info.found else "not on this machine"
        table.add_row(info.name, info.description, info.licence, path)
    out.print(table)


def print_doctor(found: dict[str, Any]) -> None:
    """Print what a machine can do, one block for each part."""
    for title, content in found.items():
        out.print(f"[bold]{title}[/bold]")
        lines = content.items() if isinstance(content, dict) else [("", ", ".join(content) or "none")]
        for name, text in lines:
            out.print(f"  {name:<30} {sanitize(str(text))}" if name else f"  {sanitize(str(text))}", soft_wrap=True)


def print_warnings(messages: Sequence[str | warnings.WarningMessage]) -> None:
    """Print warnings to the standard error stream."""
    for message in messages:
        text = message if isinstance(message, str) else str(message.message)
        err.print(f"[yellow]warning[/yellow]: {sanitize(text)}", soft_wrap=True)


def print_json(content: Any) -> None:
    """Print JSON to the standard output. Numbers that are not finite become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(content), indent=2, ensure_ascii=False))
