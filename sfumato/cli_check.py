"""The commands about guarantees: `sfumato verify`, `account`, `key` and `budget`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.markup import escape

from sfumato.cli_options import AdjacencyOption, Delta, Json


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
    from sfumato import console
    from sfumato.engine import noise_multiplier
    from sfumato.privacy.accounting import Release, bounds, tightest
    from sfumato.privacy.budget import Adjacency, Budget

    relation = cast(Adjacency, adjacency)
    Budget(math.inf if epsilon is None else epsilon, delta, relation)
    if noise is None:
        assert epsilon is not None
        noise = noise_multiplier(epsilon=epsilon, sampling_prob=sampling, steps=steps, delta=delta, adjacency=relation)
    found = bounds([Release("sum", steps, sampling, noise)], delta, relation)
    if as_json:
        return console.print_json(
            {"noise_multiplier": noise, "epsilon": tightest(found), "bounds": found, "delta": delta}
        )
    total = f"epsilon [bold]{tightest(found):.5g}[/bold] at delta {delta:g}"
    console.out.print(f"noise multiplier [bold]{noise:.5g}[/bold]: {total}")
    console.out.print("  " + ", ".join(f"{name} {value:.5g}" for name, value in found.items() if value is not None))


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
    from sfumato import console
    from sfumato.certificate import verify as check

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    result = check(path, allow_none=allow_none, max_epsilon=max_epsilon, max_delta=max_delta, signed_by=signed_by)
    console.print_json({"ok": result.ok, **vars(result)}) if as_json else console.print_verification(result)
    if not result.ok:
        raise typer.Exit(1)


key_app = typer.Typer(help="Create keys that sign certificates.", no_args_is_help=True)


@key_app.command("new", epilog="Example: sfumato key new hospital.key ; then publish hospital.key.pub")
def key_new(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="File for the private key. The public key is written to FILE.pub.")
    ],
    as_json: Json = False,
) -> None:
    """Create an Ed25519 key pair to sign certificates."""
    from sfumato import console
    from sfumato.certificate import signing

    public = signing.new_key(target)
    if as_json:
        return console.print_json({"private": str(target), "public": f"{target}.pub", "key": f"ed25519:{public}"})
    name = escape(str(target))
    console.out.print(f"private key: {name} (keep it secret)\npublic key: {name}.pub (publish it)", soft_wrap=True)
    console.out.print(f"  ed25519:{public}", soft_wrap=True)


budget_app = typer.Typer(help="Manage the privacy budget of a data set over many runs.", no_args_is_help=True)
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
    from sfumato.certificate.dataset_budget import DatasetBudget
    from sfumato.console import print_budget
    from sfumato.privacy.budget import Adjacency, Unit

    account = DatasetBudget.open(path, epsilon, delta, cast(Adjacency, adjacency), cast(Unit, unit), note)
    print_budget(account, as_json=as_json)


@budget_app.command("show", epilog="Example: sfumato budget show hospital.budget")
def budget_show(path: BudgetPath, as_json: Json = False) -> None:
    """List the runs that are charged to a budget, and what is left."""
    from sfumato.certificate.dataset_budget import DatasetBudget
    from sfumato.console import print_budget

    print_budget(DatasetBudget(path), as_json=as_json)
