"""Checkpoints of a fit: the states of its loops on disk, so that a killed run loses at most one interval of work.

A state is made of noised results and public numbers alone. It is written before the vault forgets the results that went
into it, so at every instant state and kept results together hold all that was handed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataError
from sfumato.engine import GradientVault
from sfumato.engine.kept_results import LOG
from sfumato.engine.state import StatePart, entries_below, flat, read_tensors, restore, state_of, write_tensors
from sfumato.privacy.ledger import LedgerError
from sfumato.progress import bar

FILE = "checkpoint.safetensors"
INTERVALS = 20  # of a loop


@dataclass
class Stopwatch:
    """Runs the first steps of each loop only, and extrapolates the time of the whole; see `methods/timing.py`."""

    steps: int = 3
    measured: float = 0.0
    expected: float = 0.0

    def time(self, name: str, total: int) -> Iterator[int]:  # noqa: ARG002
        """Yield the first steps of a loop; the first one warms up and does not count."""
        before = time.perf_counter()
        first = later = 0.0
        for step in range(min(total, self.steps)):
            yield step
            now = time.perf_counter()
            first, later = (now - before, later) if step == 0 else (first, later + now - before)
            before = now
        counted = min(total, self.steps) - 1
        self.measured += first + later
        self.expected += first + (later / counted if counted else first) * (total - 1)


stopwatch: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


class Checkpoints:
    """States of the loops of one fit; in memory only where `folder` is None."""

    def __init__(self, folder: Path | None, vault: GradientVault) -> None:
        self._path = None if folder is None else folder / FILE
        self._vault, self._run = vault, "" if folder is None else vault.ledger.entries[0]["run"]
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}  # of each loop
        self._notes: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            held, note = read_tensors(self._path)
            self._notes = note["loops"]
            self._tensors = {loop: entries_below(held, loop) for loop in self._notes}
            asked = [item for note in self._notes.values() for item in note["asked"].items()]
            foreign = note["run"] != self._run
            if foreign or any(count > vault.ledger.charged(name) for name, count in asked):
                raise LedgerError(f"{self._path} belongs to another run; use a new folder")

    def loop(self, name: str, total: int, **parts: StatePart) -> Iterator[int]:
        """Yield the steps of a loop with a progress bar; of a resumed one, those that are left.

        `parts` is all that a step changes. They are restored in place before the first step, and written to disk after
        each twentieth of the steps.
        """
        watch = stopwatch.get()
        if watch is not None:
            yield from watch.time(name, total)
            return
        start, interval = self._restore(name, parts), max(1, total // INTERVALS)
        with bar(name) as advance:
            for step in range(start, total):
                yield step
                advance(step + 1, total)
                if (step + 1) % interval == 0 or step + 1 == total:
                    self._save(name, step + 1, parts)

    def once(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the tensors that `make` gives; or gave before an interruption, and then on the CPU."""
        made = self.saved(name)
        if made is None:
            made = make()
            self.keep(name, made)
        return made

    def saved(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors that were kept under a name before an interruption, on the CPU; None if there are none."""
        if name not in self._notes:
            return None
        self._vault.skip(self._notes[name]["asked"])
        return self._tensors[name]

    def _restore(self, name: str, parts: Mapping[str, StatePart]) -> int:
        if name not in self._notes:
            return 0
        for key, part in parts.items():
            restore(part, entries_below(self._tensors[name], key))
        self._vault.skip(self._notes[name]["asked"])
        return int(self._notes[name]["step"])

    def _save(self, name: str, step: int, parts: Mapping[str, StatePart]) -> None:
        if self._path is not None:
            self._keep(name, step, flat({key: state_of(part) for key, part in parts.items()}))

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors to disk, for `saved` after an interruption."""
        self._keep(name, 1, tensors)

    def _keep(self, name: str, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._path is None:
            return
        self._tensors[name] = {key: value.detach().cpu().clone() for key, value in tensors.items()}
        self._notes[name] = {"step": step, "asked": self._vault.asked}
        content = {f"{loop}/{rest}": value for loop, held in self._tensors.items() for rest, value in held.items()}
        write_tensors(self._path, content, {"run": self._run, "loops": self._notes})
        self._vault.forget()


def remove_checkpoint(folder: Path) -> None:
    """Remove what served to resume a run: it is finished."""
    for name in (FILE, LOG):
        (folder / name).unlink(missing_ok=True)
        (folder / name).with_suffix(".partial").unlink(missing_ok=True)  # of a process that was killed


def started(folder: Path) -> bool:
    """Return whether a run has written anything to its ledger there."""
    ledger = folder / "ledger.jsonl"
    return ledger.exists() and ledger.stat().st_size > 0


def check_run_folder(folder: Path, resume: bool) -> None:
    """Raise `DataError` for a folder that holds a saved model, or a run that is not to be resumed or is finished."""
    finished = (folder / "certificate.json").exists()
    if not started(folder):
        if finished:
            raise DataError(f"{folder} holds a saved model; choose another folder")
        return
    if not resume:
        raise DataError(
            f"{folder} holds a run already; continue it with resume=True (--resume) or choose another folder"
        )
    if finished:
        remove_checkpoint(folder)
        raise DataError(f"{folder} holds a finished run; load its model, or choose another folder")


def check_public_files(vault: GradientVault, facts: Mapping[str, Any]) -> None:
    """Raise `DataError` if a public file in use is not the one that the ledger names."""
    stated = (vault.ledger.opening or {}).get("public_facts", {})
    if changed := [name for name, fact in facts.items() if stated.get(name) != fact]:
        raise DataError(f"the file of the {changed[0]} has changed since the run began; put it back, or start again")
