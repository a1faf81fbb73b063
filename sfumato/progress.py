"""Progress of long stages: bars with the time left and the budget spent so far.

Bars are drawn on the standard error stream if it is a terminal. If the environment variable SFUMATO_PROGRESS names a
file, the same is written there as JSON, for programs that watch a run (`sfumato serve`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Advance = Callable[[int, int], None]
FILE_VARIABLE = "SFUMATO_PROGRESS"
FILE_INTERVAL = 0.3  # seconds between two writes of the file


@dataclass
class StageProgress:
    """A stage that is under way: its name, when it started, how far it is. `total` is None if that is unknown."""

    name: str
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    total: int | None = None
    first: int | None = None  # of a resumed loop: where it went on

    @property
    def seconds_left(self) -> float | None:
        """Return a linear estimate of the time left."""
        made = self.done - (self.first or 0)
        if self.total is None or made <= 0:
            return None
        return (time.monotonic() - self.started) / made * (self.total - self.done)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "done": self.done, "total": self.total, "seconds_left": self.seconds_left}


_stages: list[StageProgress] = []  # the innermost is the last
_spending: list[Callable[[], str]] = []  # at most one; see `show_spending`
_spent = ""  # what it said last: the thread that draws must not run the accountant
_drawing: list[Progress] = []  # at most one: all bars share it
_written = 0.0


def show_spending(text: Callable[[], str]) -> None:
    """Show this text beside every bar from now on: the privacy budget that was spent so far."""
    _spending[:] = [text]


def _update_spending() -> None:
    global _spent
    _spent = _spending[0]() if _spending else ""


@contextmanager
def bar(name: str) -> Iterator[Advance]:
    """Show a stage, and yield a function of (done, total) that updates it. Without a call, show the time elapsed."""
    path = os.environ.get(FILE_VARIABLE)
    if not sys.stderr.isatty() and path is None:
        yield lambda *_: None
        return
    stage = StageProgress(name)
    _stages.append(stage)
    _update_spending()
    _write(path, at_once=True)
    try:
        with _drawn(stage) as draw:

            def advance(done: int, total: int) -> None:
                stage.first = done - 1 if stage.first is None else stage.first
                stage.done, stage.total = done, total
                _update_spending()
                draw(done, total)
                _write(path)

            yield advance
    finally:
        _stages.remove(stage)
        _write(path, at_once=not _stages)


def track(total: int, name: str) -> Iterator[int]:
    """Iterate over `range(total)` with a progress bar."""
    with bar(name) as advance:
        for step in range(total):
            yield step
            advance(step + 1, total)


@contextmanager
def _drawn(stage: StageProgress) -> Iterator[Advance]:
    """Draw a stage on the terminal, if there is one. A stage inside another is drawn below it."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    with ExitStack() as stack:
        if not _drawing:
            columns = (TextColumn("{task.description}"), BarColumn(), _Steps(), _Time(), _Spending())
            drawn = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
            stack.callback(_drawing.clear)
            _drawing.append(drawn)
        progress = _drawing[0]
        task = progress.add_task(stage.name, total=None)
        stack.callback(progress.remove_task, task)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Steps(MofNCompleteColumn):
    """How many steps are done; nothing if the number is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _Time(ProgressColumn):
    """The time left; the time elapsed if the number of steps is unknown."""

    def render(self, task: Task) -> Text:
        column = TimeElapsedColumn() if task.total is None else TimeRemainingColumn()
        return column.render(task)


class _Spending(ProgressColumn):
    """The budget that was spent so far."""

    def render(self, task: Task) -> Text:  # noqa: ARG002
        return Text(_spent, style="dim")


def _write(path: str | None, *, at_once: bool = False) -> None:
    """Write the stages to the file, at most every `FILE_INTERVAL` seconds. A disk that is full stops no run."""
    global _written
    now = time.monotonic()
    if path is None or (now - _written < FILE_INTERVAL and not at_once):
        return
    _written = now
    partial = Path(f"{path}.partial")
    with suppress(OSError):
        partial.write_text(json.dumps([stage.to_dict() for stage in _stages]), "utf-8")
        os.replace(partial, path)
