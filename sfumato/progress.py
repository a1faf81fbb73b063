"""A progress bar for people: on the terminal's error stream, absent when nobody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]


@contextmanager
def bar(description: str) -> Iterator[Advance]:
    """Gives a function of (done, total) that moves the bar."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def track(total: int, description: str) -> Iterator[int]:
    """`range(total)` with a bar."""
    with bar(description) as advance:
        for step in range(total):
            yield step
            advance(step + 1, total)
