"""The command line: parse, call the public API, print."""

from __future__ import annotations

import ast
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from rich.markup import escape
from rich.table import Table

import sfumato as sf
from sfumato.data import DataError, DataWarning, contact_sheet, find_named, get_named, named_sets
from sfumato.data.atomic import replacing
from sfumato.demo import free_folder, run_demo
from sfumato.evaluate import compare, detect, detect_each, least_likely, measure_private
from sfumato.methods.base import Synthesizer
from sfumato.methods.registry import DEFAULT
from sfumato.printing import (
    err,
    out,
    plan_dict,
    print_comparison,
    print_detections,
    print_json,
    print_plan,
    print_synthesis,
    print_warnings,
    promise,
)
from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import Adjacency, Budget
from sfumato.progress import bar
from sfumato.synth import check_output, synthesize

app = typer.Typer(
    help="Synthetic images from sensitive ones, with a differential-privacy guarantee that anybody can check.",
    epilog="Start with: [bold]sfumato demo[/bold]. Then: sfumato synth FOLDER --epsilon 1 --out DIR",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
Data = Annotated[
    str, typer.Argument(help="Folder, .npz, .parquet, .tar, IDX or CIFAR files, or a name (sfumato data list).")
]
Method = Annotated[str, typer.Option("--method", "-m", help="See: sfumato methods. auto: the best for this machine.")]
Epsilon = Annotated[
    float, typer.Option("--epsilon", "-e", help="Privacy budget; smaller is more private. inf: no noise.")
]
Delta = Annotated[float, typer.Option(help="Probability that the guarantee may fail; far below 1 / number of images.")]
Relation = Annotated[str, typer.Option("--adjacency", help="add-remove or replace-one.")]
Size = Annotated[int | None, typer.Option(help="Crop to a square and resize to this many pixels.")]
Mode = Annotated[str | None, typer.Option(help="grey or rgb; left out: as the images are.")]
Split = Annotated[str, typer.Option(help="train or test, for sources that have both.")]
Unlabelled = Annotated[bool, typer.Option("--unlabelled", help="Ignore classes: one collection.")]
OnError = Annotated[str, typer.Option(help="raise, or skip broken files and say so.")]
Params = Annotated[list[str] | None, typer.Option("--set", help="A parameter of the method, name=value; repeatable.")]
Seed = Annotated[int, typer.Option(help="Initial weights and sampling; never the privacy noise.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in the same folder.")]
Count = Annotated[
    int | None,
    typer.Option("--number", "-n", min=1, help="Synthetic images; all there are, where a method makes only a few."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.command()
def methods(as_json: Json = False) -> None:
    """What there is."""
    infos = sf.list_methods()
    if as_json:
        return print_json([vars(info) for info in infos])
    table = Table("key", "what it does", "guarantee", "paper")
    for info in infos:
        table.add_row(info.key, info.summary, info.guarantee, info.paper)
    out.print(table)


@app.command(epilog="Example: sfumato plan scans/ --size 32 --epsilon 1")
def plan(
    data: Data,
    method: Method = DEFAULT,
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    adjacency: Relation = "add-remove",
    params: Params = None,
    size: Size = None,
    mode: Mode = None,
    split: Split = "train",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    as_json: Json = False,
) -> None:
    """What would be released, at which noise; spends nothing."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency)
    images = _load(data, size, mode, split, unlabelled, on_error)
    public = model.public_facts(images)
    planned, notes = model.plan(public), model.explain_plan(public)
    if as_json:
        return print_json({**plan_dict(planned), "notes": notes})
    print_plan(planned)
    for note in notes:
        out.print(escape(note), soft_wrap=True)


@app.command(epilog="Example: sfumato fit scans/ --size 32 --epsilon 1 --out runs/a --set steps=500")
def fit(
    data: Data,
    target: Annotated[Path, typer.Option("--out", "-o", help="Folder for model, ledger and certificate.")],
    method: Method = DEFAULT,
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    adjacency: Relation = "add-remove",
    params: Params = None,
    size: Size = None,
    mode: Mode = None,
    split: Split = "train",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Learn from private images and leave a model that can be sampled for ever."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency, seed=seed, device=device)
    check_output(target, resume)
    images = _load(data, size, mode, split, unlabelled, on_error)
    with _resumable():
        model.fit(images, run_dir=target, resume=resume)
    certificate = model.certificate_
    if as_json:
        return print_json({"run": str(target), "epsilon": certificate.epsilon, "guarantee": certificate.guarantee})
    out.print(f"{promise(certificate)}\nmodel and certificate are in {escape(str(target))}")


@app.command(
    epilog="Examples: sfumato sample runs/a -n 1000 --out synthetic/ ; sfumato sample runs/a -n 60000 --out s.npz"
)
def sample(
    run: Annotated[Path, typer.Argument(help="A folder that fit or synth made.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="Folder, FILE.npz or FILE.parquet.")],
    number: Count = None,
    label: Annotated[str | None, typer.Option(help="Only this class.")] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter that may change after fit, name=value, as sharpness=5 of dp-lflow."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite")] = False,
    as_json: Json = False,
) -> None:
    """Draw synthetic images from a model; costs no privacy."""
    model = sf.load(run, device=device)
    most = model.most(model.public_) or 1000 * len(model.public_.classes)
    number = number or min(1000, most // (len(model.public_.classes) if label else 1))
    images = model.sample(number, labels=label, seed=seed, **_assignments(params))
    written = sf.save_images(images, target, overwrite=overwrite)
    print_json({"out": str(written), "images": len(images)}) if as_json else out.print(
        f"{len(images)} images in {escape(str(written))}"
    )


@app.command(epilog="Example: sfumato synth scans/ --size 32 --epsilon 1 --out shared/ --test held-out/")
def synth(
    data: Data,
    target: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    method: Method = DEFAULT,
    epsilon: Epsilon = 1.0,
    delta: Delta = 1e-5,
    adjacency: Relation = "add-remove",
    number: Count = None,
    test: Annotated[
        str | None, typer.Option(help="Real images, declared public by this, to measure utility on.")
    ] = None,
    params: Params = None,
    size: Size = None,
    mode: Mode = None,
    split: Split = "train",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """The main job: fit, sample, certificate, picture, metrics."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency, seed=seed, device=device)
    check_output(target, resume)
    images = _load(data, size, mode, split, unlabelled, on_error)
    held_out = None if test is None else _load_like(test, images.shape, "test", unlabelled, on_error)
    with _resumable():
        result = synthesize(model, images, target, number=number, test=held_out, resume=resume)
    print_json(result.to_dict()) if as_json else print_synthesis(result)


@app.command(
    epilog="Examples: sfumato evaluate shared/ --test held-out/ ; sfumato evaluate a.npz b.npz c/ --test mnist"
)
def evaluate(
    sets: Annotated[list[str], typer.Argument(help="Synthetic sets: folders that synth made, or any image set.")],
    test: Annotated[str, typer.Option(help="Real images, declared public by this.")],
    train: Annotated[
        str | None, typer.Option(help="The private images: nearest neighbours, into private/ only.")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, full or condensed.")] = "quick",
    network: Annotated[str, typer.Option(help="Feature network, or none: effnet_lite0, inception.")] = "effnet_lite0",
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON file for all figures; a picture of each set beside it.")
    ] = None,
    unlabelled: Unlabelled = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Utility and fidelity of synthetic sets against public test images, in one table."""
    loaded = {name: _load_synthetic(name, unlabelled) for name in sets}
    shape = next(iter(loaded.values())).shape
    held_out = _load_like(test, shape, "test", unlabelled)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    feature_network = None if network == "none" else network
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = compare(loaded, test=held_out, profile=profile, network=feature_network, device=place)
        if train is not None:
            private = (target.parent if target is not None else Path()) / "private"
            measure_private(next(iter(loaded.values())), _load_like(train, shape, "train", unlabelled), private)
    print_warnings(caught)
    if target is not None:
        with replacing(target, overwrite=True) as partial:
            partial.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
        for number, images in enumerate(loaded.values(), 1):
            contact_sheet(images, target.with_name(f"{target.stem}_{number}.png"))
    print_json(found) if as_json else print_comparison(found)


@app.command(
    epilog="Examples: sfumato ood runs/a new-scans/ --out found/ ; sfumato ood runs/a mnist --split test --label 3 ; "
    "sfumato ood runs/a mnist --split test --each"
)
def ood(
    run: Annotated[Path, typer.Argument(help="A folder that fit or synth made, of a method that scores (dp-lflow).")],
    data: Annotated[str, typer.Argument(help="Images to score; they are cropped and resized to the model's shape.")],
    label: Annotated[
        str | None,
        typer.Option(help="Score as images of this class; left out: of all classes, each with its share."),
    ] = None,
    inliers: Annotated[
        list[str] | None,
        typer.Option(
            help="A class of the images that belongs (repeatable); all others are outliers. Gives AUROC and rates. "
            "Left out: the class of --label, if the images have it."
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Each class of the model in turn against all others, and the average.")
    ] = False,
    false_alarms: Annotated[
        float,
        typer.Option(help="Share of synthetic images below the threshold. No private image is used to set it."),
    ] = 0.05,
    samples: Annotated[int, typer.Option(min=20, help="Synthetic images that the threshold is taken from.")] = 2000,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for scores.json, scores.png (a histogram) and least_likely.png."),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter that may change after fit, name=value, as likelihood=image."),
    ] = None,
    split: Split = "test",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Which images are unlike those that a model learned: log-likelihoods, and a threshold from synthetic images.

    The model's certificate covers the threshold, too. Scores tell of the images that are scored: protect them.
    """
    if each and (label or inliers):
        raise typer.BadParameter("--each goes through all classes itself; leave out --label and --inliers")
    model = sf.load(run, device=device)
    images = _load_like(data, model.public_.shape, split, unlabelled, on_error)
    options = {"false_alarms": false_alarms, "samples": samples, "seed": seed, **_assignments(params)}
    if each:
        found = detect_each(model, images, **options)
    else:
        found = {label or "all classes": detect(model, images, label=label, inliers=inliers or (), **options)}
    content = {name: detection.to_dict() for name, detection in found.items()}
    if target is not None:
        for number, detection in enumerate(found.values(), 1):
            ending = f"_{number}" if each else ""
            detection.histogram(target / f"scores{ending}.png")
            least_likely(images, detection.scores, target / f"least_likely{ending}.png")
        with replacing(target / "scores.json", overwrite=True) as partial:
            partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if as_json:
        return print_json(content)
    print_detections(found, false_alarms)
    if target is not None:
        out.print(f"scores, histogram and the least likely images are in {escape(str(target))}")


@app.command(epilog="Examples: sfumato account -s 1.1 -q 0.01 -t 10000 ; sfumato account -e 1 -q 0.01 -t 10000")
def account(
    noise: Annotated[
        float | None, typer.Option("--noise-multiplier", "-s", help="Noise over the bound of one image.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", "-e", help="Solve for the noise instead.")] = None,
    sampling: Annotated[
        float, typer.Option("--sampling-prob", "-q", help="Probability of an image to be in a step.")
    ] = 1.0,
    steps: Annotated[int, typer.Option("--steps", "-t")] = 1,
    delta: Delta = 1e-5,
    adjacency: Relation = "add-remove",
    as_json: Json = False,
) -> None:
    """The privacy calculator: Gaussian sums over Poisson samples."""
    if (noise is None) == (epsilon is None):
        raise typer.BadParameter("give --noise-multiplier, or --epsilon to solve for it; one of the two")
    relation = cast(Adjacency, adjacency)
    Budget(math.inf if epsilon is None else epsilon, delta, relation)
    if noise is None:
        assert epsilon is not None
        noise = sf.noise_multiplier(
            epsilon=epsilon, sampling_prob=sampling, steps=steps, delta=delta, adjacency=relation
        )
    found = bounds([Release("sum", steps, sampling, noise)], delta, relation)
    if as_json:
        return print_json({"noise_multiplier": noise, "epsilon": least(found), "bounds": found, "delta": delta})
    out.print(f"noise multiplier [bold]{noise:.5g}[/bold]: epsilon [bold]{least(found):.5g}[/bold] at delta {delta:g}")
    out.print("  " + ", ".join(f"{name} {value:.5g}" for name, value in found.items() if value is not None))


@app.command(epilog="Example: sfumato verify shared/certificate.json")
def verify(
    certificate: Annotated[Path, typer.Argument(help="certificate.json, with the released files beside it.")],
    as_json: Json = False,
) -> None:
    """Recompute epsilon from the events and check every hash; exit status 1 if anything is off."""
    result = sf.verify(certificate / "certificate.json" if certificate.is_dir() else certificate)
    if as_json:
        print_json({"ok": result.ok, "problems": result.problems, "epsilon": result.epsilon, "checked": result.checked})
    elif result.ok:
        word = f"epsilon {result.epsilon:.4f}" if result.epsilon is not None else "guarantee: none"
        out.print(f"[green]holds[/green]: {word}; checked {', '.join(result.checked)}")
    else:
        out.print("[red]does not hold[/red]:\n" + "\n".join(f"  {escape(problem)}" for problem in result.problems))
    if not result.ok:
        raise typer.Exit(1)


data_app = typer.Typer(help="Named data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """The names, and which are here."""
    found = {info.name: find_named(info.name) for info in named_sets()}
    if as_json:
        return print_json(
            [
                {"name": i.name, "what": i.description, "found": found[i.name] and str(found[i.name])}
                for i in named_sets()
            ]
        )
    table = Table("name", "what", "licence", "here")
    for info in named_sets():
        where = found[info.name]
        table.add_row(info.name, info.description, info.licence, escape(str(where)) if where else "no")
    out.print(table)


@data_app.command("get", epilog="Example: sfumato data get fashion-mnist")
def data_get(
    name: str, target: Annotated[Path | None, typer.Option("--out", "-o")] = None, as_json: Json = False
) -> None:
    """Fetch a named set into the cache."""
    path = get_named(name, target)
    print_json({"path": str(path)}) if as_json else out.print(escape(str(path)))


@app.command()
def demo(
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to make; left out: demo, demo-2, …")
    ] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", "-e", help="Left out: one that suits the data.")] = None,
    as_json: Json = False,
) -> None:
    """Real images, a few minutes on two cores: a picture, a certificate, an accuracy."""
    result = run_demo(target or free_folder(), epsilon)
    print_json(result.to_dict()) if as_json else print_synthesis(result)


def _create(method: str, params: list[str] | None, **fixed: Any) -> Synthesizer:
    return sf.create(method, **fixed, **_assignments(params))


def _assignments(params: list[str] | None) -> dict[str, Any]:
    return dict(_assignment(text) for text in params or [])


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--set takes name=value, got {text!r}")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _load(source: str, size: int | None, mode: str | None, split: str, unlabelled: bool, on_error: str) -> sf.ImageSet:
    with bar("reading images") as advance, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        images = sf.load_images(
            source,
            size=size,
            mode=cast(Literal["grey", "rgb"] | None, mode),
            split=cast(Literal["train", "test"], split),
            labels=not unlabelled,
            on_error=cast(Literal["raise", "skip"], on_error),
            progress=advance,
        )
    print_warnings(caught)
    return images


def _load_like(
    source: str, shape: tuple[int, int, int], split: str, unlabelled: bool, on_error: str = "raise"
) -> sf.ImageSet:
    """Images of the same shape as others: resized where those are square."""
    size = shape[1] if shape[1] == shape[2] else None
    return _load(source, size, "grey" if shape[0] == 1 else "rgb", split, unlabelled, on_error)


def _load_synthetic(source: str, unlabelled: bool) -> sf.ImageSet:
    """A synthetic set; of a folder that `synth` made, its images."""
    inside = Path(source) / "images.npz"
    return _load(str(inside) if inside.exists() else source, None, None, "train", unlabelled, "raise")


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise DataError("interrupted; what was charged stays in the ledger, and --resume goes on from there") from None


def _fail(error: Exception, status: int) -> None:
    """Bad input ends in one or two lines and a status, not in a traceback (SFUMATO_DEBUG=1 shows it)."""
    if os.environ.get("SFUMATO_DEBUG"):
        raise error
    err.print(f"[red]error[/red]: {escape(str(error))}", soft_wrap=True)
    sys.exit(status)


def main() -> None:
    """The entry point of the `sfumato` command."""
    try:
        app()
    except (DataError, sf.BudgetExceeded, sf.LedgerError, OSError) as error:
        _fail(error, 1)
    except ValueError as error:
        _fail(error, 2)
