"""The command `sfumato audit`: attack a method, a mechanism or released images, and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from sfumato.cli_options import Delta, Json, parse_assignments, read_like, read_synthetic

if TYPE_CHECKING:
    from sfumato.audit.membership import Attack
    from sfumato.audit.method_audit import AuditReport

# Names and defaults of `sfumato.audit`, which is not imported for a usage error.
MECHANISMS, KINDS = ("gaussian", "discrete-gaussian"), ("outlier", "mislabelled", "duplicate", "person")
FAULTS = (
    *("half-noise", "no-clipping", "private-mean", "batch-statistics", "no-charge", "shuffled", "differentiable"),
    *("printed-loss", "exact-counts", "batch-norm"),
)
TRIALS, RUNS, SECONDS, CONFIDENCE = 100_000, 40, 120.0, 0.95
PRIVATE = "private"
EPILOG = (
    "Examples: sfumato audit dp-merf --structural ; sfumato audit ndpdc --epsilon 1 --fault half-noise ; "
    "sfumato audit shared/ --train scans/ --held-out held-out/"
)
COLOURS = {"pass": "green", "fail": "red", "not reached": "yellow"}


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help=f"A method; dp-sgd, {' or '.join(MECHANISMS)} (references); or released images, with --train and "
            "--held-out."
        ),
    ],
    structural: Annotated[bool, typer.Option("--structural", help="Check the rules only; run no attacks.")] = False,
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="Set the claim to audit.")] = 1.0,
    delta: Delta = 1e-5,
    kind: Annotated[
        str, typer.Option("--neighbours", help=f"Set the unit in which two sets differ: {', '.join(KINDS)}.")
    ] = KINDS[0],
    trials: Annotated[
        int, typer.Option(min=100, help="Set the white-box trials with the unit, and without it.")
    ] = TRIALS,
    runs: Annotated[
        int, typer.Option(min=0, help="Set the black-box runs with the unit, and without it; 0 for none.")
    ] = RUNS,
    seconds: Annotated[float, typer.Option(min=1, help="Start no new run of an attack after this time.")] = SECONDS,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Set the confidence of lower bounds.")
    ] = CONFIDENCE,
    fault: Annotated[
        str | None, typer.Option(help=f"Plant a fault, to see the audit find it: {', '.join(FAULTS)}.")
    ] = None,
    params: Annotated[
        list[str] | None, typer.Option("--set", help="Set a parameter of the method, NAME=VALUE; repeatable.")
    ] = None,
    train: Annotated[str | None, typer.Option(help="Released images: the private images they were made from.")] = None,
    held_out: Annotated[str | None, typer.Option(help="Released images: private images that were not used.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write audit.json to this folder; results on released images go to its sub-folder private/.",
            show_default="private/ here, for released images",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack a method or released images. Exit with status 1 if the claim is violated.

    Methods run with small settings on public images, so an audit spends no privacy budget.
    A lower bound below the claim is no proof of privacy.
    """
    if (train is None) != (held_out is None):
        raise typer.BadParameter("give both --train and --held-out")
    if train is not None and held_out is not None:
        return _audit_images(target, train, held_out, folder or Path(), as_json)
    from sfumato import console
    from sfumato.audit.method_audit import AuditOptions, audit_method, estimate_seconds
    from sfumato.data.atomic import write_json

    given = parse_assignments(params)
    options = AuditOptions(epsilon, delta, kind, structural, trials, runs, seconds, confidence, fault, given or None)
    cost = estimate_seconds(target, options)
    console.err.print(f"about {cost:.0f} seconds; Ctrl-C keeps what was counted", soft_wrap=True)
    report = audit_method(target, options)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "audit.json", report.to_dict())
    console.print_json(report.to_dict()) if as_json else _print_report(report)
    if report.violations:
        raise typer.Exit(1)
    if report.interrupted and not report.bounds:
        raise typer.Exit(130)


def _audit_images(target: str, train: str, held_out: str, folder: Path, as_json: bool) -> None:
    """Attack released images with their private training images. Results go to the folder private/ only."""
    from sfumato import console
    from sfumato.audit.membership import attacks, memorisation, write_private

    synthetic = read_synthetic(target)
    members, others = read_like(train, synthetic, "train"), read_like(held_out, synthetic, "test")
    found = attacks(synthetic, members, others)
    memory = memorisation(synthetic, members, others)
    path = write_private(folder / PRIVATE, found, memory, target)
    console.print_warnings([f"{path.parent} holds results about private images; do not share it"])
    if as_json:
        return console.print_json({"private": str(path)})
    _print_attacks(found, memory)


def _print_report(report: AuditReport) -> None:
    from sfumato import console

    if report.structure is not None:
        table = Table("rule", "result", "detail")
        for each in report.structure:
            table.add_row(each.rule, f"[{COLOURS[each.result]}]{each.result}[/]", escape(each.detail))
        console.out.print(table)
    if report.bounds:
        table = Table("attacker sees", "counted trials", "no assumption", "Gaussian", "claim", "certified")
        certified = "none" if report.certified is None else f"{report.certified:.4g}"
        for name, found in report.bounds.items():
            gaussian = "" if found.gaussian is None else f"≥ {found.gaussian:.2f}"
            seen = "every release" if name == "white-box" else "images only"
            table.add_row(
                f"{name}: {seen}",
                f"2 × {found.trials}",
                f"≥ {found.clopper_pearson:.2f}",
                gaussian,
                f"{report.options.epsilon:g}",
                certified,
            )
        console.out.print(table)
        level = f"{report.options.confidence:.0%} confidence, delta {report.options.delta:g}"
        console.out.print(f"lower bounds on epsilon, {level}, {report.seconds:.0f} s", soft_wrap=True)
    for note in report.notes:
        console.out.print(escape(note), soft_wrap=True)
    if report.violations:
        console.out.print("[red]the claim is violated[/red]")
        for line in report.violations:
            console.out.print(f"  {escape(line)}", soft_wrap=True)
    else:
        console.out.print("[green]no violation found[/green]")


def _print_attacks(found: list[Attack], memory: dict[str, Any]) -> None:
    from sfumato import console

    table = Table("attack", "AUROC (95 %)", *(f"TPR at {float(fpr):.1%} FPR" for fpr in found[0].tpr))
    for each in found:
        area = f"{each.auroc.value:.3f} ({each.auroc.low:.3f} to {each.auroc.high:.3f})"
        rates = [
            "too few images" if rate is None else f"{rate.value:.2%} ({rate.low:.2%} to {rate.high:.2%})"
            for rate in each.tpr.values()
        ]
        table.add_row(each.name, area, *rates)
    console.out.print(table)
    share = memory["closer_to_training"]
    closer = f"{share['value']:.1%} of synthetic images ({share['low']:.1%} to {share['high']:.1%})"
    console.out.print(
        f"{closer} are closer to a training image than to a held-out one; 50% is chance. Exact copies: "
        f"{memory['copies']}",
        soft_wrap=True,
    )
    if memory["memorises"] or any(each.detects for each in found):
        console.out.print("[yellow]training images can be told from others[/yellow]")
    else:
        console.out.print("no attack is better than guessing; stronger attacks may exist")
