"""Parameters of methods as values: the device, checks against defaults, the form in JSON; and labels by proportions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataError
from sfumato.methods.checkpoints import remove_checkpoint


@dataclass(frozen=True)
class Setting:
    """One setting of a method (NAME, or NAME.FIELD), its value, and its source: `given`, `default` or `preset NAME`."""

    name: str
    value: Any
    source: str


def list_settings(model: Any, given: frozenset[str], applied: dict[str, tuple[str, Any]]) -> list[Setting]:
    """Return every setting of a method, with the values of the presets that apply, and where it comes from."""
    found = []
    for each in fields(model):
        source, value = "given" if each.name in given else "default", getattr(model, each.name)
        if each.name in applied:
            preset, value = applied[each.name]
            source = f"preset {preset}"
        if not is_dataclass(value):
            found.append(Setting(each.name, value, source))
            continue
        for part in fields(value):  # NAME.FIELD; a preset is the source of what it changes only
            own = getattr(value, part.name)
            same = own == getattr(each.default, part.name)
            found.append(Setting(f"{each.name}.{part.name}", own, "default" if same else source))
    return found


def chosen_device(name: str) -> torch.device:
    """Return the device of that name; `auto`: a GPU if there is one."""
    if not isinstance(name, str):
        raise ValueError(f"device must be text, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from None


def usable_device(name: str) -> torch.device:
    """Return the device of that name. Raise `ValueError` if this machine does not have it."""
    device = chosen_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: PyTorch finds no GPU here; use auto or cpu, and see: sfumato doctor")
    return device


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant: one that begins like it, or else a similar one."""
    begins = [each for each in known if each.startswith(name)]
    return next(iter([*begins, *difflib.get_close_matches(name, known, 1)]), None)


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


def check_like(name: str, value: Any, default: Any, *, zero: bool = False) -> None:
    """Raise unless a value has its default's type; numbers must be positive (or zero, if allowed), except the seed."""
    if is_dataclass(default):
        if type(value) is not type(default):
            raise ValueError(f"{name} must be a {type(default).__name__}, got {value!r}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if name != "seed" and not (value > 0 or (zero and value == 0)):
            raise ValueError(f"{name} must be {'0 or greater' if zero else 'greater than 0'}, got {value!r}")
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise ValueError(f"{name} must be {len(default)} numbers, got {value!r}")
        for part, like in zip(value, default, strict=True):
            check_like(name, part, like, zero=zero)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")


def allocate(n: int, proportions: torch.Tensor) -> torch.Tensor:
    """Return `n` labels in these proportions, by largest remainders, in class order."""
    shares = proportions.double().clamp_min(0)
    shares = n * shares / shares.sum() if shares.sum() > 0 else torch.full_like(shares, n / len(shares))
    counts = shares.floor().long()
    order = (shares - counts).argsort(descending=True, stable=True)
    counts[order[: n - int(counts.sum())]] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def as_stored(value: Any, kind: type) -> Any:
    """Return a setting as its type: 1 and 1.0 are one setting, so that a ledger made with either can be resumed."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if kind is tuple:
        return [float(part) for part in value]
    return float(value) if kind is float else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content as it will be read back: JSON has lists where Python has tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return plain
