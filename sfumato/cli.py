"""The command line interface: parse options, call the public API, print results.

The modules of the commands import PyTorch inside functions only, so help and usage errors are printed at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from sfumato import __version__
from sfumato.cli_audit import EPILOG as AUDIT_EPILOG
from sfumato.cli_audit import audit
from sfumato.cli_check import account, budget_app, key_app, verify
from sfumato.cli_compare import compare
from sfumato.cli_config import Config, write_config
from sfumato.cli_doctor import doctor
from sfumato.cli_evaluate import evaluate, ood
from sfumato.cli_options import (
    AfterFit,
    Cluster,
    ClusterOptions,
    Count,
    DataOptions,
    DatasetBudgetFile,
    Device,
    Json,
    MethodOptions,
    RunOptions,
    Sign,
    Workers,
    check_before_fit,
    parse_assignments,
    read_like,
    resumable,
    with_default,
    with_option_groups,
)
from sfumato.cli_prior import prior_app
from sfumato.cli_report import report
from sfumato.cli_serve import serve
from sfumato.cli_tune import tune
from sfumato.threads import choose_threads


class Commands(TyperGroup):
    """The commands; Ctrl-C ends each of them with status 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    help="Create synthetic images from sensitive ones, with a differential privacy guarantee that anybody can verify.",
    epilog="Start with: [bold]sfumato demo[/bold]. Then: sfumato synth FOLDER --epsilon 1 --out DIR",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sfumato {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Compute with this many threads.", show_default="usable cores, or SFUMATO_THREADS"),
    ] = None,
) -> None:
    """Create synthetic images from sensitive ones, with a differential privacy guarantee that anybody can verify."""
    if threads is not None:
        choose_threads(threads)


@app.command(epilog="Examples: sfumato methods ; sfumato methods atelier")
def methods(
    key: Annotated[str | None, typer.Argument(help="List the parameters of this method.")] = None,
    as_json: Json = False,
) -> None:
    """List the available methods, or the parameters of one."""
    from sfumato import console
    from sfumato.methods.registry import describe_parameters, list_methods

    if key is not None:
        found = describe_parameters(key)
        return console.print_json(found) if as_json else console.print_parameters(key, found)
    infos = list_methods()
    console.print_json([vars(info) for info in infos]) if as_json else console.print_methods(infos)


