"""Folders of image files: class sub-folders, a flat folder with `labels.csv`, or no labels at all."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from .decode import SKIP, SUFFIXES, Item, Listing, OnError, file_item
from .errors import UNLABELLED, DataError, first_few, reason
from .labels import encode_labels, in_order
from .persons import persons_of_paths, reads_paths

LABELS_FILE = "labels.csv"
# What file managers and archivers leave behind; never anybody's data.
CLUTTER = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
UNSAFE = frozenset('%/\\:*?"<>|')
SPLITS = frozenset({"train", "test", "val", "valid", "validation"})


def list_folder(
    folder: Path,
    *,
    labels: bool,
    split: str,
    on_error: OnError,
    classes: Sequence[str] | None = None,
    person: str | None = None,
) -> Listing:
    """List the images of a folder in whichever of the layouts it has.

    Folders name the classes; for `labels.csv` those given do. person: a column of `labels.csv`, or what to read from
    the paths of files (`persons_of_paths`).
    """
    folder = _split_folder(folder, split)
    by_column = person is not None and not reads_paths(person)
    if (labels or by_column) and (folder / LABELS_FILE).is_file():
        return _list_with_csv(folder, labels, classes, person)
    if not labels:
        return _list_unlabelled(folder, person)
    return _list_classes(folder, on_error, classes, person)


def folder_name(name: str) -> str:
    """A class name as the name of a folder; what file systems could mistake is percent-encoded."""
    if name == "":
        return "%"
    safe = "".join(_escape(c) if c in UNSAFE or not c.isprintable() else c for c in name)
    if safe[0] == "." or safe.lower() in CLUTTER:
        safe = _escape(safe[0]) + safe[1:]
    return safe[:-1] + _escape(safe[-1]) if safe[-1] in ". " else safe


def class_name(folder: str) -> str:
    """The class that a folder stands for: the inverse of `folder_name`, and any other name as it is."""
    if folder == "%":
        return ""
    name = unquote(folder, errors="surrogateescape")
    return name if folder_name(name) == folder else folder


def _escape(letter: str) -> str:
    # `quote` spares the dot and letters, which are safe in addresses but not here.
    return quote(letter, safe="") if quote(letter, safe="") != letter else f"%{ord(letter):02X}"


def _list_classes(folder: Path, on_error: OnError, declared: Sequence[str] | None, person: str | None) -> Listing:
    files, folders = _entries(folder)
    if not files and not folders:
        raise DataError(f"{folder} is empty; expected one sub-folder of images per class")
    if not folders:
        raise DataError(f"{folder} holds files but neither class sub-folders nor {LABELS_FILE}; {UNLABELLED}")
    skipped = _stray(folder, files, on_error)
    if len(folders) == 1 and declared is None:
        how = f"name all classes with classes= (--classes), or {UNLABELLED}"
        raise DataError(f"{folder} holds one class only ({folders[0].name}); {how}")
    classes = in_order(class_name(child.name) for child in folders)
    by_class = {class_name(child.name): child for child in folders}
    seen = {_identity(folder)}
    paths: list[Path] = []
    names: list[str] = []
    for name in classes:
        found = list(_walk(by_class[name], seen))
        paths += found
        names += [name] * len(found)
    if not paths:
        raise DataError(f"{folder} holds no images, only empty folders")
    encoded, classes = encode_labels(names, classes)
    items = _items(folder, paths)
    persons = _persons(items, person, classes=True)
    return Listing(items, len(items), encoded, classes, skipped, persons=persons)


def _items(folder: Path, paths: list[Path]) -> list[Item]:
    return [file_item(path, path.relative_to(folder).as_posix()) for path in paths]


def _persons(items: list[Item], person: str | None, *, classes: bool) -> list[str] | None:
    return None if person is None else persons_of_paths([item.name for item in items], person, classes=classes)


def _stray(folder: Path, files: list[Path], on_error: OnError) -> list[str]:
    """Files beside class folders: an image there has no class, anything else can be skipped."""
    images = [file.name for file in files if file.suffix.lower() in SUFFIXES]
    if images:
        what = f"{folder} holds both class folders and images outside them ({first_few(images)})"
        raise DataError(f"{what}; move these into a class, or {UNLABELLED}")
    names = [file.name for file in files]
    if names and on_error == "raise":
        raise DataError(f"{folder} holds files of no class ({first_few(names)}); remove them, or {SKIP}")
    return names


def _list_unlabelled(folder: Path, person: str | None) -> Listing:
    items = _items(folder, [path for path in _walk(folder, set()) if path != folder / LABELS_FILE])
    if not items:
        raise DataError(f"{folder} holds no images")
    return Listing(items, len(items), persons=_persons(items, person, classes=False))


def _list_with_csv(folder: Path, labels: bool, classes: Sequence[str] | None, person: str | None) -> Listing:
    table = folder / LABELS_FILE
    column = None if person is None or reads_paths(person) else person.strip().lower()
    wanted = [*(["label"] if labels else []), *([column] if column is not None else [])]
    listed = _read_csv(table, wanted)
    present = {path.relative_to(folder).as_posix(): path for path in _walk(folder, set()) if path != table}
    missing = [name for name in listed if name not in present]
    if missing:
        raise DataError(f"{table} lists files that are not there: {first_few(missing)}")
    unlisted = [name for name in present if name not in listed]
    if unlisted:
        raise DataError(f"{table} gives no {wanted[0]} for {first_few(unlisted)}; add the lines, or remove the files")
    items = [file_item(present[name], name) for name in listed]
    persons = [row[column] for row in listed.values()] if column else _persons(items, person, classes=False)
    if not labels:
        return Listing(items, len(items), persons=persons)
    encoded, known = encode_labels([row["label"] for row in listed.values()], classes, str(table))
    return Listing(items, len(items), encoded, known, persons=persons)


def _read_csv(table: Path, wanted: list[str]) -> dict[str, dict[str, str]]:
    """File name → its value in each wanted column, in the order of the lines."""
    listed: dict[str, dict[str, str]] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _csv_rows(table, csv.reader(file, strict=True), ["file", *wanted]):
                empty = next((column for column, value in row.items() if not value), None)
                if empty is not None:
                    raise DataError(f"{table} line {line} has an empty {'file name' if empty == 'file' else empty}")
                name = PurePosixPath(row["file"]).as_posix()
                if name in listed:
                    raise DataError(f"{table} line {line} lists {name} a second time")
                listed[name] = row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as CSV in UTF-8: {reason(error)}") from error
    if not listed:
        raise DataError(f"{table} lists no files")
    return listed


def _csv_rows(table: Path, reader: Any, wanted: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    header = [column.strip().lower() for column in next(reader, [])]
    if not set(wanted) <= set(header):
        raise DataError(f"{table} needs a first line with the columns {','.join(wanted)}, not {','.join(header)!r}")
    for row in reader:
        if row and len(row) != len(header):
            raise DataError(f"{table} line {reader.line_num} has {len(row)} columns, not {len(header)}")
        if row:
            yield reader.line_num, {column: row[header.index(column)].strip() for column in wanted}


def _split_folder(folder: Path, split: str) -> Path:
    """The `train` or `test` sub-folder where the folder is divided so; else the folder itself."""
    files, folders = _entries(folder)
    names = {child.name for child in folders}
    divided = not files and bool(names & {"train", "test"}) and names <= SPLITS
    # Two classes that happen to be called "train" and "test" hold files; parts of a data set hold folders.
    if not divided or not all(_entries(child)[1] or (child / LABELS_FILE).is_file() for child in folders):
        return folder
    if split not in names:
        raise DataError(f"{folder} has no part {split!r}, only {', '.join(sorted(names))}")
    return folder / split


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder, in order, without hidden ones and clutter."""
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {reason(error)}") from error
    children = [child for child in children if child.name[0] != "." and child.name.lower() not in CLUTTER]
    folders = [child for child in children if child.is_dir()]
    return [child for child in children if child not in set(folders)], folders


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """All files below a folder, in order. A folder met twice would count its images twice, or for ever."""
    identity = _identity(folder)
    if identity in seen:
        raise DataError(f"{folder} is a link to a folder that is read already; remove the link")
    seen.add(identity)
    files, folders = _entries(folder)
    yield from files
    for child in folders:
        yield from _walk(child, seen)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
