"""The command line: parse, call the public API, print."""

from __future__ import annotations

import ast
import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import typer
from rich.markup import escape
from rich.table import Table

import sfumato as sf
from sfumato.account import Account
from sfumato.advice import warnings_for
from sfumato.certificate import signing
from sfumato.data import (
    DataError,
    DataWarning,
    contact_sheet,
    find_named,
    get_named,
    named_sets,
)
from sfumato.data.atomic import replacing
from sfumato.demo import free_folder, run_demo
from sfumato.evaluate import compare, detect, detect_each, least_likely, measure_private
from sfumato.methods.base import Synthesizer, started
from sfumato.methods.registry import DEFAULT
from sfumato.printing import (
    err,
    out,
    plan_dict,
    print_account,
    print_comparison,
    print_detections,
    print_json,
    print_plan,
    print_synthesis,
    print_verification,
    print_warnings,
    promise,
    warn,
)
from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import Adjacency, Budget, Unit
from sfumato.privacy.vault import MAX_PER_PERSON
from sfumato.progress import bar
from sfumato.synth import check_apart, check_output, synthesize

app = typer.Typer(
    help="Make synthetic images from sensitive ones, with a differential-privacy guarantee that anybody can check.",
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
Classes = Annotated[
    str | None, typer.Option(help="Class names, separated by commas, or their number; where the data does not say.")
]
Person = Annotated[
    str | None,
    typer.Option(help="Hide persons, not single images. Whose an image is: a column, folder, folder:K or regex:(…)."),
]
MostPerPerson = Annotated[
    int, typer.Option("--max-per-person", min=1, help="Images of a person that are used, at most.")
]
BudgetFile = Annotated[
    Path | None, typer.Option("--budget", help="The data set's budget over many runs: sfumato budget open.")
]
Sign = Annotated[Path | None, typer.Option("--sign", help="Private key to sign the certificate: sfumato key new.")]
Issuer = Annotated[str | None, typer.Option(help="Who issues the certificate; stands in it.")]
Subject = Annotated[str | None, typer.Option(help="Which data the certificate is about; stands in it.")]
OnError = Annotated[str, typer.Option(help="raise, or skip broken files and say so.")]
Params = Annotated[list[str] | None, typer.Option("--set", help="A parameter of the method, name=value; repeatable.")]
Seed = Annotated[int, typer.Option(help="Initial weights and sampling; never the privacy noise.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in the same folder.")]
Count = Annotated[
    int | None,
    typer.Option("--number", "-n", min=1, help="Synthetic images; all there are, where a method makes only a few."),
]
FILES = (".npz", ".parquet")  # that samples are written to; else a folder
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods."""
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
    classes: Classes = None,
    person: Person = None,
    max_per_person: MostPerPerson = MAX_PER_PERSON,
    budget: BudgetFile = None,
    as_json: Json = False,
) -> None:
    """Show what would be released, at which noise; spend nothing."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency)
    images = _load(data, size, mode, split, unlabelled, on_error, classes, person)
    public = model.public_facts(images)
    planned, notes = model.plan(public), model.explain_plan(public)
    advice = warnings_for(public, Budget(model.epsilon, model.delta, model.adjacency, public.unit))
    warn(advice)
    if public.unit == "person":
        notes = [*notes, f"at most {max_per_person} images of each person are used"]
    refusal = None if budget is None else Account(budget).refusal(planned)
    if as_json:
        facts = {"method": model.key, "shape": public.shape, "classes": public.classes, "unit": public.unit}
        fits = {} if budget is None else {"budget": str(budget), "fits": refusal is None, "refusal": refusal}
        return print_json({**facts, **plan_dict(planned), "notes": notes, "warnings": advice, **fits})
    print_plan(planned, model.key, public)
    for note in notes:
        out.print(escape(note), soft_wrap=True)
    if budget is not None:
        fitting = f"[green]fits[/green] into {escape(str(budget))}"
        out.print(fitting if refusal is None else f"[red]does not fit[/red]: {escape(refusal)}", soft_wrap=True)


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
    classes: Classes = None,
    person: Person = None,
    max_per_person: MostPerPerson = MAX_PER_PERSON,
    budget: BudgetFile = None,
    sign: Sign = None,
    issuer: Issuer = None,
    subject: Subject = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Learn from private images and leave a model that can be sampled for ever."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency, seed=seed, device=device)
    _check_key(sign)
    check_output(target, resume)
    with _resumable(target):
        images = _load(data, size, mode, split, unlabelled, on_error, classes, person)
        _advise(model, images, budget, resume)
        model.fit(
            images,
            run_dir=target,
            resume=resume,
            budget=budget,
            sign=sign,
            issuer=issuer,
            subject=subject,
            max_per_person=max_per_person,
        )
    certificate = model.certificate_
    if as_json:
        return print_json({"run": str(target), "epsilon": certificate.epsilon, "guarantee": certificate.guarantee})
    out.print(f"{promise(certificate)}\nmodel and certificate are in {escape(str(target))}", soft_wrap=True)


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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Draw synthetic images from a model, with a certificate that points to the run's; costs no privacy."""
    _check_key(sign)
    target = target.resolve()
    beside = target.with_name(f"{target.stem if target.suffix in FILES else target.name}.certificate.json")
    if beside.exists() and not overwrite:
        raise DataError(f"{beside} exists already; choose another name or pass --overwrite")
    model = sf.load(run, device=device)
    most = model.most(model.public_) or 1000 * len(model.public_.classes)
    number = number or min(1000, most // (len(model.public_.classes) if label else 1))
    images = model.sample(number, labels=label, seed=seed, **_assignments(params))
    sf.save_images(images, target, overwrite=overwrite)
    certificate = model.certificate_.derived(target.parent, [target.name])
    (certificate if sign is None else certificate.signed(sign)).save(beside)
    if as_json:
        return print_json({"out": str(target), "images": len(images), "certificate": str(beside)})
    out.print(f"{len(images)} images in {escape(str(target))}\ncertificate in {escape(str(beside))}", soft_wrap=True)


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
    classes: Classes = None,
    person: Person = None,
    max_per_person: MostPerPerson = MAX_PER_PERSON,
    budget: BudgetFile = None,
    sign: Sign = None,
    issuer: Issuer = None,
    subject: Subject = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Make a folder to share: fit, sample, certificate, picture, metrics. The main job."""
    model = _create(method, params, epsilon=epsilon, delta=delta, adjacency=adjacency, seed=seed, device=device)
    _check_key(sign)
    if test is not None:
        _check_sources(data, split, test)
    check_output(target, resume)
    with _resumable(target):
        images = _load(data, size, mode, split, unlabelled, on_error, classes, person)
        held_out = None if test is None else _load_like(test, images, "test", on_error)
        _advise(model, images, budget, resume)
        result = synthesize(
            model,
            images,
            target,
            number=number,
            test=held_out,
            resume=resume,
            budget=budget,
            sign=sign,
            issuer=issuer,
            subject=subject,
            max_per_person=max_per_person,
        )
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
    classes: Classes = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure utility and fidelity of synthetic sets against public test images, in one table."""
    if train is not None:
        _check_sources(train, "train", test)
    loaded = {name: _load_synthetic(name, unlabelled, classes) for name in sets}
    first = next(iter(loaded.values()))
    held_out = _load_like(test, first, "test")
    private = None if train is None else _load_like(train, first, "train")
    if private is not None:
        check_apart(private, held_out)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    feature_network = None if network == "none" else network
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = compare(loaded, test=held_out, profile=profile, network=feature_network, device=place)
        if private is not None:
            measure_private(first, private, (target.parent if target is not None else Path()) / "private")
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
    classes: Classes = None,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find images unlike those that a model learned: log-likelihoods, and a threshold from synthetic images.

    The model's certificate covers the threshold, too. Scores tell of the images that are scored: protect them.
    """
    if each and (label or inliers):
        raise typer.BadParameter("--each goes through all classes itself; leave out --label and --inliers")
    model = sf.load(run, device=device)
    size, mode = _form(model.public_.shape)
    images = _load(data, size, mode, split, unlabelled, on_error, classes)
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
    """Calculate epsilon, or the noise for it: Gaussian sums over Poisson samples."""
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


@app.command(epilog="Examples: sfumato verify shared/ ; sfumato verify shared/ --max-epsilon 1 --signed-by issuer.pub")
def verify(
    certificate: Annotated[Path, typer.Argument(help="A certificate, or the folder that holds certificate.json.")],
    allow_none: Annotated[
        bool, typer.Option("--allow-none", help="Accept a certificate that says: guarantee none.")
    ] = False,
    max_epsilon: Annotated[float | None, typer.Option(help="Fail if epsilon is larger.")] = None,
    max_delta: Annotated[float | None, typer.Option(help="Fail if delta is larger.")] = None,
    signed_by: Annotated[Path | None, typer.Option(help="Fail unless the owner of this public key signed it.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute epsilon from the events and check every hash; exit status 1 if anything is off."""
    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    result = sf.verify(path, allow_none=allow_none, max_epsilon=max_epsilon, max_delta=max_delta, signed_by=signed_by)
    print_json({"ok": result.ok, **vars(result)}) if as_json else print_verification(result)
    if not result.ok:
        raise typer.Exit(1)


key_app = typer.Typer(help="Make keys that sign certificates.", no_args_is_help=True)
app.add_typer(key_app, name="key")


@key_app.command("new", epilog="Example: sfumato key new hospital.key ; then hand out hospital.key.pub")
def key_new(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the private key; FILE.pub is the public one.")
    ],
    as_json: Json = False,
) -> None:
    """Make an Ed25519 key to sign certificates with."""
    public = signing.new_key(target)
    if as_json:
        return print_json({"private": str(target), "public": f"{target}.pub", "key": f"ed25519:{public}"})
    name = escape(str(target))
    out.print(f"private key {name}: keep it\npublic key {name}.pub: hand it out\n  ed25519:{public}", soft_wrap=True)


budget_app = typer.Typer(help="Keep one budget for a data set over many runs.", no_args_is_help=True)
app.add_typer(budget_app, name="budget")
BudgetPath = Annotated[Path, typer.Argument(metavar="FILE", help="File of the budget, as hospital.budget.")]


@budget_app.command(
    "open", epilog="Example: sfumato budget open hospital.budget --epsilon 3 --delta 1e-5 --unit person"
)
def budget_open(
    path: BudgetPath,
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="For all runs together.")],
    delta: Delta = 1e-5,
    adjacency: Relation = "add-remove",
    unit: Annotated[str, typer.Option(help="What is hidden: image or person.")] = "image",
    note: Annotated[str | None, typer.Option(help="Which data set this is; kept in the file.")] = None,
    as_json: Json = False,
) -> None:
    """Make a budget that runs pay into (--budget FILE on fit and synth)."""
    account = Account.open(path, epsilon, delta, cast(Adjacency, adjacency), cast(Unit, unit), note)
    print_account(account, as_json=as_json)


