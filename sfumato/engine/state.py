"""States of networks, optimizers and random generators as tensors by name, to write checkpoints and to restore them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from sfumato.privacy.ledger import flush_folder


class Composed(Protocol):
    """An object that lists the parts of its state."""

    def state_parts(self) -> Mapping[str, Any]: ...


StatePart = nn.Module | torch.optim.Optimizer | torch.Generator | torch.Tensor | Sequence[torch.Tensor] | Composed


def state_of(part: Any) -> dict[str, torch.Tensor]:
    """Return a part's state as tensors by name."""
    if isinstance(part, nn.Module):
        return dict(part.state_dict())
    if isinstance(part, torch.optim.Optimizer):
        return flat(part.state_dict()["state"])
    if isinstance(part, torch.Generator):
        return {"state": part.get_state()}
    if isinstance(part, torch.Tensor):
        return {"value": part}
    return flat({name: state_of(each) for name, each in _inside(part).items()})


def restore(part: Any, state: dict[str, torch.Tensor]) -> None:
    """Restore a part in place."""
    if isinstance(part, nn.Module):
        part.load_state_dict(state)
    elif isinstance(part, torch.optim.Optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        own = {int(number): entries_below(state, number) for number in {name.partition("/")[0] for name in state}}
        for number, values in own.items():
            own[number] = {key: _laid_out(value, parameters[number]) for key, value in values.items()}
        part.load_state_dict({**part.state_dict(), "state": own})
    elif isinstance(part, torch.Generator):
        part.set_state(state["state"])
    elif isinstance(part, torch.Tensor):
        with torch.no_grad():
            part.copy_(state["value"])
    else:
        for name, each in _inside(part).items():
            restore(each, entries_below(state, name))


def _laid_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return an optimizer's value in the memory layout of its parameter: fused optimizers go through memory in order.

    A file holds all tensors contiguous, whereas parameters may be channels-last.
    """
    return torch.empty_like(parameter).copy_(value) if value.shape == parameter.shape else value


def _inside(part: Any) -> dict[str, Any]:
    """Return the parts of a sequence, or of an object that lists them itself."""
    if isinstance(part, Sequence):
        return {str(number): each for number, each in enumerate(part)}
    return dict(part.state_parts())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], note: Any) -> None:
    """Write tensors and a note (JSON) to a file: after a crash, the whole new content or the whole old one is there."""
    partial = path.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"note": json.dumps(note)})
    descriptor = os.open(partial, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(partial, path)
    flush_folder(path.parent)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors and the note that `write_tensors` wrote."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["note"])  # noqa: SIM118


def flat(nested: Mapping[Any, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": torch.as_tensor(value) for name, own in nested.items() for key, value in own.items()}


def entries_below(state: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}/"): value for key, value in state.items() if key.startswith(f"{name}/")}
