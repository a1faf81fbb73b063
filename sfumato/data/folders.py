"""List folders of image files: with class sub-folders, with a table of labels, or without labels.

Files that are not images by their names are left out and reported; so are hidden files and what file managers leave.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from sfumato.data.decode import DECODING_ERRORS, Item, Listing, OnError, file_item, is_image_file
from sfumato.data.errors import UNLABELLED_HINT, DataError, DataWarning, first_few, reason
from sfumato.data.labels import SeveralLabels, column_labels, encode_labels, one_label_each, sort_names, split_columns
from sfumato.data.medical import dicom_value
from sfumato.data.parallel import map_in_order
from sfumato.data.persons import DICOM, persons_of_paths, reads_paths

TABLES = ("labels.csv", "metadata.csv")  # the second is the name in Hugging Face's image folders
FILE_COLUMNS = ("file", "file_name", "filename", "image_id", "image", "path", "image_path")
LABEL_COLUMN = "label"
RUNS_FOLDER = "sfumato-runs"  # of `sfumato serve`: it may lie beside the class folders
# Files that file managers and archivers leave behind, the index of a folder of DICOM files, and our own runs.
SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx", "dicomdir", RUNS_FOLDER})
UNSAFE_CHARACTERS = frozenset('%/\\:*?"<>|')
SPLIT_NAME = re.compile(r"(?:.*[-_ .])?(train|test|val|valid|eval)(?:ing|idation)?(?:[-_ .].*)?", re.IGNORECASE)


def list_folder(
    folder: Path,
    *,
    labels: bool,
    split: str,
    on_error: OnError,
    classes: Sequence[str] | None = None,
    person: str | None = None,
    label_column: str | None = None,
    several: SeveralLabels = "combine",
) -> Listing:
    """List the images of a folder.

    - classes: class names for a table; class sub-folders have their own names.
    - person: a column of the table, or a rule that reads the person from the file (see `persons_of_paths`).
    - label_column: a column of the table, several with commas between, or a rule as for `person`.
    """
    folder = _split_folder(folder, split)
    table = _find_table(folder, any(name is not None and not reads_paths(name) for name in (label_column, person)))
    if labels and label_column is not None and reads_paths(label_column):
        return _list_by_rule(folder, label_column, classes, several, person, on_error)
    if labels and label_column is not None and table is None:
        how = f"a table {TABLES[0]} (or one other .csv file) in that folder, or folder:K, regex:(…) or dicom:KEYWORD"
        raise DataError(f"label_column={label_column!r} (--label-column): {folder} has no columns; it needs {how}")
    by_column = person is not None and not reads_paths(person)
    if (labels or by_column) and table is not None:
        columns = split_columns(label_column or LABEL_COLUMN) if labels else []
        return _list_with_table(table, columns, classes, several, person, on_error)
    if not labels:
        return _list_unlabelled(folder, person, on_error)
    return _list_classes(folder, classes, person, on_error)


def _find_table(folder: Path, wanted: bool) -> Path | None:
    """Return the table of a folder. If a column is `wanted`, the only .csv file there will do, whatever its name."""
    known = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if known is not None or not wanted:
        return known
    others = [path for path in sorted(folder.iterdir()) if path.suffix.lower() == ".csv" and path.name[0] != "."]
    if len(others) > 1:
        names = first_few([path.name for path in others])
        raise DataError(f"{folder} has several tables ({names}); name the right one {TABLES[0]}")
    return others[0] if others else None


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


def _list_classes(folder: Path, declared: Sequence[str] | None, person: str | None, on_error: OnError) -> Listing:
    files, folders, others = _entries(folder)
    if not files and not folders and not others:
        raise DataError(f"{folder} is empty; expected one sub-folder of images for each class")
    if not folders:
        raise DataError(f"{folder} has neither class sub-folders nor {TABLES[0]}; {UNLABELLED_HINT}")
    if files:
        what = f"{folder} has images outside its class folders ({first_few([file.name for file in files])})"
        raise DataError(f"{what}; move them into a class folder, or {UNLABELLED_HINT}")
    if len(folders) == 1 and declared is None:
        raise DataError(_advise_on_one_class(folder, folders[0]))
    classes = sort_names(class_name(child.name) for child in folders)
    by_class = {class_name(child.name): child for child in folders}
    seen = {_identity(folder)}
    paths: list[Path] = []
    names: list[str] = []
    for name in classes:
        found = list(_walk(by_class[name], seen, others))
        paths += found
        names += [name] * len(found)
    if not paths:
        raise DataError(f"{folder} holds no images, only empty folders{_name_others(folder, others)}")
    items = _items(folder, paths)
    kept, persons, skipped = _apply(items, person, on_error, classes=True)
    encoded, classes = encode_labels([names[index] for index in kept], classes)
    items = [items[index] for index in kept]
    beside = _relative(folder, others)
    return Listing(items, len(items), encoded, classes, skipped=skipped, persons=persons, others=beside)


def _advise_on_one_class(folder: Path, child: Path) -> str:
    """Return the error for a folder with one sub-folder, which may hold the class folders or be the only class."""
    inner = [sub.name for sub in _entries(child)[1]]
    how = f"name all classes with classes= (--classes), or {UNLABELLED_HINT}"
    if len(inner) > 1:
        return f"{folder} has only one sub-folder; if the classes are {first_few(inner)}, pass {child}; else {how}"
    return f"{folder} has only one class ({child.name}); {how}"


def _list_by_rule(
    folder: Path,
    rule: str,
    classes: Sequence[str] | None,
    several: SeveralLabels,
    person: str | None,
    on_error: OnError,
) -> Listing:
    """List the images with labels from their paths or DICOM headers. Such labels do not define the classes."""
    listing = _list_unlabelled(folder, person, on_error)
    items, persons = list(listing.items), listing.persons
    kept, values, skipped = _apply(items, rule, on_error, classes=False, what="label")
    labels = one_label_each(values or [], classes, several, str(folder))
    encoded, known = encode_labels(labels, classes, str(folder))
    return Listing(
        [items[index] for index in kept],
        len(kept),
        encoded,
        known,
        skipped=[*listing.skipped, *skipped],
        persons=None if persons is None else [persons[index] for index in kept],
        others=listing.others,
    )


def _items(folder: Path, paths: list[Path]) -> list[Item]:
    return [file_item(path, path.relative_to(folder).as_posix()) for path in paths]


def _apply(
    items: list[Item], rule: str | None, on_error: OnError, *, classes: bool, what: str = "person"
) -> tuple[list[int], list[str] | None, list[str]]:
    """Read the person or label of each file. Return the indices of files that have one, the values, and other files.

    A file without a value is an error, or is left out with `on_error="skip"`: it cannot be protected with its person.
    """
    if rule is None:
        return list(range(len(items))), None, []
    if not rule.startswith(DICOM):
        names = [item.name for item in items]
        return list(range(len(items))), persons_of_paths(names, rule, classes=classes, what=what), []
    keyword = rule.removeprefix(DICOM)

    def read(item: Item) -> str | DataError:
        try:
            with item.open() as file:
                return dicom_value(file, keyword)
        except DataError as error:
            return DataError(f"{item.name} {error}")
        except DECODING_ERRORS as error:
            return DataError(f"{item.name} cannot be read as DICOM: {reason(error)}")

    with closing(map_in_order(read, items)) as results:
        values = list(results)
    failed = next((value for value in values if isinstance(value, DataError)), None)
    if failed is not None and on_error == "raise":
        raise failed
    kept = [index for index, value in enumerate(values) if isinstance(value, str)]
    if not kept:
        raise DataError(f"no file has the DICOM element {keyword}")
    skipped = [items[index].name for index in sorted(set(range(len(items))) - set(kept))]
    return kept, [value for value in values if isinstance(value, str)], skipped


def _list_unlabelled(folder: Path, person: str | None, on_error: OnError) -> Listing:
    others: list[Path] = []
    items = _items(folder, list(_walk(folder, set(), others)))
    others = [path for path in others if path.name not in TABLES]
    if not items:
        raise DataError(f"{folder} holds no images{_name_others(folder, others)}")
    kept, persons, skipped = _apply(items, person, on_error, classes=False)
    items = [items[index] for index in kept]
    return Listing(items, len(items), skipped=skipped, persons=persons, others=_relative(folder, others))


def _list_with_table(
    table: Path,
    columns: list[str],
    classes: Sequence[str] | None,
    several: SeveralLabels,
    person: str | None,
    on_error: OnError,
) -> Listing:
    folder, others = table.parent, list[Path]()
    column = None if person is None or reads_paths(person) else person.strip().lower()
    wanted = [*(name.lower() for name in columns), *([column] if column is not None else [])]
    present = {path.relative_to(folder).as_posix(): path for path in _walk(folder, set(), others)}
    listed, missing = _match_names(_read_csv(table, wanted), present)
    if missing and on_error == "raise":
        raise DataError(f"{table} lists files that do not exist: {first_few(missing)}")
    unlisted = [name for name in present if name not in listed]
    if unlisted and on_error == "raise":
        raise DataError(f"{table} has no {wanted[0]} for {first_few(unlisted)}; add these lines, or remove the files")
    if not listed:
        raise DataError(f"{table} lists no image that is in the folder")
    items = [file_item(present[name], name) for name in listed]
    skipped, beside = [*missing, *unlisted], _relative(folder, [path for path in others if path != table])
    persons = [row[column] for row in listed.values()] if column else None
    if person is not None and persons is None:
        persons = _apply(items, person, "raise", classes=False)[1]
    if not columns:
        return Listing(items, len(items), skipped=skipped, persons=persons, others=beside)
    cells = [[row[name.lower()] for name in columns] for row in listed.values()]
    labels = column_labels(columns, cells, classes, several, str(table))
    encoded, known = encode_labels(labels, classes, str(table))
    return Listing(items, len(items), encoded, known, skipped=skipped, persons=persons, others=beside)


def _match_names(
    listed: dict[str, dict[str, str]], present: dict[str, Path]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the lines by the names of their files, and names without a file.

    A line may leave out the suffix or the folder of a file, if only one file fits.
    """
    short: dict[str, list[str]] = {}
    for name in present:
        path = PurePosixPath(name)
        for other in {path.with_suffix("").as_posix(), path.name, path.stem} - {name}:
            short.setdefault(other, []).append(name)
    only = {other: names[0] for other, names in short.items() if len(names) == 1}
    names = {name: name if name in present else only.get(name) for name in listed}
    twice = [path for path, number in Counter(names.values()).items() if path is not None and number > 1]
    if twice:
        raise DataError(f"the table lists {first_few(twice)} twice, by different names")
    found = {path: listed[name] for name, path in names.items() if path is not None}
    return found, [name for name, path in names.items() if path is None]


