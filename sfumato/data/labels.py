"""Labels in any usual form to indices of declared classes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import UNLABELLED, DataError

# Beyond this a "label" is more likely an identifier, and naming every number up to it would make no sense.
MOST_CLASSES = 100_000
MOST_SUGGESTED = 30
SOFT_LABELS = "soft_labels"  # the array or column that holds them

Classes = Sequence[str] | int


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct names in the order of their labels: numerical if all are numbers, else by code point."""
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def class_names(classes: Classes) -> tuple[str, ...]:
    """Turn a declaration into names: a whole number n stands for "0" to "n-1"."""
    if isinstance(classes, int) and not isinstance(classes, bool) and 1 <= classes <= MOST_CLASSES:
        return tuple(str(number) for number in range(classes))
    if isinstance(classes, bool | int | str) or not isinstance(classes, Iterable):
        raise DataError(f"classes={classes!r}: expected a list of names, or their number (1 to {MOST_CLASSES})")
    names = tuple(classes)
    check_classes(names)
    return names


def check_classes(classes: Sequence[str]) -> None:
    """Refuse names that are not text, or not distinct."""
    for name in classes:
        if not isinstance(name, str):
            raise DataError(f"class names must be strings, not {name!r}")
        if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"class name {name!a} is not valid text (UTF-8 without NUL); rename the class")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise DataError(f"class name {twice!r} appears twice; class names must differ")


def encode_labels(
    labels: Any, classes: Sequence[str] | None, source: str = "this array of labels"
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Turn labels into int64 indices of `classes`: whole numbers and booleans are indices, strings are names.

    Without classes the labels would decide them, a single one too: an error that names the likely declaration.
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"labels have shape {list(values.shape)}; expected one label per image, [N] or [N,1]")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str) if len(values) else values
    if values.dtype.kind in "US":
        names = [text(value) for value in values]
        return _encode_names(names, _declared(classes, in_order(names), source))
    _check_numbers(values)
    most = int(values.max()) if len(values) else -1
    if classes is None and most >= MOST_CLASSES:
        raise DataError(f"label {most} looks like an identifier, not a class; number the classes from 0")
    known = _declared(classes, range(most + 1), source)
    if most >= len(known):
        raise DataError(f"label {most} has no class name: only {len(known)} classes are named")
    return torch.from_numpy(values.astype(np.int64)), known


def encode_soft_labels(values: Any) -> torch.Tensor:
    """Turn probabilities in any usual form into float32; `ImageSet` checks them."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        return torch.from_numpy(array.astype(np.float32))
    except (ValueError, TypeError) as error:
        raise DataError("soft labels are not numbers, as many for each image; expected [N, classes]") from error


def text(value: str | bytes) -> str:
    """A name as text; numpy keeps some as bytes."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise DataError(f"{value!r} is not UTF-8 text") from error


def _declared(classes: Sequence[str] | None, found: Sequence[str] | range, source: str) -> tuple[str, ...]:
    """The declared classes; without them, an error that suggests those found."""
    if classes is not None:
        return tuple(classes)
    what = f"{source} does not declare its classes, and a single image must not decide them"
    if len(found) < 2:
        raise DataError(f"{what}; pass classes= (--classes) with all of them, or {UNLABELLED}")
    if isinstance(found, range) or found == tuple(str(number) for number in range(len(found))):
        raise DataError(f"{what}; pass classes={len(found)} (--classes {len(found)})")
    if len(found) > MOST_SUGGESTED:
        raise DataError(f"{what}; pass classes=[{found[0]!r}, …] (--classes {shlex.quote(found[0])},…)")
    raise DataError(f"{what}; pass classes={list(found)} (--classes {shlex.quote(','.join(found))})")


def _encode_names(names: list[str], known: tuple[str, ...]) -> tuple[torch.Tensor, tuple[str, ...]]:
    index = {name: position for position, name in enumerate(known)}
    unknown = next((name for name in names if name not in index), None)
    if unknown is not None:
        raise DataError(f"label {unknown!r} is not among the {len(known)} class names")
    return torch.tensor([index[name] for name in names], dtype=torch.int64), known


def _check_numbers(values: np.ndarray[Any, Any]) -> None:
    if values.dtype.kind not in "uifb":
        raise DataError(f"labels are an array of {values.dtype}; expected whole numbers or strings")
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.round(values)).all()):
        raise DataError("labels contain fractions or NaN; expected whole numbers or strings")
    if len(values) and values.min() < 0:
        low = int(values.min())
        raise DataError(f"label {low} is negative; labels count from 0 (drop the images that have no label)")
