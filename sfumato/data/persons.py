"""Whose images they are: the person of each image, from a column, a folder or a pattern of paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import DataError
from .labels import text

FOLDER, LEVEL, REGEX = "folder", "folder:", "regex:"


def reads_paths(person: str | None) -> bool:
    """Whether the person is read from the paths of files, not from a column, an array or a key."""
    return person is not None and (person == FOLDER or person.startswith((LEVEL, REGEX)))


def refuse_persons(person: str | None, source: str) -> None:
    """Raise where a source cannot tell whose images it holds."""
    if person is not None:
        where = "a folder of files, labels.csv, .npz, Parquet or WebDataset"
        raise DataError(f"person={person!r} (--person): {source} does not tell whose images it holds; use {where}")


def persons_of_paths(paths: Sequence[str], person: str, *, classes: bool) -> list[str]:
    """Read the person of each file from its path below the source folder; the name is the identity.

    So folders of one name are one person, under different classes too. `classes`: level 1 is the class.
    """
    if not reads_paths(person):
        ways = f"person='{FOLDER}', '{LEVEL}K' or '{REGEX}PATTERN'"
        raise DataError(f"person={person!r} (--person) names a column, and this folder has no labels.csv; pass {ways}")
    if person.startswith(REGEX):
        return _each(paths, _pattern(person))
    return _each(paths, _level(person, classes))


def encode_persons(values: Any) -> torch.Tensor:
    """Turn whole numbers or names, one for each image, into int64 indices 0..P-1."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"persons have shape {list(array.shape)}; expected one person per image, [N]")
    if array.dtype.kind not in "uiUS" and not all(isinstance(value, str) for value in array):
        raise DataError(f"persons are an array of {array.dtype}; expected whole numbers or strings")
    if array.dtype.kind not in "ui":
        array = np.array([text(value) for value in array], dtype=np.str_)
        if "" in array:
            raise DataError("an image has no person (an empty name); name the person of every image")
    return torch.from_numpy(np.unique(array, return_inverse=True)[1].astype(np.int64))


def person_name(value: Any, place: str) -> str:
    """Turn a cell or a JSON value into a name; `place` is what an error calls it."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{place} has no person: expected a name or a whole number")
    return str(value)


def _each(paths: Sequence[str], find: Callable[[str], str | None]) -> list[str]:
    found = []
    for path in paths:
        person = find(path)
        if not person:
            raise DataError(f"{path} has no person: its path does not have what person= (--person) asks for")
        found.append(person)
    return found


def _pattern(person: str) -> Callable[[str], str | None]:
    try:
        pattern = re.compile(person.removeprefix(REGEX))
    except re.error as error:
        raise DataError(f"person={person!r} (--person) is not a regular expression: {error}") from error
    if pattern.groups != 1:
        raise DataError(f"person={person!r} (--person) needs exactly one group in (), which is the person")

    def find(path: str) -> str | None:
        match = pattern.search(path)
        return None if match is None else match[1]

    return find


def _level(person: str, classes: bool) -> Callable[[str], str | None]:
    number = person.removeprefix(LEVEL)
    if person != FOLDER and not (number.isascii() and number.isdigit() and int(number) >= 1):
        raise DataError(f"person={person!r} (--person): the level of a folder is a whole number from 1")

    def find(path: str) -> str | None:
        folders = path.split("/")[:-1]
        level = len(folders) if person == FOLDER else int(number)
        if classes and level == 1:
            what = f"person={person!r} (--person) makes the class of {path} a person"
            raise DataError(f"{what}; put a folder of each person below the class, or pass labels=False (--unlabelled)")
        return folders[level - 1] if 0 < level <= len(folders) else None

    return find
