"""Labels in any usual form to indices and class names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import DataError

# Beyond this a "label" is more likely an identifier, and naming every number up to it would make no sense.
MOST_CLASSES = 100_000
SOFT_LABELS = "soft_labels"  # the array or column that holds them


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in the order of their labels: numerical if all are numbers, else by code point."""
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def encode_labels(labels: Any, classes: Sequence[str] | None = None) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Turn labels into int64 indices and class names.

    Whole numbers and booleans are indices already (class names default to "0", "1", …); strings are
    names, in the order of `classes` if given.
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"labels have shape {list(values.shape)}; expected one label per image, [N] or [N,1]")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str) if len(values) else values
    if values.dtype.kind == "U":
        return _encode_names([str(value) for value in values], classes)
    if values.dtype.kind == "S":
        return _encode_names([_decoded(value) for value in values], classes)
    return _encode_numbers(values, classes)


def encode_soft_labels(values: Any) -> torch.Tensor:
    """Turn probabilities in any usual form into float32; `ImageSet` checks them."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        return torch.from_numpy(array.astype(np.float32))
    except (ValueError, TypeError) as error:
        raise DataError("soft labels are not numbers, as many for each image; expected [N, classes]") from error


def _encode_names(names: list[str], classes: Sequence[str] | None) -> tuple[torch.Tensor, tuple[str, ...]]:
    known = in_order(names) if classes is None else tuple(str(name) for name in classes)
    index = {name: position for position, name in enumerate(known)}
    unknown = next((name for name in names if name not in index), None)
    if unknown is not None:
        raise DataError(f"label {unknown!r} is not among the {len(known)} class names")
    return torch.tensor([index[name] for name in names], dtype=torch.int64), known


def _encode_numbers(
    values: np.ndarray[Any, Any], classes: Sequence[str] | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    if values.dtype.kind not in "uifb":
        raise DataError(f"labels are an array of {values.dtype}; expected whole numbers or strings")
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.round(values)).all()):
        raise DataError("labels contain fractions or NaN; expected whole numbers or strings")
    if len(values) == 0:
        return torch.empty(0, dtype=torch.int64), tuple(classes or ())
    low, high = int(values.min()), int(values.max())
    if low < 0:
        raise DataError(f"label {low} is negative; labels count from 0 (drop the images that have no label)")
    if classes is None and high >= MOST_CLASSES:
        raise DataError(f"label {high} looks like an identifier, not a class; number the classes from 0")
    names = tuple(str(number) for number in range(high + 1)) if classes is None else tuple(classes)
    return torch.from_numpy(values.astype(np.int64)), names


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"label {value!r} is not UTF-8 text") from error
