"""CIFAR-10 and CIFAR-100 batches, in the Python (pickle) and the binary distribution."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError, reason
from .imageset import ImageSet
from .labels import encode_labels

FOLDERS = ("cifar-10-batches-py", "cifar-100-python", "cifar-10-batches-bin")
ROW = 3 * 32 * 32
CIFAR10 = {"train": re.compile(r"data_batch_\d+$"), "test": re.compile(r"test_batch$")}
BINARY = {"train": re.compile(r"data_batch_\d+\.bin$"), "test": re.compile(r"test_batch\.bin$")}


def find_cifar(folder: Path) -> Path | None:
    """The folder that holds CIFAR batches: this one, or the one that the archive unpacks to."""
    return next((place for place in (folder, *map(folder.joinpath, FOLDERS)) if _kind(place)), None)


def read_cifar(folder: Path, *, labels: bool, split: str, classes: Sequence[str] | None = None) -> ImageSet:
    """Read one split of a folder of batches; their meta file names the classes, else those given do."""
    kind = _kind(folder)
    if kind == "binary":
        return _read_binary(folder, labels, split, classes)
    if kind == "cifar-100":
        paths, key, meta, names_key = [folder / split], "fine_labels", folder / "meta", "fine_label_names"
    else:
        paths = _matching(folder, CIFAR10[split])
        key, meta, names_key = "labels", folder / "batches.meta", "label_names"
    if not paths or not paths[0].is_file():
        raise DataError(f"{folder} has no batches for split {split!r}")
    batches = [_unpickled(path) for path in paths]
    images = np.concatenate([_pixels(path, batch) for path, batch in zip(paths, batches, strict=True)])
    if not labels:
        return ImageSet.from_arrays(images)
    for path, batch in zip(paths, batches, strict=True):
        if not isinstance(batch.get(key), list):
            raise DataError(f"{path} holds no list {key!r}")
    names = [_text(name) for name in _unpickled(meta).get(names_key, [])] if meta.is_file() else []
    values = np.concatenate([np.asarray(batch[key]) for batch in batches])
    return ImageSet.from_arrays(images, *encode_labels(values, names or classes, str(folder)))


def _kind(folder: Path) -> str | None:
    if _matching(folder, CIFAR10["train"]) or _matching(folder, CIFAR10["test"]):
        return "cifar-10"
    if _matching(folder, BINARY["train"]) or _matching(folder, BINARY["test"]):
        return "binary"
    cifar100 = (folder / "meta").is_file() and ((folder / "train").is_file() or (folder / "test").is_file())
    return "cifar-100" if cifar100 else None


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.match(path.name))


def _read_binary(folder: Path, labels: bool, split: str, classes: Sequence[str] | None) -> ImageSet:
    paths = _matching(folder, BINARY[split])
    if not paths:
        raise DataError(f"{folder} has no batches for split {split!r}")
    rows = []
    for path in paths:
        try:
            raw = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
        if len(raw) == 0 or len(raw) % (1 + ROW):
            raise DataError(f"{path} is damaged: {len(raw)} bytes are not a whole number of CIFAR-10 records")
        rows.append(raw.reshape(-1, 1 + ROW))
    table = np.concatenate(rows)
    images = table[:, 1:].reshape(-1, 3, 32, 32)
    if not labels:
        return ImageSet.from_arrays(images)
    meta = folder / "batches.meta.txt"
    names = meta.read_text("utf-8").split() if meta.is_file() else []
    return ImageSet.from_arrays(images, *encode_labels(table[:, 0], names or classes, str(folder)))


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that can build numpy arrays and plain containers, and call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return np.empty(1).__reduce_ex__(5)[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1  # How Python 3 writes bytes in the older protocols.
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR batches do not need")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _unpickled(path: Path) -> dict[str, Any]:
    # A damaged pickle can raise nearly anything; these are what its instructions and numpy raise.
    damage = (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError)
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except (OSError, OverflowError, MemoryError, *damage) as error:
        raise DataError(f"{path} is not a readable CIFAR batch: {reason(error)}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a CIFAR batch: it holds a {type(content).__name__}, not a dictionary")
    return {_text(key): value for key, value in content.items()}


def _pixels(path: Path, batch: dict[str, Any]) -> np.ndarray[Any, Any]:
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != ROW:
        raise DataError(f"{path} is not a CIFAR batch: it has no uint8 array 'data' with rows of {ROW}")
    return data.reshape(-1, 3, 32, 32)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