def _read_csv(table: Path, wanted: list[str]) -> dict[str, dict[str, str]]:
    """Map each file name to its values in the wanted columns, in the order of the lines."""
    listed: dict[str, dict[str, str]] = {}
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            for line, row in _csv_rows(table, csv.reader(file, strict=True), wanted):
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
    file_column = next((name for name in FILE_COLUMNS if name in header), None)
    if file_column is None or not set(wanted) <= set(header):
        needed = ",".join(["file", *wanted])
        raise DataError(f"{table} needs a header line with the columns {needed}, not {','.join(header)!r}")
    for row in reader:
        if row and len(row) != len(header):
            raise DataError(f"{table} line {reader.line_num} has {len(row)} columns, not {len(header)}")
        if row:
            cells = {column: row[header.index(column)].strip() for column in wanted}
            yield reader.line_num, {"file": row[header.index(file_column)].strip(), **cells}


def _split_folder(folder: Path, split: str) -> Path:
    """Return the train or test part of a folder that is split this way (`train`, `seg_test`, …), or else the folder."""
    files, folders, _ = _entries(folder)
    parts = {child: match[1].lower() for child in folders if (match := SPLIT_NAME.fullmatch(child.name))}
    is_split = not files and len(parts) == len(folders) and bool({"train", "test"} & set(parts.values()))
    # Folders named "train" and "test" that hold files are classes; splits hold class folders.
    if not is_split or not all(_has_classes(child) for child in folders):
        return folder
    chosen = [child for child, part in parts.items() if part == split]
    if len(chosen) != 1:
        names = first_few(sorted(child.name for child in folders))
        found = "no split" if not chosen else "several parts for the split"
        raise DataError(f"{folder} has {found} {split!r}, only {names}; pass the path of one of them")
    left_out = first_few(sorted(child.name for child in folders if child != chosen[0]))
    if left_out:
        text = f"{folder.name}: {chosen[0].name} is read, {left_out} not (--split)"
        warnings.warn(DataWarning(text), stacklevel=6)
    return _unwrapped(chosen[0])


