"""What commands that fit a model share: advice before, and what Ctrl-C leaves behind."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from sfumato.cli_options import RunOptions

if TYPE_CHECKING:
    from sfumato.data import ImageSet
    from sfumato.methods.base import Synthesizer


def advice(model: Synthesizer, public: Any) -> list[str]:
    from sfumato.advice import warnings_for
    from sfumato.privacy.budget import Budget

    return warnings_for(public, Budget(model.epsilon, model.delta, model.adjacency, public.unit))


def private_advice(model: Synthesizer, images: ImageSet) -> list[str]:
    """Return warnings that depend on the private number of images, for the owner's eyes on the terminal."""
    from sfumato.advice import private_warnings_for

    return private_warnings_for(images, model.epsilon, model.delta)


def check_before_fit(model: Synthesizer, images: ImageSet, run: RunOptions) -> None:
    """Print warnings about weak settings, and refuse a run that the budget of the data set does not allow."""
    from sfumato import console
    from sfumato.synthesize import check_budget

    public = model.public_facts(images)
    console.print_warnings([*advice(model, public), *private_advice(model, images)])
    if not run.resume:  # a resumed run is already charged
        check_budget(model, public, run.budget)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """After Ctrl-C, print how to continue the run, and exit with status 130. Remove a folder that stayed empty."""
    from sfumato import console
    from sfumato.methods.parameters import started

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
    finally:
        if not started(folder):
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that never started."""
    if folder.is_dir():
        for name in ("ledger.jsonl", "ledger.lock"):
            if (folder / name).is_file():
                (folder / name).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
