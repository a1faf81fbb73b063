"""One function that reads every kind of image set."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

from .arrays import IDX_IMAGES, find_idx, read_idx, read_npz
from .cifar import find_cifar, read_cifar
from .containers import list_parquet, list_webdataset
from .decode import Listing, Mode, OnError, Progress, decode, refit
from .errors import UNLABELLED, DataError
from .folders import list_folder
from .imageset import ImageSet
from .named import read_digits, resolve

Split = Literal["train", "test"]
BRACES = re.compile(r"\{([^{}]*)\}")


def load_images(
    source: str | Path,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    split: Split = "train",
    labels: bool = True,
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Read an image set.

    source: a folder of class sub-folders; a flat folder with `labels.csv`; `.npz`; IDX files; CIFAR batches;
        Parquet; WebDataset tar shards (`shard-{000..003}.tar` too); or the name of a known data set.
    size: crop each image to its central square and resize it to size×size; None keeps images as they are.
    mode: "grey" or "rgb"; None is grey if every image is grey, else RGB.
    split: which part of a source that has parts; others are read whole.
    labels: False reads everything as one unlabelled collection.
    on_error: "skip" leaves out files that cannot be read, with a `DataWarning`.
    """
    _check_options(size=size, mode=mode, split=split, on_error=on_error)
    found = _read(source, split, labels, on_error)
    if isinstance(found, Listing):
        if found.count == 0:
            raise DataError(f"{source} holds no images")
        images = decode(found, size=size, mode=mode, on_error=on_error, workers=workers, progress=progress)
    else:
        images = refit(found, size=size, mode=mode, workers=workers, progress=progress)
    if len(images) == 1:
        raise DataError(f"{source} holds a single image; one image cannot be hidden among others")
    if images.labelled and len(images.classes) == 1:
        raise DataError(f"{source} holds one class only ({images.classes[0]}); {UNLABELLED}")
    return images


def _check_options(*, size: int | None, mode: str | None, split: str, on_error: str) -> None:
    if size is not None and (not isinstance(size, int) or not 1 <= size <= 8192):
        raise DataError(f"size={size!r}: expected a whole number of pixels from 1 to 8192")
    for name, value, allowed in (
        ("mode", mode, ("grey", "rgb", None)),
        ("split", split, ("train", "test")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in allowed:
            raise DataError(f"{name}={value!r}: expected {' or '.join(repr(choice) for choice in allowed)}")


def _read(source: str | Path, split: Split, labels: bool, on_error: OnError) -> ImageSet | Listing:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, split, labels, on_error)
    if path.exists():
        return _read_files([path], labels, split)
    if BRACES.search(str(source)):
        return _read_files(_expanded(str(path)), labels, split)
    if os.sep in str(source) or path.suffix:
        raise DataError(f"{source} does not exist")
    return _read_named(str(source), split, labels, on_error)


def _read_named(name: str, split: Split, labels: bool, on_error: OnError) -> ImageSet | Listing:
    known, path = resolve(name)
    if path.name == "digits.csv.gz":
        images: ImageSet | Listing = read_digits(split)
    else:
        images = _read(path, split, labels, on_error)
    if not labels:
        return ImageSet(images.images) if isinstance(images, ImageSet) else images
    if len(images.classes) != len(known.classes):
        raise DataError(f"{path} has {len(images.classes)} classes, but {name} has {len(known.classes)}")
    return replace(images, classes=known.classes)


def _read_folder(folder: Path, split: Split, labels: bool, on_error: OnError) -> ImageSet | Listing:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error
    idx = find_idx(folder, split)
    if idx is not None:
        return read_idx(idx, labels=labels)
    cifar = find_cifar(folder)
    if cifar is not None:
        return read_cifar(cifar, labels=labels, split=split)
    for suffix in (".parquet", ".tar"):
        shards = [file for file in files if file.suffix.lower() == suffix]
        if shards:
            return _read_files(_of_split(folder, shards, split), labels, split)
    return list_folder(folder, labels=labels, split=split, on_error=on_error)


def _of_split(folder: Path, shards: list[Path], split: Split) -> list[Path]:
    """The shards of a split where their names tell (`train-00000-of-00002.parquet`), else all of them."""
    parts = {shard: re.split(r"[-_.]", shard.name.lower())[0] for shard in shards}
    if not set(parts.values()) & {"train", "test"}:
        return shards
    chosen = [shard for shard in shards if parts[shard] == split]
    if not chosen:
        raise DataError(f"{folder} has no shards for split {split!r}, only {shards[0].name}")
    return chosen


def _read_files(paths: list[Path], labels: bool, split: Split) -> ImageSet | Listing:
    path = paths[0]
    suffix = path.suffix.lower()
    if suffix == ".tar":
        return list_webdataset(paths, labels=labels)
    if suffix == ".parquet":
        return list_parquet(paths, labels=labels)
    if len(paths) > 1:
        raise DataError(f"{path}: only .parquet and .tar files can be read in shards")
    if suffix == ".npz":
        return read_npz(path, labels=labels, split=split)
    if IDX_IMAGES.match(path.name):
        return read_idx(path, labels=labels)
    raise DataError(f"{path}: unknown kind of file; expected a folder, .npz, .parquet, .tar or IDX images")


def _expanded(pattern: str) -> list[Path]:
    """The files that a brace pattern names: `{000..003}` counts, `{a,b}` lists."""
    pieces = BRACES.split(pattern)
    choices = [[piece] if index % 2 == 0 else _choices(piece) for index, piece in enumerate(pieces)]
    paths = [Path("".join(combination)) for combination in product(*choices)]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise DataError(f"{missing} does not exist (from the pattern {pattern})")
    return paths


def _choices(piece: str) -> list[str]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
    if ends is None:
        return piece.split(",")
    first, last = ends.groups()
    if not 0 <= int(last) - int(first) < 100_000:
        raise DataError(f"the pattern {{{piece}}} does not count upwards")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
