"""Progress bars on the standard error stream. They are hidden if it is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]


@contextmanager
def bar(description: str) -> Iterator[Advance]:
    """Show a progress bar and yield a function of (done, total) that updates it."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def track(total: int, description: str) -> Iterator[int]:
    """Iterate over `range(total)` with a progress bar."""
    with bar(description) as advance:
        for step in range(total):
            yield step
            advance(step + 1, total)
