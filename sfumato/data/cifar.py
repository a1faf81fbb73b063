"""Read CIFAR-10 and CIFAR-100 batches in the Python (pickle) and binary distributions."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.errors import DataError, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.labels import encode_labels

FOLDERS = ("cifar-10-batches-py", "cifar-100-python", "cifar-10-batches-bin")
BYTES_PER_IMAGE = 3 * 32 * 32
CIFAR10 = {"train": re.compile(r"data_batch_\d+$"), "test": re.compile(r"test_batch$")}
BINARY = {"train": re.compile(r"data_batch_\d+\.bin$"), "test": re.compile(r"test_batch\.bin$")}


def find_cifar(folder: Path) -> Path | None:
    """Return the folder that holds CIFAR batches: `folder`, or the sub-folder that the archive unpacks to."""
    return next((place for place in (folder, *map(folder.joinpath, FOLDERS)) if _batch_format(place)), None)


def read_cifar(folder: Path, *, labels: bool, split: str, classes: Sequence[str] | None = None) -> ImageSet:
    """Read one split of a folder of batches. `classes` is used if there is no meta file with class names."""
    kind = _batch_format(folder)
    if kind == "binary":
        return _read_binary(folder, labels, split, classes)
    if kind == "cifar-100":
        paths, key, meta, names_key = [folder / split], "fine_labels", folder / "meta", "fine_label_names"
    else:
        paths = _matching_files(folder, CIFAR10[split])
        key, meta, names_key = "labels", folder / "batches.meta", "label_names"
    if not paths or not paths[0].is_file():
        raise DataError(f"{folder} has no batches for split {split!r}")
    batches = [_load_pickle(path) for path in paths]
    images = np.concatenate([_pixels(path, batch) for path, batch in zip(paths, batches, strict=True)])
    if not labels:
        return ImageSet.from_arrays(images)
    for path, batch in zip(paths, batches, strict=True):
        if not isinstance(batch.get(key), list):
            raise DataError(f"{path} holds no list {key!r}")
    names = [_text(name) for name in _load_pickle(meta).get(names_key, [])] if meta.is_file() else []
    values = np.concatenate([np.asarray(batch[key]) for batch in batches])
    return ImageSet.from_arrays(images, *encode_labels(values, names or classes, str(folder)))


def _batch_format(folder: Path) -> str | None:
    if _matching_files(folder, CIFAR10["train"]) or _matching_files(folder, CIFAR10["test"]):
        return "cifar-10"
    if _matching_files(folder, BINARY["train"]) or _matching_files(folder, BINARY["test"]):
        return "binary"
    cifar100 = (folder / "meta").is_file() and ((folder / "train").is_file() or (folder / "test").is_file())
    return "cifar-100" if cifar100 else None


def _matching_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.match(path.name))


def _read_binary(folder: Path, labels: bool, split: str, classes: Sequence[str] | None) -> ImageSet:
    paths = _matching_files(folder, BINARY[split])
    if not paths:
        raise DataError(f"{folder} has no batches for split {split!r}")
    rows = []
    for path in paths:
        try:
            raw = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
        if len(raw) == 0 or len(raw) % (1 + BYTES_PER_IMAGE):
            raise DataError(f"{path} is damaged: {len(raw)} bytes are not a whole number of CIFAR-10 records")
        rows.append(raw.reshape(-1, 1 + BYTES_PER_IMAGE))
    table = np.concatenate(rows)
    images = table[:, 1:].reshape(-1, 3, 32, 32)
    if not labels:
        return ImageSet.from_arrays(images)
    meta = folder / "batches.meta.txt"
    names = meta.read_text("utf-8").split() if meta.is_file() else []
    return ImageSet.from_arrays(images, *encode_labels(table[:, 0], names or classes, str(folder)))


class _ArraysOnly(pickle.Unpickler):
    """Unpickler that builds numpy arrays and plain containers, and refuses to call anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return np.empty(1).__reduce_ex__(5)[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _latin1  # Python 3 writes bytes this way in older protocols.
        raise pickle.UnpicklingError(f"it loads {module}.{name}, which a CIFAR batch does not need")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding!r}; expected latin1")
    return text.encode("latin1")


def _load_pickle(path: Path) -> dict[str, Any]:
    # A damaged pickle can raise almost any exception; these come from pickle instructions and from numpy.
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
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != BYTES_PER_IMAGE:
        raise DataError(f"{path} is not a CIFAR batch: it has no uint8 array 'data' with rows of {BYTES_PER_IMAGE}")
    return data.reshape(-1, 3, 32, 32)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
