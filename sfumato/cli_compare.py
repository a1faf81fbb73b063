"""The command `sfumato compare`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from sfumato.cli_config import Config, write_config
from sfumato.cli_options import (
    METHOD,
    RUN,
    Cluster,
    Count,
    DataOptions,
    DatasetBudgetFile,
    Json,
    Workers,
    parse_assignments,
    read_like,
    with_option_groups,
)

if TYPE_CHECKING:
    from sfumato.sweep import Cost


@with_option_groups
def compare(
    ctx: typer.Context,
    source: DataOptions,
    target: Annotated[Path, typer.Option("--out", "-o", help="Write the runs and the results to this folder.")],
    methods: Annotated[str, typer.Option(help="Compare these methods, separated by commas.", rich_help_panel=METHOD)],
    test: Annotated[str, typer.Option(help="Measure utility on these real images. This declares them public.")],
    epsilons: Annotated[
        str, typer.Option(help="Use each of these epsilons, separated by commas.", rich_help_panel=METHOD)
    ] = "1",
    seeds: Annotated[int, typer.Option(min=1, help="Make this many runs of each.", rich_help_panel=METHOD)] = 1,
    delta: Annotated[
        float, typer.Option(help="Set delta. Choose it far below 1 / number of images.", rich_help_panel=METHOD)
    ] = 1e-5,
    adjacency: Annotated[
        str, typer.Option(help="Set the neighbouring relation: add-remove or replace-one.", rich_help_panel=METHOD)
    ] = "add-remove",
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a parameter of all methods that have it, NAME=VALUE, or of one, METHOD.NAME=VALUE; repeatable.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Compute on this device: auto, cpu or cuda.", rich_help_panel=METHOD)
    ] = "auto",
    number: Count = None,
    budget: DatasetBudgetFile = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Declare that DATA is public, so that runs cost nothing.", rich_help_panel=RUN),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Make only every N-th run from the I-th on: one part for each of N machines that share the folder.",
            rich_help_panel=RUN,
        ),
    ] = None,
    cluster: Cluster = None,
    workers: Workers = None,
    config: Config = None,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Compare methods over epsilons and seeds: runs, a table, a plot and a report. Start it again to continue it."""
    part, parts = _shard(shard)
    values = _numbers(epsilons)
    if public == (budget is not None):
        raise typer.BadParameter(
            "every run on private images costs: pass --budget FILE (sfumato budget open) to charge them, or --public "
            "if the images are public; exactly one of the two"
        )
    from sfumato import console, sweep
    from sfumato.cluster import connect

    common = {"delta": delta, "adjacency": adjacency, "device": device}
    names = [name.strip() for name in methods.split(",") if name.strip()]
    every = sweep.cells(target, names, values, seeds, common, parse_assignments(params))
    models = [cell.create() for cell in every]  # wrong parameters stop here
    images = source.load()
    held_out = read_like(test, images, "test", source.on_error)
    plans = [model.plan(model.public_facts(images)) for model in models]
    cost = None if public else sweep.cost_of(plans)
    chosen = every[part - 1 :: parts]
    _print_note(
        f"{len(every)} runs; "
        + ("the images are declared public, so they cost nothing" if public else _cost_text(cost))
    )
    sweep.check_affordable(chosen, models[0].public_facts(images), budget)
    target.mkdir(parents=True, exist_ok=True)
    write_config(ctx, target.resolve().with_name(f"{target.resolve().name}.toml"))
    options = {"number": number, "budget": budget, "max_per_person": source.max_per_person}
    executor = connect(cluster, **({} if workers is None else {"workers": workers}))
    try:
        failed = sweep.run_cells(chosen, images, held_out, report=_print_note, executor=executor, **options)
    finally:
        executor.close()
    results = sweep.write_results(every, target, public=public, cost=cost)
    if as_json:
        console.print_json({"out": str(target), "failed": failed, **results})
    else:
        console.print_sweep(results, target)
    if failed:
        raise typer.Exit(1)


def _print_note(line: str) -> None:
    from sfumato import console

    console.err.print(escape(line), soft_wrap=True)


def _cost_text(cost: Cost | None) -> str:
    if cost is None:
        return "some have no guarantee"
    return f"together they cost epsilon {cost.epsilon:.3g} at delta {cost.delta:g}"


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"--epsilons takes numbers separated by commas, got {text!r}") from None


def _shard(text: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise typer.BadParameter(f"--shard takes I/N with I from 1 to N, got {text!r}")
    return int(match[1]), int(match[2])
