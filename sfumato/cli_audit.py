"""The command `sfumato audit`: attack a method, a mechanism or released images, and print what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sfumato.cli_options import Delta, Json, parse_assignments, read_images, read_like, read_synthetic

if TYPE_CHECKING:
    from sfumato.audit.black_box import OneRunAudit
    from sfumato.audit.membership import Attack, ReleaseAudit
    from sfumato.audit.method_audit import AuditOptions, AuditReport

# Names and defaults of `sfumato.audit`, which is not imported for a usage error.
MECHANISMS = ("gaussian", "discrete-gaussian")
KINDS = ("worst-case", "outlier", "mislabelled", "duplicate", "person")
FAULTS = (
    *(
        "half-noise",
        "no-noise",
        "no-clipping",
        "private-mean",
        "batch-statistics",
        "no-charge",
        "shuffled",
        "differentiable",
    ),
    *("printed-loss", "exact-counts", "batch-norm"),
)
TRIALS, RUNS, SECONDS, CONFIDENCE = 100_000, 40, 120.0, 0.95
PRIVATE = "private"
ONE_RUN = "Canaries in one run"
EPILOG = (
    "Examples: sfumato audit dp-merf --structural ; sfumato audit ndpdc --epsilon 1 --fault half-noise ; "
    "sfumato audit dpmix --canaries 500 --fault no-noise ; sfumato audit shared/ --train scans/ --held-out held-out/"
)
USED = ("epsilon", "delta", "confidence", "fault", "settings")  # options that a one-run audit uses
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
    canaries: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Hide this many canaries in a set of images, each by a fair coin, and guess from the synthetic images "
            "of one run which were used.",
            rich_help_panel=ONE_RUN,
        ),
    ] = None,
    images: Annotated[
        str, typer.Option(help="Hide canaries among these images, your own or public ones.", rich_help_panel=ONE_RUN)
    ] = "digits",
    per_person: Annotated[
        int,
        typer.Option(min=1, help="Set the images of a canary; more than 1 make it a person.", rich_help_panel=ONE_RUN),
    ] = 1,
    detail: Annotated[
        bool,
        typer.Option(
            "--detail/--no-detail",
            help="Paint a rare detail on canaries, or leave them as they are.",
            rich_help_panel=ONE_RUN,
        ),
    ] = True,
    shadows: Annotated[
        int, typer.Option(min=0, help="Make further runs, which calibrate an attack (LiRA).", rich_help_panel=ONE_RUN)
    ] = 0,
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
        return _audit_images(target, train, held_out, folder or Path(), seconds, confidence, as_json)
    from sfumato import console
    from sfumato.audit.method_audit import AuditOptions, audit_method, estimate_seconds
    from sfumato.data.atomic import write_json

    given = parse_assignments(params)
    options = AuditOptions(epsilon, delta, kind, structural, trials, runs, seconds, confidence, fault, given or None)
    if canaries is not None:
        return _audit_canaries(target, options, images, (canaries, per_person, detail, shadows), folder, as_json)
    _print_cost(estimate_seconds(target, options))
    report = audit_method(target, options)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "audit.json", report.to_dict())
    console.print_json(report.to_dict()) if as_json else _print_report(report)
    if report.violations:
        raise typer.Exit(1)
    if report.interrupted and not report.bounds:
        raise typer.Exit(130)


def _audit_canaries(
    target: str,
    options: AuditOptions,
    source: str,
    wanted: tuple[int, int, bool, int],
    folder: Path | None,
    as_json: bool,
) -> None:
    """Hide canaries in images, run a method once, and print what attacks find in its synthetic images."""
    from sfumato import console
    from sfumato.audit.black_box import new_game
    from sfumato.audit.method_audit import audit_canaries, estimate_canary_seconds, method_keys
    from sfumato.data.atomic import write_json

    if target not in method_keys():
        raise typer.BadParameter(f"--canaries audits a method; there are {', '.join(method_keys())}")
    canaries, per_person, detail, shadows = wanted
    game = new_game(read_images(source), canaries=canaries, per_person=per_person, detail=detail)
    _print_cost(estimate_canary_seconds(target, options, game, shadows))
    found = audit_canaries(target, options, game, shadows)
    given = {"target": target, **{name: value for name, value in vars(options).items() if name in USED and value}}
    content = {**given, "canaries": canaries, "per_person": per_person, "detail": detail, **found.to_dict()}
    content["violated"] = found.bound > options.epsilon
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "audit.json", content)
    console.print_json(content) if as_json else _print_canaries(found, options.epsilon)
    if found.bound > options.epsilon:
        raise typer.Exit(1)


def _audit_images(
    target: str, train: str, held_out: str, folder: Path, seconds: float, confidence: float, as_json: bool
) -> None:
    """Attack released images with their private training images. Results go to the folder private/ only."""
    from sfumato import console
    from sfumato.audit.membership import audit_release, check_private, estimate_release_seconds, write_private
    from sfumato.progress import bar

    check_private(folder / PRIVATE)  # before the work
    synthetic = read_synthetic(target)
    members, others = read_like(train, synthetic, "train"), read_like(held_out, synthetic, "test")
    _print_cost(min(estimate_release_seconds(synthetic, members, others), seconds))
    with bar("attacks") as advance:
        found = audit_release(synthetic, members, others, seconds=seconds, confidence=confidence, advance=advance)
    path = write_private(folder / PRIVATE, found, target)
    console.print_warnings([f"{path.parent} holds results about private images; do not share it"])
    if as_json:
        return console.print_json({"private": str(path)})
    _print_release(found, confidence)


def _print_cost(seconds: float) -> None:
    from sfumato import console

    console.err.print(f"about {seconds:.0f} seconds; Ctrl-C keeps what was counted", soft_wrap=True)


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


def _print_canaries(found: OneRunAudit, claim: float) -> None:
    from sfumato import console

    level = f"{found.confidence:.0%}"
    table = Table("attack", f"AUROC ({level} together)", "no assumption", "Gaussian", "better than guessing")
    for each in found.results:
        gaussian = "" if each.one_run_gaussian is None else f"≥ {each.one_run_gaussian:.2f}"
        detects = "yes" if each.attack.detects else "no: its bound says nothing"
        table.add_row(each.attack.name, _interval(each.attack), f"≥ {each.one_run:.2f}", gaussian, detects)
    console.out.print(table)
    certified = "none" if found.certified is None else f"{found.certified:.4g}"
    console.out.print(
        f"lower bounds on epsilon; all hold together with {level} confidence. Claim {claim:g}, certified {certified}. "
        f"If every guess were right, so many canaries would show {found.ceiling:.2f}",
        soft_wrap=True,
    )
    if found.interrupted:
        console.out.print("ended early: the attacks that were done until then are shown")
    if found.bound > claim:
        console.out.print(f"[red]the claim is violated: epsilon is at least {found.bound:.2f}[/red]")
    else:
        console.out.print("[green]no violation found[/green]; a small lower bound is no proof of privacy")


def _interval(attack: Attack) -> str:
    return f"{attack.auroc.value:.3f} ({attack.auroc.low:.3f} to {attack.auroc.high:.3f})"


def _print_release(found: ReleaseAudit, confidence: float) -> None:
    from sfumato import console

    level, first = f"{confidence:.0%} together", found.attacks[0]
    table = Table("attack", f"AUROC ({level})", *(f"TPR at {float(fpr):.1%} FPR" for fpr in first.tpr))
    for each in found.attacks:
        rates = [
            "too few images" if rate is None else f"{rate.value:.2%} ({rate.low:.2%} to {rate.high:.2%})"
            for rate in each.tpr.values()
        ]
        table.add_row(each.name, _interval(each), *rates)
    console.out.print(table)
    share, copies = found.memory["closer_to_training"], found.memory["copies"]
    closer = f"{share['value']:.1%} of synthetic images ({share['low']:.1%} to {share['high']:.1%})"
    console.out.print(
        f"{closer} are closer to a training image than to a held-out one; 50% is chance. Exact copies: {copies}",
        soft_wrap=True,
    )
    counted = f"attacked: {found.attacked[0]} of {found.members} training and {found.attacked[1]} held-out images"
    console.out.print(counted + (", ended early" if found.interrupted else ""), soft_wrap=True)
    if found.suspicious:
        console.out.print("[yellow]training images can be told from others[/yellow]")
    else:
        console.out.print("no attack is better than guessing; stronger attacks may exist")