@budget_app.command("show", epilog="Example: sfumato budget show hospital.budget")
def budget_show(path: BudgetPath, as_json: Json = False) -> None:
    """List the runs that paid into a budget, and what is left."""
    print_account(Account(path), as_json=as_json)


data_app = typer.Typer(help="List or fetch named data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the names, and which are here."""
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
    """Try it on real images, in a few minutes on two cores: a picture, a certificate, an accuracy."""
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


def _load(
    source: str,
    size: int | None,
    mode: str | None,
    split: str,
    unlabelled: bool,
    on_error: str,
    classes: str | Sequence[str] | None = None,
    person: str | None = None,
) -> sf.ImageSet:
    with bar("reading images") as advance, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        images = sf.load_images(
            source,
            size=size,
            mode=cast(Literal["grey", "rgb"] | None, mode),
            split=cast(Literal["train", "test"], split),
            labels=not unlabelled,
            classes=_classes(classes) if isinstance(classes, str) else classes,
            person=person,
            on_error=cast(Literal["raise", "skip"], on_error),
            progress=advance,
        )
    print_warnings(caught)
    return images


def _classes(text: str) -> int | list[str]:
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]


def _form(shape: tuple[int, int, int]) -> tuple[int | None, str]:
    """Size and mode that give this shape: images are resized where it is square."""
    return (shape[1] if shape[1] == shape[2] else None), ("grey" if shape[0] == 1 else "rgb")


