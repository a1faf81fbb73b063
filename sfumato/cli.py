"""The command line interface: parse options, call the public API, print results."""

from __future__ import annotations

import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.markup import escape

import sfumato as sf
from sfumato import console
from sfumato.advice import warnings_for
from sfumato.certificate import signing
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.cli_audit import EPILOG as AUDIT_EPILOG
from sfumato.cli_audit import audit
from sfumato.cli_options import (
    AdjacencyOption,
    AfterFit,
    Classes,
    Count,
    DataOptions,
    DatasetBudgetFile,
    Delta,
    Device,
    Json,
    MethodOptions,
    OnError,
    RunOptions,
    Seed,
    Sign,
    Split,
    Unlabelled,
    parse_assignments,
    read_images,
    read_like,
    read_synthetic,
    size_and_mode,
    with_option_groups,
)
from sfumato.cli_prior import prior_app
from sfumato.data import DataError, PublicFacts, contact_sheet, get_named, named_sets
from sfumato.data.atomic import write_json
from sfumato.demo import run_demo, unused_folder
from sfumato.evaluate import compare, detect, detect_each, measure_private, write_detections
from sfumato.methods.base import Synthesizer, started
from sfumato.privacy.accounting import Release, bounds, tightest
from sfumato.privacy.budget import Adjacency, Budget, Unit
from sfumato.synthesize import (
    check_budget,
    check_disjoint,
    check_output,
    check_signing_key,
    check_sources,
    sample_to_file,
    synthesize,
)

