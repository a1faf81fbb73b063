"""Checkpoints of a fit: the states of its loops on disk, so that a killed run loses at most one interval of work.

A state is made of noised results and public numbers alone. It is written before the vault forgets the results that went
into it, so that at every instant state and kept results together hold all that was handed out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sfumato.engine import GradientVault
from sfumato.engine.kept_results import LOG
from sfumato.privacy.ledger import LedgerError, flush_folder
from sfumato.progress import bar

FILE = "checkpoint.safetensors"
INTERVALS = 20  # of a loop


class Composed(Protocol):
    """An object that lists the parts of its state."""

    def state_parts(self) -> Mapping[str, Any]: ...


StatePart = nn.Module | torch.optim.Optimizer | torch.Generator | torch.Tensor | Sequence[torch.Tensor] | Composed


class Checkpoints:
    """States of the loops of one fit; in memory only where `folder` is None."""

    def __init__(self, folder: Path | None, vault: GradientVault) -> None:
        self._path = None if folder is None else folder / FILE
        self._vault = vault
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}  # of each loop
        self._notes: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            with safe_open(self._path, "pt") as file:
                self._notes = json.loads(file.metadata()["loops"])
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._tensors = {loop: _below(held, loop) for loop in self._notes}
            asked = [item for note in self._notes.values() for item in note["asked"].items()]
            if any(count > vault.ledger.charged(name) for name, count in asked):
                raise LedgerError(f"{self._path} belongs to another run; use a new folder")

    def loop(self, name: str, total: int, **parts: StatePart) -> Iterator[int]:
        """Yield the steps of a loop with a progress bar; of a resumed one, those that are left.

        `parts` is all that a step changes. They are restored in place before the first step, and written to disk after
        each twentieth of the steps.
        """
        start, interval = self._restore(name, parts), max(1, total // INTERVALS)
        with bar(name) as advance:
            for step in range(start, total):
                yield step
                advance(step + 1, total)
                if (step + 1) % interval == 0 or step + 1 == total:
                    self._save(name, step + 1, parts)

    def once(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the tensors that `make` gives; or gave before an interruption, and then on the CPU."""
        if name in self._notes:
            self._vault.skip(self._notes[name]["asked"])
            return self._tensors[name]
        made = make()
        self._keep(name, 1, made)
        return made

    def _restore(self, name: str, parts: Mapping[str, StatePart]) -> int:
        if name not in self._notes:
            return 0
        for key, part in parts.items():
            _load(part, _below(self._tensors[name], key))
        self._vault.skip(self._notes[name]["asked"])
        return int(self._notes[name]["step"])

    def _save(self, name: str, step: int, parts: Mapping[str, StatePart]) -> None:
        if self._path is not None:
            self._keep(name, step, _flat({key: _state(part) for key, part in parts.items()}))

    def _keep(self, name: str, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._path is None:
            return
        self._tensors[name] = {key: value.detach().cpu().clone() for key, value in tensors.items()}
        self._notes[name] = {"step": step, "asked": self._vault.asked}
        content = {f"{loop}/{rest}": value for loop, held in self._tensors.items() for rest, value in held.items()}
        partial = self._path.with_suffix(".partial")
        save_file(
            {key: value.contiguous() for key, value in content.items()}, partial, {"loops": json.dumps(self._notes)}
        )
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.replace(partial, self._path)
        flush_folder(self._path.parent)
        self._vault.forget()


def remove_checkpoint(folder: Path) -> None:
    """Remove what served to resume a run: it is finished."""
    for name in (FILE, LOG):
        (folder / name).unlink(missing_ok=True)


def _state(part: Any) -> dict[str, torch.Tensor]:
    """Return a part's state as tensors by name."""
    if isinstance(part, nn.Module):
        return dict(part.state_dict())
    if isinstance(part, torch.optim.Optimizer):
        return _flat(part.state_dict()["state"])
    if isinstance(part, torch.Generator):
        return {"state": part.get_state()}
    if isinstance(part, torch.Tensor):
        return {"value": part}
    return _flat({name: _state(each) for name, each in _inside(part).items()})


def _load(part: Any, state: dict[str, torch.Tensor]) -> None:
    """Restore a part in place."""
    if isinstance(part, nn.Module):
        part.load_state_dict(state)
    elif isinstance(part, torch.optim.Optimizer):
        own = {int(number): _below(state, number) for number in {name.partition("/")[0] for name in state}}
        part.load_state_dict({**part.state_dict(), "state": own})
    elif isinstance(part, torch.Generator):
        part.set_state(state["state"])
    elif isinstance(part, torch.Tensor):
        with torch.no_grad():
            part.copy_(state["value"])
    else:
        for name, each in _inside(part).items():
            _load(each, _below(state, name))


def _inside(part: Any) -> dict[str, Any]:
    """Return the parts of a sequence, or of an object that lists them itself."""
    if isinstance(part, Sequence):
        return {str(number): each for number, each in enumerate(part)}
    return dict(part.state_parts())


def _flat(nested: Mapping[Any, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": torch.as_tensor(value) for name, own in nested.items() for key, value in own.items()}


def _below(state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
