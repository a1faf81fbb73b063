"""Convert labels to indices of declared classes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from sfumato.data.errors import UNLABELLED_HINT, DataError

# A larger label is probably an identifier, not a class.
MAX_CLASSES = 100_000
MAX_SUGGESTED = 30
SOFT_LABELS = "soft_labels"  # name of the array or column

SEPARATOR = "|"  # of several labels of one image

Classes = Sequence[str] | int
SeveralLabels = Literal["combine", "first"]


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, sorted as numbers if all are numbers, and by code point otherwise."""
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def class_names(classes: Classes) -> tuple[str, ...]:
    """Return class names. An integer n stands for the names "0" to "n-1"."""
    if isinstance(classes, int) and not isinstance(classes, bool) and 1 <= classes <= MAX_CLASSES:
        return tuple(str(number) for number in range(classes))
    if isinstance(classes, bool | int | str) or not isinstance(classes, Iterable):
        raise DataError(f"classes={classes!r}: expected a list of names, or their number (1 to {MAX_CLASSES})")
    names = tuple(classes)
    check_classes(names)
    return names


def check_classes(classes: Sequence[str]) -> None:
    """Raise `DataError` unless the names are distinct, valid text."""
    for name in classes:
        if not isinstance(name, str):
            raise DataError(f"class names must be strings, not {name!r}")
        if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"class name {name!a} is not valid text (UTF-8 without NUL); rename the class")
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if list(classes).count(name) > 1)
        raise DataError(f"class name {twice!r} appears twice; class names must be distinct")


def encode_labels(
    labels: Any, classes: Sequence[str] | None, source: str = "this array of labels"
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Convert labels to int64 indices of `classes`: integers and booleans are indices, strings are names.

    Without `classes`, raise a `DataError` that suggests a declaration. The labels must not define the classes: classes
    are public, and a single image could add one.
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise DataError(f"labels have shape {list(values.shape)}; expected one label per image, [N] or [N,1]")
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(str) if len(values) else values
    if values.dtype.kind in "US":
        names = [to_text(value) for value in values]
        return _encode_names(names, _require_classes(classes, sort_names(names), source))
    _check_numbers(values)
    largest = int(values.max()) if len(values) else -1
    if classes is None and largest >= MAX_CLASSES:
        raise DataError(f"label {largest} looks like an identifier, not a class; number the classes starting at 0")
    known = _require_classes(classes, range(largest + 1), source)
    if largest >= len(known):
        raise DataError(f"label {largest} has no class name: only {len(known)} classes are named")
    return torch.from_numpy(values.astype(np.int64)), known


def one_label_each(
    values: Sequence[Any], classes: Sequence[str] | None, several: SeveralLabels, source: str
) -> list[Any]:
    """Return one label for each image. Several labels of an image are a list, or a text with `|` between them.

    "combine": each combination is a class, `a|b`. "first": an image belongs to the first of the declared classes that
    it has a label of. Either way an image is one record of one class.
    """
    if not any(isinstance(value, list | tuple) or (isinstance(value, str) and SEPARATOR in value) for value in values):
        return list(values)
    parts = [_parts(value, source) for value in values]
    if several == "combine":
        return [SEPARATOR.join(sorted(each)) for each in parts]
    known = _require_classes(classes, sort_names(name for each in parts for name in each), source)
    found = [next((name for name in known if name in each), None) for each in parts]
    if None in found:
        unknown = SEPARATOR.join(sorted(parts[found.index(None)]))
        raise DataError(f"{source}: an image has the labels {unknown!r}, and none of them is a declared class; add one")
    return found


def split_columns(text: str) -> list[str]:
    """Return the names of columns that are separated by commas."""
    return [name for part in text.split(",") if (name := part.strip())]


def column_labels(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    classes: Sequence[str] | None,
    several: SeveralLabels,
    source: str,
) -> list[Any]:
    """Return one label for each row of cells. Several columns make a combination, `sex=f|hair=grey`."""
    if len(columns) == 1:
        return one_label_each([row[0] for row in rows], classes, several, source)
    if several == "first":
        raise DataError(f"{source}: several='first' (--several first) takes one column, not {', '.join(columns)}")
    return [SEPARATOR.join(f"{name}={cell}" for name, cell in zip(columns, row, strict=True)) for row in rows]


def encode_columns(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
    several: SeveralLabels,
    source: str,
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Encode the labels of rows of cells. `names`: the names that the source has for the indices in its cells."""
    known = names or classes
    if names is not None and any(isinstance(row[0], list | tuple) for row in rows):
        rows = [[[names[index] for index in row[0]]] for row in rows]
        known = classes or (names if several == "first" else None)  # combinations of names have to be declared
    return encode_labels(column_labels(columns, rows, known, several, source), known, source)


def _parts(value: Any, source: str) -> set[str]:
    """Return the labels of one image as distinct names."""
    texts = value.split(SEPARATOR) if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    names = {str(text).strip() for text in texts} - {""}
    if not names:
        raise DataError(f"{source}: an image has no label; {UNLABELLED_HINT}")
    return names


def encode_soft_labels(values: Any) -> torch.Tensor:
    """Convert probabilities to float32. `ImageSet` validates them."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        return torch.from_numpy(array.astype(np.float32))
    except (ValueError, TypeError) as error:
        raise DataError("soft labels are not a numeric array of shape [N, classes]") from error


def to_text(value: str | bytes) -> str:
    """Convert a name to text; numpy stores some names as bytes."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise DataError(f"{value!r} is not UTF-8 text") from error


def _require_classes(classes: Sequence[str] | None, found: Sequence[str] | range, source: str) -> tuple[str, ...]:
    """Return the declared classes, or raise an error that suggests the classes that were found."""
    if classes is not None:
        return tuple(classes)
    what = f"{source} does not declare its classes, and labels must not define them"
    if len(found) < 2:
        raise DataError(f"{what}; pass classes= (--classes) with all of them, or {UNLABELLED_HINT}")
    if isinstance(found, range) or found == tuple(str(number) for number in range(len(found))):
        raise DataError(f"{what}; pass classes={len(found)} (--classes {len(found)})")
    if len(found) > MAX_SUGGESTED:
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
        raise DataError(f"labels are an array of {values.dtype}; expected integers or strings")
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.round(values)).all()):
        raise DataError("labels contain fractions or NaN; expected integers or strings")
    if len(values) and values.min() < 0:
        low = int(values.min())
        raise DataError(f"label {low} is negative; labels start at 0 (remove images without a label)")