app = typer.Typer(
    help="Create synthetic images from sensitive ones, with a differential privacy guarantee that anybody can verify.",
    epilog="Start with: [bold]sfumato demo[/bold]. Then: sfumato synth FOLDER --epsilon 1 --out DIR",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the available methods."""
    infos = sf.list_methods()
    console.print_json([vars(info) for info in infos]) if as_json else console.print_methods(infos)


@app.command(epilog="Example: sfumato plan scans/ --size 32 --epsilon 1")
@with_option_groups
def plan(source: DataOptions, options: MethodOptions, budget: DatasetBudgetFile = None, as_json: Json = False) -> None:
    """Show the planned releases, their noise and all settings. Spend no privacy budget."""
    model = options.create()
    public = model.public_facts(source.load())
    planned, settings, notes = model.plan(public), model.settings(public), model.explain_plan(public)
    advice = _advice(model, public)
    console.print_warnings(advice)
    if public.unit == "person":
        notes = [*notes, f"at most {source.max_per_person} images of each person are used"]
    refusal = None if budget is None else DatasetBudget(budget).refusal(planned)
    if as_json:
        facts = {"method": model.key, "shape": public.shape, "classes": public.classes, "unit": public.unit}
        fits = {} if budget is None else {"budget": str(budget), "fits": refusal is None, "refusal": refusal}
        return console.print_json(
            {**facts, **console.plan_to_dict(planned, settings), "notes": notes, "warnings": advice, **fits}
        )
    console.print_plan(planned, model.key, public, settings)
    for note in notes:
        console.out.print(escape(note), soft_wrap=True)
    if budget is not None:
        fitting = f"[green]fits[/green] into {escape(str(budget))}"
        console.out.print(fitting if refusal is None else f"[red]does not fit[/red]: {escape(refusal)}", soft_wrap=True)


@app.command(epilog="Example: sfumato fit scans/ --size 32 --epsilon 1 --out runs/a --set steps=500")
@with_option_groups
def fit(
    source: DataOptions,
    target: Annotated[
        Path, typer.Option("--out", "-o", help="Write the model, ledger and certificate to this folder.")
    ],
    options: MethodOptions,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Fit a model to private images. The model can be sampled any number of times."""
    model = options.create()
    check_signing_key(run.sign)
    check_output(target, run.resume)
    with _resumable(target):
        images = source.load()
        _check_before_fit(model, images, run)
        model.fit(images, run_dir=target, max_per_person=source.max_per_person, **vars(run))
    certificate = model.certificate_
    if as_json:
        return console.print_json(
            {"run": str(target), "epsilon": certificate.epsilon, "guarantee": certificate.guarantee}
        )
    console.out.print(
        f"{console.format_guarantee(certificate)}\nmodel and certificate: {escape(str(target))}", soft_wrap=True
    )


@app.command(
    epilog="Examples: sfumato sample runs/a -n 1000 --out synthetic/ ; sfumato sample runs/a -n 60000 --out s.npz"
)
def sample(
    run: Annotated[Path, typer.Argument(help="Folder that fit or synth wrote.")],
    target: Annotated[
        Path, typer.Option("--out", "-o", help="Write to this folder, FILE.npz or FILE.parquet, with a certificate.")
    ],
    number: Count = None,
    label: Annotated[str | None, typer.Option(help="Draw only this class.")] = None,
    params: AfterFit = None,
    seed: Seed = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Draw synthetic images from a model. This costs no privacy."""
    check_signing_key(sign)
    target = target.resolve()
    images, certificate = sample_to_file(
        run,
        target,
        number=number,
        label=label,
        seed=seed,
        device=device,
        overwrite=overwrite,
        sign=sign,
        options=parse_assignments(params),
    )
    if as_json:
        return console.print_json({"out": str(target), "images": len(images), "certificate": str(certificate)})
    console.out.print(
        f"{len(images)} images: {escape(str(target))}\ncertificate: {escape(str(certificate))}", soft_wrap=True
    )


@app.command(epilog="Example: sfumato synth scans/ --size 32 --epsilon 1 --out shared/ --test held-out/")
@with_option_groups
def synth(
    source: DataOptions,
    target: Annotated[Path, typer.Option("--out", "-o", help="Write to this new folder.")],
    options: MethodOptions,
    run: RunOptions,
    number: Count = None,
    test: Annotated[
        str | None, typer.Option(help="Measure utility on these real images. This declares them public.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a folder to share: fit a model, draw images, evaluate them, write a certificate."""
    model = options.create()
    check_signing_key(run.sign)
    if test is not None:
        check_sources(source.data, source.split, test)
    check_output(target, run.resume)
    with _resumable(target):
        images = source.load()
        held_out = None if test is None else read_like(test, images, "test", source.on_error)
        _check_before_fit(model, images, run)
        result = synthesize(
            model, images, target, number=number, test=held_out, max_per_person=source.max_per_person, **vars(run)
        )
    console.print_json(result.to_dict()) if as_json else console.print_synthesis(result)


@app.command(
    epilog="Examples: sfumato evaluate shared/ --test held-out/ ; sfumato evaluate a.npz b.npz c/ --test mnist"
)
def evaluate(
    sets: Annotated[list[str], typer.Argument(help="Synthetic sets: folders that synth wrote, or any image sets.")],
    test: Annotated[str, typer.Option(help="Compare with these real images. This declares them public.")],
    train: Annotated[
        str | None,
        typer.Option(
            help="Find nearest neighbours among these private images. Results go to the folder private/ only."
        ),
    ] = None,
    profile: Annotated[str, typer.Option(help="Choose the profile: quick, full or condensed.")] = "quick",
    network: Annotated[
        str, typer.Option(help="Choose the feature network for fidelity: effnet_lite0, inception or none.")
    ] = "effnet_lite0",
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all results to this JSON file, and a preview of each set.")
    ] = None,
    unlabelled: Unlabelled = False,
    classes: Classes = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure utility and fidelity of synthetic sets against public test images."""
    if train is not None:
        check_sources(train, "train", test)
    loaded = {name: read_synthetic(name, unlabelled, classes) for name in sets}
    first = next(iter(loaded.values()))
    held_out = read_like(test, first, "test")
    private = None if train is None else read_like(train, first, "train")
    if private is not None:
        check_disjoint(private, held_out)
    torch_device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    feature_network = None if network == "none" else network
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = compare(loaded, test=held_out, profile=profile, network=feature_network, device=torch_device)
        if private is not None:
            measure_private(first, private, (target.parent if target is not None else Path()) / "private")
    console.print_warnings(caught)
    if target is not None:
        write_json(target, found)
        for number, images in enumerate(loaded.values(), 1):
            contact_sheet(images, target.with_name(f"{target.stem}_{number}.png"))
    console.print_json(found) if as_json else console.print_comparison(found)


@app.command(
    epilog="Examples: sfumato ood runs/a new-scans/ --out found/ ; sfumato ood runs/a mnist --split test --label 3 ; "
    "sfumato ood runs/a mnist --split test --each"
)
def ood(
    run: Annotated[Path, typer.Argument(help="Folder that fit or synth wrote, with a method that scores (dp-lflow).")],
    data: Annotated[str, typer.Argument(help="Images to score. They are resized to the shape of the model.")],
    label: Annotated[
        str | None, typer.Option(help="Score as images of this class.", show_default="mixture of all classes")
    ] = None,
    inliers: Annotated[
        list[str] | None,
        typer.Option(
            help="Declare a class of the images as inliers; repeatable. All other classes are outliers.",
            show_default="class of --label, if the images have it",
        ),
    ] = None,
    each: Annotated[
        bool, typer.Option("--each", help="Test each class of the model against all others, and print the average.")
    ] = False,
    false_alarms: Annotated[
        float, typer.Option(help="Set the threshold so that this share of synthetic images lies below it.")
    ] = 0.05,
    samples: Annotated[int, typer.Option(min=20, help="Draw this many synthetic images for the threshold.")] = 2000,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write scores.json, scores.png and least_likely.png to this folder."),
    ] = None,
    params: AfterFit = None,
    split: Split = "test",
    unlabelled: Unlabelled = False,
    on_error: OnError = "raise",
    classes: Classes = None,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Detect images that differ from the training images, by their log-likelihood.

    The threshold comes from synthetic images, so the certificate of the model covers it.
    Scores describe the scored images: protect them if these images are private.
    """
    if each and (label or inliers):
        raise typer.BadParameter("--each tests all classes; leave out --label and --inliers")
    model = sf.load(run, device=device)
    size, mode = size_and_mode(model.public_.shape)
    images = read_images(
        data, size=size, mode=mode, split=split, unlabelled=unlabelled, classes=classes, on_error=on_error
    )
    options = {"false_alarms": false_alarms, "samples": samples, "seed": seed, **parse_assignments(params)}
    if each:
        found = detect_each(model, images, **options)
    else:
        found = {label or "all classes": detect(model, images, label=label, inliers=inliers or (), **options)}
    if target is not None:
        write_detections(images, found, target)
    if as_json:
        return console.print_json({name: detection.to_dict() for name, detection in found.items()})
    console.print_detections(found, false_alarms)
    if target is not None:
        console.out.print(f"scores, histograms and least likely images: {escape(str(target))}")


@app.command(epilog="Examples: sfumato account -s 1.1 -q 0.01 -t 10000 ; sfumato account -e 1 -q 0.01 -t 10000")
def account(
    noise: Annotated[
        float | None,
        typer.Option("--noise-multiplier", "-s", help="Compute epsilon for this noise multiplier."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="Compute the noise multiplier for this epsilon.")
    ] = None,
    sampling: Annotated[
        float, typer.Option("--sampling-prob", "-q", help="Set the probability that a step uses an image.")
    ] = 1.0,
    steps: Annotated[int, typer.Option("--steps", "-t", help="Set the number of steps.")] = 1,
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = "add-remove",
    as_json: Json = False,
) -> None:
    """Compute epsilon, or the noise multiplier for it, of Gaussian sums with Poisson subsampling."""
    if (noise is None) == (epsilon is None):
        raise typer.BadParameter("give either --noise-multiplier or --epsilon, exactly one of the two")
    relation = cast(Adjacency, adjacency)
    Budget(math.inf if epsilon is None else epsilon, delta, relation)
    if noise is None:
        assert epsilon is not None
        noise = sf.noise_multiplier(
            epsilon=epsilon, sampling_prob=sampling, steps=steps, delta=delta, adjacency=relation
        )
    found = bounds([Release("sum", steps, sampling, noise)], delta, relation)
    if as_json:
        return console.print_json(
            {"noise_multiplier": noise, "epsilon": tightest(found), "bounds": found, "delta": delta}
        )
    total = f"epsilon [bold]{tightest(found):.5g}[/bold] at delta {delta:g}"
    console.out.print(f"noise multiplier [bold]{noise:.5g}[/bold]: {total}")
    console.out.print("  " + ", ".join(f"{name} {value:.5g}" for name, value in found.items() if value is not None))


@app.command(epilog="Examples: sfumato verify shared/ ; sfumato verify shared/ --max-epsilon 1 --signed-by issuer.pub")
def verify(
    certificate: Annotated[Path, typer.Argument(help="Certificate, or a folder that holds certificate.json.")],
    allow_none: Annotated[
        bool, typer.Option("--allow-none", help="Accept a certificate without a guarantee (guarantee: none).")
    ] = False,
    max_epsilon: Annotated[float | None, typer.Option(help="Fail if epsilon is larger.")] = None,
    max_delta: Annotated[float | None, typer.Option(help="Fail if delta is larger.")] = None,
    signed_by: Annotated[Path | None, typer.Option(help="Fail unless this public key verifies the signature.")] = None,
    as_json: Json = False,
) -> None:
    """Verify a certificate: recompute epsilon and check every hash. Exit with status 1 if a check fails."""
    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    result = sf.verify(path, allow_none=allow_none, max_epsilon=max_epsilon, max_delta=max_delta, signed_by=signed_by)
    console.print_json({"ok": result.ok, **vars(result)}) if as_json else console.print_verification(result)
    if not result.ok:
        raise typer.Exit(1)


app.command(epilog=AUDIT_EPILOG)(audit)

key_app = typer.Typer(help="Create keys that sign certificates.", no_args_is_help=True)
app.add_typer(key_app, name="key")


@key_app.command("new", epilog="Example: sfumato key new hospital.key ; then publish hospital.key.pub")
def key_new(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the private key. The public key is written to FILE.pub.")
    ],
    as_json: Json = False,
) -> None:
    """Create an Ed25519 key pair to sign certificates."""
    public = signing.new_key(target)
    if as_json:
        return console.print_json({"private": str(target), "public": f"{target}.pub", "key": f"ed25519:{public}"})
    name = escape(str(target))
    console.out.print(f"private key: {name} (keep it secret)\npublic key: {name}.pub (publish it)", soft_wrap=True)
    console.out.print(f"  ed25519:{public}", soft_wrap=True)


budget_app = typer.Typer(help="Manage the privacy budget of a data set over many runs.", no_args_is_help=True)
app.add_typer(budget_app, name="budget")
BudgetPath = Annotated[Path, typer.Argument(metavar="FILE", help="Budget file, for example hospital.budget.")]


@budget_app.command(
    "open", epilog="Example: sfumato budget open hospital.budget --epsilon 3 --delta 1e-5 --unit person"
)
def budget_open(
    path: BudgetPath,
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="Set epsilon for all runs together.")],
    delta: Delta = 1e-5,
    adjacency: AdjacencyOption = "add-remove",
    unit: Annotated[str, typer.Option(help="Set the unit of privacy: image or person.")] = "image",
    note: Annotated[str | None, typer.Option(help="Store a note, for example the name of the data set.")] = None,
    as_json: Json = False,
) -> None:
    """Create a budget file. Charge runs to it with the option --budget of fit and synth."""
    account = DatasetBudget.open(path, epsilon, delta, cast(Adjacency, adjacency), cast(Unit, unit), note)
    console.print_budget(account, as_json=as_json)


