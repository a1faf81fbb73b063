"""The command `sfumato report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from sfumato.cli_options import Json, read_like


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that synth wrote; several are compared.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="Write the page to this file.")] = Path("report.html"),
    test: Annotated[
        str | None, typer.Option(help="Show some of these real images, too. This declares them public.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML report of one run, or compare several: images, the guarantee in plain words, quality."""
    if target.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--out must end in .html, got {target}")
    from sfumato import console
    from sfumato.data import DataError
    from sfumato.report import read_run, write_report

    inside = next((run for run in runs if run.resolve() in target.resolve().parents), None)
    if inside is not None:
        raise DataError(f"{target} lies in {inside}, whose certificate would not cover it; choose another place")
    found = [read_run(run) for run in runs]
    if test is not None:
        if (first := found[0].images) is None:
            raise DataError(f"{runs[0]} has no images.npz to compare the test images with")
        shown = read_like(test, first, "test")
        found = [read_run(run, shown) for run in runs]
    write_report(found, target, overwrite=overwrite)
    failed = [str(run.name) for run in found if run.verification is not None and not run.verification.ok]
    if failed:
        console.print_warnings([f"the certificate does not hold: {', '.join(failed)}; see the report"])
    if as_json:
        return console.print_json({"out": str(target), "runs": [run.name for run in found], "failed": failed})
    console.out.print(f"report: {escape(str(target))}", soft_wrap=True)