def _load_like(source: str, images: sf.ImageSet, split: str, on_error: str = "raise") -> sf.ImageSet:
    """Images of the same shape and classes as others."""
    size, mode = _form(images.shape)
    return _load(source, size, mode, split, not images.labelled, on_error, images.classes if images.labelled else None)


def _load_synthetic(source: str, unlabelled: bool, classes: str | None) -> sf.ImageSet:
    """A synthetic set; of a folder that `synth` made, its images."""
    inside = Path(source) / "images.npz"
    return _load(str(inside) if inside.exists() else source, None, None, "train", unlabelled, "raise", classes)


def _check_sources(private: str, split: str, test: str) -> None:
    """Refuse a test set that is the private one by name, before anything is read."""
    if split == "test" and (private == test or Path(private).resolve() == Path(test).resolve()):
        raise DataError(
            f"--test {test} is the private set itself: what is measured on it must not be shared; give others"
        )


def _check_key(sign: Path | None) -> None:
    """Refuse a key that cannot sign, before anything is spent."""
    if sign is not None:
        signing.sign("", sign)


def _advise(model: Synthesizer, images: sf.ImageSet, budget: Path | None, resume: bool) -> None:
    """Warn of unwise settings, and refuse what the data set's budget does not allow, before anything is spent."""
    public = model.public_facts(images)
    warn(warnings_for(public, Budget(model.epsilon, model.delta, model.adjacency, public.unit)))
    refusal = None if budget is None or resume else Account(budget).refusal(model.plan(public))
    if refusal is not None:
        raise sf.BudgetExceeded(refusal)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say after Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if started(folder):
            command = shlex.join(["sfumato", *[part for part in sys.argv[1:] if part != "--resume"], "--resume"])
            said = f"interrupted; what was charged stays charged. Go on with:\n  {command}"
        else:
            said = "interrupted; nothing was spent"
        err.print(escape(said), soft_wrap=True)
        raise typer.Exit(130) from None


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
    except (DataError, sf.BudgetExceeded, sf.LedgerError, ModuleNotFoundError, OSError) as error:
        _fail(error, 1)
    except ValueError as error:
        _fail(error, 2)