@app.command(epilog="Example: sfumato plan scans/ --size 32 --epsilon 1")
@with_option_groups
def plan(
    source: DataOptions,
    options: MethodOptions,
    budget: DatasetBudgetFile = None,
    config: Config = None,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Show the planned releases, their noise and all settings. Spend no privacy budget, decode at most one image."""
    from sfumato import console
    from sfumato.certificate.dataset_budget import DatasetBudget
    from sfumato.preview import preview

    model = options.create_for(source)
    outline = source.outline()
    declared = (source.size is not None and source.mode is not None) or not Path(source.data).is_dir()
    found = preview(model, outline, max_per_person=source.max_per_person, shape_declared=declared)
    console.print_warnings([*found.warnings, *found.private_warnings])
    refusal = None if budget is None else DatasetBudget(budget).refusal(found.plan)
    if as_json:
        fits = {} if budget is None else {"budget": str(budget), "fits": refusal is None, "refusal": refusal}
        return console.print_json({**found.to_dict(), **fits})
    console.print_plan(found)
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
    place: ClusterOptions,
    config: Config = None,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Fit a model to private images. The model can be sampled any number of times."""
    from sfumato import console
    from sfumato.methods.parameters import usable_device
    from sfumato.synthesize import check_output, check_signing_key

    model = options.create_for(source)
    usable_device(model.device)
    check_signing_key(run.sign)
    check_output(target, run.resume)
    with resumable(target), place.reading(source, target) as images:
        check_before_fit(model, images, run)
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
    number: Annotated[
        int | None,
        typer.Option("--number", "-n", min=1, help=with_default("Set the number of synthetic images.", "1,000")),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Draw only this class.")] = None,
    params: AfterFit = None,
    seed: Annotated[
        int | None, typer.Option(help="Set the seed, to draw the same images again.", show_default="a new one")
    ] = None,
    device: Device = "auto",
    cluster: Cluster = None,
    workers: Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Draw synthetic images from a model. This costs no privacy."""
    from sfumato import console
    from sfumato.synthesize import check_signing_key, new_seed, sample_to_file

    check_signing_key(sign)
    target = target.resolve()
    seed = new_seed() if seed is None else seed
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
        cluster=cluster,
        workers=workers,
    )
    if as_json:
        return console.print_json(
            {"out": str(target), "images": len(images), "certificate": str(certificate), "seed": seed}
        )
    console.out.print(
        f"{len(images)} images (seed {seed}): {escape(str(target))}\ncertificate: {escape(str(certificate))}",
        soft_wrap=True,
    )


@app.command(epilog="Example: sfumato synth scans/ --size 32 --epsilon 1 --out shared/ --test held-out/")
@with_option_groups
def synth(
    ctx: typer.Context,
    source: DataOptions,
    target: Annotated[Path, typer.Option("--out", "-o", help="Write to this new folder.")],
    options: MethodOptions,
    run: RunOptions,
    place: ClusterOptions,
    number: Count = None,
    test: Annotated[
        str | None, typer.Option(help="Measure utility on these real images. This declares them public.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Measure these public real images, too, for comparison; with --test.")
    ] = None,
    show_test: Annotated[
        bool, typer.Option("--show-test", help="Show some test images in the report, beside the synthetic ones.")
    ] = False,
    licence: Annotated[
        str | None, typer.Option(help="State the licence of the images in the data-set card, for example cc-by-4.0.")
    ] = None,
    config: Config = None,  # noqa: ARG001
    as_json: Json = False,
) -> None:
    """Create a folder to share: fit a model, draw images, evaluate them, write a report and a certificate."""
    from sfumato import console
    from sfumato.methods.parameters import usable_device
    from sfumato.synthesize import check_output, check_signing_key, check_sources, synthesize

    model = options.create_for(source)
    usable_device(model.device)
    check_signing_key(run.sign)
    if test is not None:
        check_sources(source.data, source.split, test)
    elif reference is not None or show_test:
        raise typer.BadParameter("--reference and --show-test need --test")
    check_output(target, run.resume)
    with resumable(target), place.reading(source, target) as images:
        held_out = None if test is None else read_like(test, images, "test", source.on_error)
        real = None if reference is None else read_like(reference, images, "train", source.on_error)
        check_before_fit(model, images, run)
        result = synthesize(
            model,
            images,
            target,
            number=number,
            test=held_out,
            reference=real,
            show_test=show_test,
            licence=licence,
            max_per_person=source.max_per_person,
            **vars(run),
        )
    write_config(ctx, target.resolve().with_name(f"{target.resolve().name}.toml"), method=model.key)
    console.print_json(result.to_dict()) if as_json else console.print_synthesis(result)


data_app = typer.Typer(help="List or download named data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List the named data sets, and which of them are on this machine."""
    from sfumato import console
    from sfumato.data import named_sets

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
    from sfumato import console
    from sfumato.data import get_named

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
    from sfumato import console
    from sfumato.demo import run_demo, unused_folder

    result = run_demo(target or unused_folder(), epsilon)
    console.print_json(result.to_dict()) if as_json else console.print_synthesis(result)


app.command(
    epilog="Examples: sfumato evaluate shared/ --test held-out/ ; sfumato evaluate a.npz b.npz c/ --test mnist"
)(evaluate)
app.command(
    epilog="Examples: sfumato ood runs/a new-scans/ --out found/ ; sfumato ood runs/a mnist --split test --label 3 ; "
    "sfumato ood runs/a mnist --split test --each"
)(ood)
app.command(epilog="Examples: sfumato account -s 1.1 -q 0.01 -t 10000 ; sfumato account -e 1 -q 0.01 -t 10000")(account)
app.command(epilog="Examples: sfumato verify shared/ ; sfumato verify shared/ --max-epsilon 1 --signed-by issuer.pub")(
    verify
)
app.command(
    epilog="Example: sfumato compare mnist --public --methods dp-merf,atelier --epsilons 0.2,1,10 --seeds 3 --test "
    "mnist --out comparison/"
)(compare)
app.command(
    epilog="Examples: sfumato tune scans/ --size 32 -m dp-merf --try steps=1000,4000 -e 1 --out shared/ ; sfumato tune "
    "mnist --public --test mnist -m dp-merf --try steps=1000,4000"
)(tune)
app.command(epilog=AUDIT_EPILOG)(audit)
app.command(epilog="Examples: sfumato report shared/ ; sfumato report runs/*/ --out comparison.html")(report)
app.command(epilog="Examples: sfumato serve ; sfumato serve --root /data --port 9000 --out /data/runs")(serve)
app.add_typer(key_app, name="key")
app.add_typer(budget_app, name="budget")
app.add_typer(prior_app, name="prior")
app.command(epilog="Examples: sfumato doctor ; sfumato doctor scans/ --size 32 --method atelier")(doctor)


def _fail(error: Exception, status: int) -> None:
    """Print an error without traceback and exit. SFUMATO_DEBUG=1 shows the traceback."""
    if os.environ.get("SFUMATO_DEBUG"):
        raise error
    Console(stderr=True).print(f"[red]error[/red]: {escape(str(error))}", soft_wrap=True)
    sys.exit(status)


def main() -> None:
    """Run the `sfumato` command."""
    try:
        app()
    except Exception as error:
        from sfumato.cluster.worker import WorkersDied
        from sfumato.data import DataError
        from sfumato.privacy import BudgetExceeded, LedgerError, RedactedError

        in_words = DataError | BudgetExceeded | LedgerError | RedactedError | WorkersDied
        if isinstance(error, in_words | ModuleNotFoundError | OSError):
            _fail(error, 1)
        if isinstance(error, ValueError):
            _fail(error, 2)
        if "No space left on device" in str(error):
            _fail(OSError("the disk is full; free some space and repeat the command with --resume"), 1)
        if isinstance(error, MemoryError) or "alloc" in str(error) or type(error).__name__ == "OutOfMemoryError":
            _fail(
                MemoryError(f"not enough memory ({str(error).splitlines()[0][:200]}); use fewer or smaller images"), 1
            )
        raise