def _has_classes(folder: Path) -> bool:
    return bool(_entries(folder)[1]) or any((folder / name).is_file() for name in TABLES)


def _unwrapped(folder: Path) -> Path:
    """Return the folder inside a folder that holds only one of the same name, as some archives do."""
    files, folders, _ = _entries(folder)
    return folders[0] if not files and [child.name for child in folders] == [folder.name] else folder


def _entries(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the sorted images, sub-folders and other files of a folder. Hidden and system files are other files."""
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {reason(error)}") from error
    images: list[Path] = []
    folders: list[Path] = []
    others: list[Path] = []
    for child in children:
        hidden = child.name[0] == "." or child.name.lower() in SYSTEM_FILES
        kind = others if hidden else folders if child.is_dir() else images if is_image_file(child) else others
        kind.append(child)
    return images, folders, others


def _name_others(folder: Path, others: list[Path]) -> str:
    return f"; files that are not images: {first_few(_relative(folder, others))}" if others else ""


def _relative(folder: Path, paths: list[Path]) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _walk(folder: Path, seen: set[tuple[int, int]], others: list[Path]) -> Iterator[Path]:
    """Yield all images below a folder in order, and collect other files.

    Refuse a folder that was visited before, which a link may cause.
    """
    identity = _identity(folder)
    if identity in seen:
        raise DataError(f"{folder} is a link to a folder that was already read; remove the link")
    seen.add(identity)
    files, folders, rest = _entries(folder)
    others += rest
    yield from files
    for child in folders:
        yield from _walk(child, seen, others)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
