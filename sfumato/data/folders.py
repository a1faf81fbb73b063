"""List folders of image files: with class sub-folders, with `labels.csv`, or without labels."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from sfumato.data.decode import SKIP_HINT, SUFFIXES, Item, Listing, OnError, file_item
from sfumato.data.errors import UNLABELLED_HINT, DataError, first_few, reason
from sfumato.data.labels import encode_labels, sort_names
from sfumato.data.persons import persons_of_paths, reads_paths

LABELS_FILE = "labels.csv"
# Files that file managers and archivers leave behind.
SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
UNSAFE_CHARACTERS = frozenset('%/\\:*?"<>|')
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
    """List the images of a folder.

    - classes: class names for `labels.csv`; class sub-folders have their own names.
    - person: a column of `labels.csv`, or a rule that reads the person from the file path (see `persons_of_paths`).
    """
    folder = _split_folder(folder, split)
    by_column = person is not None and not reads_paths(person)
    if (labels or by_column) and (folder / LABELS_FILE).is_file():
        return _list_with_csv(folder, labels, classes, person)
    if not labels:
        return _list_unlabelled(folder, person)
    return _list_classes(folder, on_error, classes, person)


def folder_name(name: str) -> str:
    """Return the folder name of a class. Characters that are unsafe in file systems are percent-encoded."""
    if name == "":
        return "%"
    safe = "".join(_escape(c) if c in UNSAFE_CHARACTERS or not c.isprintable() else c for c in name)
    if safe[0] == "." or safe.lower() in SYSTEM_FILES:
        safe = _escape(safe[0]) + safe[1:]
    return safe[:-1] + _escape(safe[-1]) if safe[-1] in ". " else safe


def class_name(folder: str) -> str:
    """Return the class name of a folder: the inverse of `folder_name`. Other folder names are returned unchanged."""
    if folder == "%":
        return ""
    name = unquote(folder, errors="surrogateescape")
    return name if folder_name(name) == folder else folder


def _escape(letter: str) -> str:
    # `quote` leaves the dot and letters unchanged, which are safe in URLs but not here.
    return quote(letter, safe="") if quote(letter, safe="") != letter else f"%{ord(letter):02X}"


def _list_classes(folder: Path, on_error: OnError, declared: Sequence[str] | None, person: str | None) -> Listing:
    files, folders = _entries(folder)
    if not files and not folders:
        raise DataError(f"{folder} is empty; expected one sub-folder of images for each class")
    if not folders:
        raise DataError(f"{folder} has neither class sub-folders nor {LABELS_FILE}; {UNLABELLED_HINT}")
    skipped = _check_unclassified(folder, files, on_error)
    if len(folders) == 1 and declared is None:
        how = f"name all classes with classes= (--classes), or {UNLABELLED_HINT}"
        raise DataError(f"{folder} has only one class ({folders[0].name}); {how}")
    classes = sort_names(class_name(child.name) for child in folders)
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


def _check_unclassified(folder: Path, files: list[Path], on_error: OnError) -> list[str]:
    """Refuse images outside the class folders, and return the names of other files there, to be skipped."""
    images = [file.name for file in files if file.suffix.lower() in SUFFIXES]
    if images:
        what = f"{folder} has images outside its class folders ({first_few(images)})"
        raise DataError(f"{what}; move them into a class folder, or {UNLABELLED_HINT}")
    names = [file.name for file in files]
    if names and on_error == "raise":
        raise DataError(
            f"{folder} has files outside its class folders ({first_few(names)}); remove them, or {SKIP_HINT}"
        )
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
        raise DataError(f"{table} lists files that do not exist: {first_few(missing)}")
    unlisted = [name for name in present if name not in listed]
    if unlisted:
        raise DataError(f"{table} has no {wanted[0]} for {first_few(unlisted)}; add these lines, or remove the files")
    items = [file_item(present[name], name) for name in listed]
    persons = [row[column] for row in listed.values()] if column else _persons(items, person, classes=False)
    if not labels:
        return Listing(items, len(items), persons=persons)
    encoded, known = encode_labels([row["label"] for row in listed.values()], classes, str(table))
    return Listing(items, len(items), encoded, known, persons=persons)


def _read_csv(table: Path, wanted: list[str]) -> dict[str, dict[str, str]]:
    """Map each file name to its values in the wanted columns, in the order of the lines."""
    listed: dict[str, dict[str, str]] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _csv_rows(table, csv.reader(file, strict=True), ["file", *wanted]):
                empty = next((column for column, value in row.items() if not value), None)
                if empty is not None:
                    raise DataError(f"{table} line {line} has an empty {'file name' if empty == 'file' else empty}")
                name = PurePosixPath(row["file"]).as_posix()
                if name in listed:
                    raise DataError(f"{table} line {line} lists {name} twice")
                listed[name] = row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} cannot be read as CSV in UTF-8: {reason(error)}") from error
    if not listed:
        raise DataError(f"{table} lists no files")
    return listed


def _csv_rows(table: Path, reader: Any, wanted: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    header = [column.strip().lower() for column in next(reader, [])]
    if not set(wanted) <= set(header):
        raise DataError(f"{table} needs a header line with the columns {','.join(wanted)}, not {','.join(header)!r}")
    for row in reader:
        if row and len(row) != len(header):
            raise DataError(f"{table} line {reader.line_num} has {len(row)} columns, not {len(header)}")
        if row:
            yield reader.line_num, {column: row[header.index(column)].strip() for column in wanted}


def _split_folder(folder: Path, split: str) -> Path:
    """Return the `train` or `test` sub-folder if the folder is split this way, or else the folder itself."""
    files, folders = _entries(folder)
    names = {child.name for child in folders}
    is_split = not files and bool(names & {"train", "test"}) and names <= SPLITS
    # Folders named "train" and "test" that hold files are classes; splits hold class folders.
    if not is_split or not all(_entries(child)[1] or (child / LABELS_FILE).is_file() for child in folders):
        return folder
    if split not in names:
        raise DataError(f"{folder} has no split {split!r}, only {', '.join(sorted(names))}")
    return folder / split


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the sorted files and sub-folders of a folder, without hidden and system files."""
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {reason(error)}") from error
    children = [child for child in children if child.name[0] != "." and child.name.lower() not in SYSTEM_FILES]
    folders = [child for child in children if child.is_dir()]
    return [child for child in children if child not in set(folders)], folders


def _walk(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield all files below a folder in order. Refuse a folder that was visited before, which a link may cause."""
    identity = _identity(folder)
    if identity in seen:
        raise DataError(f"{folder} is a link to a folder that was already read; remove the link")
    seen.add(identity)
    files, folders = _entries(folder)
    yield from files
    for child in folders:
        yield from _walk(child, seen)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
