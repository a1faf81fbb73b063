"""Read the person that each image belongs to, from a column, a folder name or a pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sfumato.data.errors import DataError
from sfumato.data.labels import to_text

OPTIONS = {"person": "person= (--person)", "label": "label_column= (--label-column)"}  # for error messages
FOLDER, LEVEL, REGEX, FILE, DICOM = "folder", "folder:", "regex:", "file", "dicom:"


def reads_paths(person: str | None) -> bool:
    """Return whether the person is read from files or their paths, and not from a column, array or key."""
    return person is not None and (person in (FOLDER, FILE) or person.startswith((LEVEL, REGEX, DICOM)))


def refuse_persons(person: str | None, source: str) -> None:
    """Raise `DataError` if a person rule is given for a source that does not store persons."""
    if person is not None:
        where = "a folder of files, labels.csv, .npz, Parquet or WebDataset"
        raise DataError(f"person={person!r} (--person): {source} does not store persons; use {where}")


def persons_of_paths(paths: Sequence[str], person: str, *, classes: bool, what: str = "person") -> list[str]:
    """Read the person (or another `what`, by the same rules) of each file from its path below the source folder.

    Equal names are the same person, also in different class folders. `classes`: level 1 is the class folder.
    """
    if not reads_paths(person):
        ways = f"person='{FOLDER}', '{LEVEL}K', '{FILE}', '{REGEX}PATTERN' or '{DICOM}PatientID'"
        raise DataError(f"person={person!r} (--person) names a column, and this folder has no labels.csv; pass {ways}")
    if person == FILE:
        return list(paths)
    if person.startswith(REGEX):
        return _apply_rule(paths, _regex_rule(person, what), what)
    return _apply_rule(paths, _folder_rule(person, classes, what), what)


def encode_persons(values: Any) -> torch.Tensor:
    """Convert integers or names, one for each image, to int64 indices 0..P-1."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"persons have shape {list(array.shape)}; expected one person for each image, [N]")
    if array.dtype.kind not in "uiUS" and not all(isinstance(value, str) for value in array):
        raise DataError(f"persons are an array of {array.dtype}; expected integers or strings")
    if array.dtype.kind not in "ui":
        array = np.array([to_text(value) for value in array], dtype=np.str_)
        if "" in array:
            raise DataError("an image has no person (an empty name); every image needs one")
    return torch.from_numpy(np.unique(array, return_inverse=True)[1].astype(np.int64))


def person_name(value: Any, place: str) -> str:
    """Convert a cell or a JSON value to a name. `place` describes its position in error messages."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{place} has no person: expected a name or an integer")
    return str(value)


def _apply_rule(paths: Sequence[str], find: Callable[[str], str | None], what: str) -> list[str]:
    found = []
    for path in paths:
        value = find(path)
        if not value:
            raise DataError(f"{path} has no {what}: its path does not match {OPTIONS[what]}")
        found.append(value)
    return found


def _regex_rule(person: str, what: str) -> Callable[[str], str | None]:
    try:
        pattern = re.compile(person.removeprefix(REGEX))
    except re.error as error:
        raise DataError(f"{person!r} for {OPTIONS[what]} is not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise DataError(f"{person!r} for {OPTIONS[what]} needs exactly one group, which captures the {what}")

    def find(path: str) -> str | None:
        match = pattern.search(path)
        return None if match is None else match[1]

    return find


def _folder_rule(person: str, classes: bool, what: str) -> Callable[[str], str | None]:
    number = person.removeprefix(LEVEL)
    if person != FOLDER and not (number.isascii() and number.isdigit() and int(number) >= 1):
        raise DataError(f"{person!r} for {OPTIONS[what]}: the folder level must be an integer from 1")

    def find(path: str) -> str | None:
        folders = path.split("/")[:-1]
        level = len(folders) if person == FOLDER else int(number)
        if classes and level == 1:
            what = f"person={person!r} (--person) takes the class folder of {path} as a person"
            raise DataError(f"{what}; put person folders below the class folders, or pass labels=False (--unlabelled)")
        return folders[level - 1] if 0 < level <= len(folders) else None

    return find
