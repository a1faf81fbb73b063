"""The command `sfumato tune`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from sfumato.cli_config import Config, write_config
from sfumato.cli_options import (
    METHOD,
    RUN,
    Count,
    DataOptions,
    Json,
    MethodOptions,
    RunOptions,
    check_before_fit,
    parse_assignments,
    read_like,
    resumable,
    with_option_groups,
)

if TYPE_CHECKING:
    from sfumato.data import ImageSet
    from sfumato.methods.base import Synthesizer


@with_option_groups
def tune(
    ctx: typer.Context,
    source: DataOptions,
    options: MethodOptions,
    run: RunOptions,
    tries: Annotated[
        list[str],
        typer.Option(
            "--try",
            help="Try these values of a parameter, NAME=VALUE,VALUE,…; repeatable, for all combinations.",
            rich_help_panel=METHOD,
        ),
    ],
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the images of the best candidate to this new folder.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Measure utility on these real images. This declares them public.")
    ] = None,
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="Declare that DATA is public: compare on --test, free of charge, and print the best parameters.",
            rich_help_panel=RUN,
        ),
    ] = False,
    number: Count = None,
    config: Config = None,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Choose parameters of a method, and pay for the choice: on private images all candidates share the budget."""
    if public and (test is None or target is not None or run.budget is not None):
        raise typer.BadParameter("--public needs --test, and writes and charges nothing: leave out --out and --budget")
    if not public and target is None:
        raise typer.BadParameter("on private images, tune also creates images; pass --out, or --public")
    grid = _grid(tries)
    method = options.create_for(source)
    taken = sorted({name for each in grid for name in each} & set(parse_assignments(options.params)))
    if taken:
        raise typer.BadParameter(f"{taken[0]} is given by --set and --try; pass only one of them")
    if public:
        return _choose_on_public_images(method, grid, source, str(test), number, as_json)
    from sfumato import console
    from sfumato.methods.parameters import usable_device
    from sfumato.synthesize import check_output, check_signing_key, check_sources, synthesize

    assert target is not None
    model = _tuned(method, grid)
    usable_device(model.device)
    check_signing_key(run.sign)
    if test is not None:
        check_sources(source.data, source.split, test)
    check_output(target, run.resume)
    with resumable(target):
        images = source.load()
        held_out = None if test is None else read_like(test, images, "test", source.on_error)
        check_before_fit(model, images, run)
        options_of_run = {"max_per_person": source.max_per_person, **vars(run)}
        result = synthesize(model, images, target, number=number, test=held_out, **options_of_run)
    write_config(ctx, target.resolve().with_name(f"{target.resolve().name}.toml"), method=method.key)
    chosen: Any = model
    best = grid[chosen.chosen_]
    if as_json:
        return console.print_json({**result.to_dict(), "chosen": best, "candidates": len(grid)})
    console.out.print(f"chosen of {len(grid)}: {escape(_assignments(best))}", soft_wrap=True)
    console.print_synthesis(result)


def _tuned(method: Synthesizer, grid: list[dict[str, Any]]) -> Synthesizer:
    """Return the method that chooses among candidates; what was set applies to all of them."""
    from sfumato.methods.registry import create
    from sfumato.methods.tuned import SHARED_PARAMETERS

    given = {name: getattr(method, name) for name in method.get_params() if name in method._given}
    shared = {name: given.pop(name) for name in (*SHARED_PARAMETERS, "preset") if name in given}
    listed = [{**given, **each} for each in grid]
    return create("tuned", base=method.key, grid=json.dumps(listed), **shared).validate()


def _choose_on_public_images(
    method: Synthesizer, grid: list[dict[str, Any]], source: DataOptions, test: str, number: int | None, as_json: bool
) -> None:
    """Fit each candidate on public images with the whole budget, and print the accuracies and the best."""
    from sfumato import console
    from sfumato.evaluate import downstream_accuracy
    from sfumato.methods.registry import create
    from sfumato.synthesize import DEFAULT_IMAGES, check_sources

    check_sources(source.data, source.split, test)
    given = {name: getattr(method, name) for name in method._given}
    models = [create(method.key, **given, **each).validate() for each in grid]  # wrong parameters stop here
    images: ImageSet = source.load()
    held_out = read_like(test, images, "test", source.on_error)
    rows: list[dict[str, Any]] = []
    for model, each in zip(models, grid, strict=True):
        model.fit(images, max_per_person=source.max_per_person)
        limit = model.max_samples(model.public_facts(images)) or DEFAULT_IMAGES
        drawn = model.sample(min(number or DEFAULT_IMAGES, limit))
        accuracy = downstream_accuracy(drawn, held_out, device=model.torch_device).mean
        rows.append({"parameters": each, "accuracy": accuracy})
        console.err.print(escape(f"[{len(rows)}/{len(grid)}] {_assignments(each)}: {accuracy:.1f} %"), soft_wrap=True)
    best = max(rows, key=lambda row: row["accuracy"])["parameters"]
    if as_json:
        return console.print_json({"rows": rows, "best": best})
    console.out.print(f"best: {escape(_assignments(best))}", soft_wrap=True)
    console.out.print(f"use it: sfumato synth … --method {method.key} {escape(_assignments(best))}", soft_wrap=True)


def _assignments(parameters: dict[str, Any]) -> str:
    return " ".join(f"--set {name}={value}" for name, value in parameters.items())


def _grid(tries: list[str]) -> list[dict[str, Any]]:
    """Return all combinations of the values of --try."""
    values: dict[str, list[Any]] = {}
    for text in tries:
        name, equals, listed = text.partition("=")
        if not (name and equals and listed) or name in values:
            raise typer.BadParameter(f"--try takes NAME=VALUE,VALUE, once for each name, got {text!r}")
        values[name] = [parse_assignments([f"{name}={value}"])[name] for value in listed.split(",")]
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    if len(combinations) < 2:
        raise typer.BadParameter("there is nothing to choose: give at least two values")
    return combinations