@budget_app.command("show", epilog="Example: sfumato budget show hospital.budget")
def budget_show(path: BudgetPath, as_json: Json = False) -> None:
    """List the runs that are charged to a budget, and what is left."""
    console.print_budget(DatasetBudget(path), as_json=as_json)


app.add_typer(prior_app, name="prior")

data_app = typer.Typer(help="List or download named data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the named data sets, and which of them are on this machine."""
    console.print_named_sets(named_sets(), as_json=as_json)


@data_app.command("get", epilog="Example: sfumato data get fashion-mnist")
def data_get(
    name: Annotated[str, typer.Argument(help="Name of the data set (sfumato data list).")],
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this folder.", show_default="cache of the user")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a named data set."""
    path = get_named(name, target)
    console.print_json({"path": str(path)}) if as_json else console.out.print(escape(str(path)))


@app.command()
def demo(
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write to this new folder.", show_default="demo, demo-2, …"),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", "-e", help="Set epsilon.", show_default="1 or 4, by data set")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a complete example on public images, in a few minutes on two cores."""
    result = run_demo(target or unused_folder(), epsilon)
    console.print_json(result.to_dict()) if as_json else console.print_synthesis(result)


def _advice(model: Synthesizer, public: PublicFacts) -> list[str]:
    return warnings_for(public, Budget(model.epsilon, model.delta, model.adjacency, public.unit))


def _check_before_fit(model: Synthesizer, images: sf.ImageSet, run: RunOptions) -> None:
    """Print warnings about weak settings, and refuse a run that the budget of the data set does not allow."""
    public = model.public_facts(images)
    console.print_warnings(_advice(model, public))
    if not run.resume:  # a resumed run is already charged
        check_budget(model, public, run.budget)


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """After Ctrl-C, print how to continue the run, and exit with status 130."""
    try:
        yield
    except KeyboardInterrupt:
        if started(folder):
            command = shlex.join(["sfumato", *[part for part in sys.argv[1:] if part != "--resume"], "--resume"])
            message = f"interrupted; the privacy budget that was charged stays charged. Continue with:\n  {command}"
        else:
            message = "interrupted; no privacy budget was spent"
        console.err.print(escape(message), soft_wrap=True)
        raise typer.Exit(130) from None


def _fail(error: Exception, status: int) -> None:
    """Print an error without traceback and exit. SFUMATO_DEBUG=1 shows the traceback."""
    if os.environ.get("SFUMATO_DEBUG"):
        raise error
    console.err.print(f"[red]error[/red]: {escape(str(error))}", soft_wrap=True)
    sys.exit(status)


def main() -> None:
    """Run the `sfumato` command."""
    try:
        app()
    except (DataError, sf.BudgetExceeded, sf.LedgerError, ModuleNotFoundError, OSError) as error:
        _fail(error, 1)
    except ValueError as error:
        _fail(error, 2)
