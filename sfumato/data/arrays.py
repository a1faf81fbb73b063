"""Read array files: `.npz` with the usual array names, and IDX files (the MNIST family, plain or gzipped)."""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.errors import UNLABELLED_HINT, DataError, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.labels import SOFT_LABELS, encode_labels, to_text
from sfumato.data.persons import encode_persons

Array = np.ndarray[Any, Any]

# Exceptions that zipfile and numpy raise for a damaged archive.
DAMAGED_ZIP = (
    *(OSError, EOFError, ValueError, LookupError, RuntimeError, MemoryError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
IDX_IMAGES = re.compile(r"(?P<stem>.*?)images(?P<join>[-.])idx3-ubyte(?P<gzip>\.gz)?$")
# MNIST calls its test files "t10k"; relatives such as EMNIST call them "test".
IDX_SPLITS = {"train": ("train-",), "test": ("t10k-", "test-")}


def read_npz(
    path: Path,
    *,
    labels: bool,
    split: str,
    classes: Sequence[str] | None = None,
    person: str | None = None,
    label_column: str | None = None,
) -> ImageSet:
    """Read the arrays `images`/`labels` or `x`/`y`, with or without a split name (`train_images`, `x_test`).

    - classes: class names, used if the archive has no array `classes`.
    - person, label_column: names of the arrays that hold the person and the label of each image, with or without a
      split name.
    """
    candidates = (
        (f"{split}_images", f"{split}_labels"),
        (f"x_{split}", f"y_{split}"),
        ("images", "labels"),
        ("x", "y"),
    )
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds a single array, not an .npz archive of named arrays")
            with archive:
                column = None if label_column is None else _array_name(path, archive, label_column, split, "labels")
                images = _read_archive(path, archive, candidates, labels, classes, column)
                if person is None:
                    return images
                name = _array_name(path, archive, person, split, "persons")
                return replace(images, persons=encode_persons(archive[name]))
    except DataError as error:
        raise error if str(path) in str(error) else DataError(f"{path}: {error}") from error
    except DAMAGED_ZIP as error:
        if "allow_pickle" in str(error):
            what = "holds Python objects (pickle), which can run code when they are read; save plain arrays"
            raise DataError(f"{path} {what}") from error
        raise DataError(f"{path} is not a readable .npz file: {reason(error)}") from error


def _read_archive(
    path: Path,
    archive: np.lib.npyio.NpzFile,
    candidates: Sequence[tuple[str, str]],
    labels: bool,
    classes: Sequence[str] | None,
    column: str | None,
) -> ImageSet:
    names = next((pair for pair in candidates if pair[0] in archive), None)
    if names is None:
        wanted = ", ".join(pair[0] for pair in candidates)
        present = ", ".join(archive.files) or "nothing"
        raise DataError(f"{path} has none of the arrays {wanted}; it has {present}")
    if not labels:
        return ImageSet.from_arrays(archive[names[0]])
    if column is not None:
        return ImageSet.from_arrays(archive[names[0]], *encode_labels(archive[column], classes, str(path)))
    if names[1] not in archive:
        raise DataError(f"{path} has {names[0]!r} but no {names[1]!r}; {UNLABELLED_HINT}")
    known = [to_text(name) for name in archive["classes"]] if "classes" in archive else classes
    encoded, known = encode_labels(archive[names[1]], known, str(path))
    soft_labels = archive[SOFT_LABELS] if SOFT_LABELS in archive and names[1] == "labels" else None
    return ImageSet.from_arrays(archive[names[0]], encoded, known, soft_labels)


def _array_name(path: Path, archive: np.lib.npyio.NpzFile, name: str, split: str, what: str) -> str:
    found = next((each for each in (f"{split}_{name}", f"{name}_{split}", name) if each in archive), None)
    if found is None:
        raise DataError(f"{path} has no array {name!r} of {what}; it has {', '.join(archive.files)}")
    return found


def find_idx(folder: Path, split: str) -> Path | None:
    """Return the IDX image file of a split, or None if the folder holds no IDX images."""
    present = [file for file in sorted(folder.iterdir()) if IDX_IMAGES.match(file.name)]
    if not present:
        return None
    chosen = [file for file in present if _idx_stem(file).endswith(IDX_SPLITS[split])]
    if not chosen:
        raise DataError(f"{folder} has no IDX images for split {split!r}, only {present[0].name}")
    if len({_idx_stem(file) for file in chosen}) > 1:
        names = ", ".join(file.name for file in chosen)
        raise DataError(f"{folder} has several IDX files for split {split!r} ({names}); pass the path of one of them")
    return chosen[0]


def read_idx(path: Path, *, labels: bool, classes: Sequence[str] | None = None) -> ImageSet:
    """Read an IDX image file and the label file next to it. IDX labels have no names, so `classes` gives them."""
    images = _read_idx_file(path, dimensions=3)
    if not labels:
        return ImageSet.from_arrays(images[:, None])
    match = IDX_IMAGES.match(path.name)
    if match is None:
        raise DataError(f"{path} is not named like an IDX image file (…images-idx3-ubyte); {UNLABELLED_HINT}")
    name = f"{match['stem']}labels{match['join']}idx1-ubyte"
    candidates = [path.with_name(name + suffix) for suffix in (match["gzip"] or "", "", ".gz")]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        raise DataError(f"{path} has no label file next to it ({candidates[0].name}); {UNLABELLED_HINT}")
    encoded, names = encode_labels(_read_idx_file(found, dimensions=1), classes, str(found))
    return ImageSet.from_arrays(images[:, None], encoded, names)


def _idx_stem(path: Path) -> str:
    match = IDX_IMAGES.match(path.name)
    return "" if match is None else match["stem"]


def _read_idx_file(path: Path, dimensions: int) -> Array:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                raw = file.read()
        else:
            raw = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    header = 4 + 4 * dimensions
    # Bytes 0 and 1 are zero, byte 2 is the type (8: unsigned byte), byte 3 is the number of dimensions.
    if len(raw) < header or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path} is not an IDX file of unsigned bytes with {dimensions} dimension(s)")
    shape = tuple(np.frombuffer(raw, ">u4", count=dimensions, offset=4).astype(int))
    if len(raw) - header != int(np.prod(shape, dtype=object)):
        raise DataError(f"{path} is damaged: its header does not match its length of {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)
