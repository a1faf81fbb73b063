"""Run the programs of other authors: foreign modules, their arguments, and a clock that listens inside them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from benchmarks.timing import wait


class Clock:
    """Notes the time at each call, `stride` steps apart; the first `warm_up` calls do not count."""

    def __init__(self, device: str, warm_up: int, stride: int = 1) -> None:
        self._device, self._warm_up, self._stride, self._times = device, warm_up, stride, list[float]()

    def tick(self, *_: Any) -> str:
        wait(self._device)
        self._times.append(time.perf_counter())
        return ""

    def per_second(self) -> float:
        kept = self._times[self._warm_up :]
        return self._stride * (len(kept) - 1) / (kept[-1] - kept[0])

    def listening(self, loader: Callable[..., Any], each: bool) -> Callable[..., Any]:
        """Return a data loader that ticks, for each batch or once."""

        def batches(data: Any) -> Iterator[Any]:
            if not each:
                self.tick()
            for batch in loader(data):
                if each:
                    self.tick()
                yield batch

        return batches


@contextlib.contextmanager
def program(folder: Path, options: str, **modules: Any) -> Iterator[Path]:
    """Make `folder` importable, in an empty working directory, with these arguments and replaced modules; be silent."""
    here, replaced, before = Path.cwd(), {}, dict(sys.modules)
    for name, content in modules.items():
        replaced[name] = ModuleType(name)
        vars(replaced[name]).update(content)
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        mock.patch.object(sys, "argv", ["program", *options.split()]),
    ):
        os.chdir(scratch)
        sys.modules.update(replaced)
        try:
            yield Path(scratch)
        finally:
            os.chdir(here)
            theirs = [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(folder))]
            for name in {*theirs, *replaced}:
                sys.modules.pop(name)
            sys.modules.update({name: before[name] for name in replaced if name in before})
