"""One function that reads every kind of image set."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

import torch

from .arrays import IDX_IMAGES, find_idx, read_idx, read_npz
from .cifar import find_cifar, read_cifar
from .containers import list_parquet, list_webdataset
from .decode import Listing, Mode, OnError, Progress, decode, refit
from .errors import UNLABELLED, DataError, DataWarning, first_few
from .folders import list_folder
from .imageset import ImageSet
from .labels import Classes, class_names
from .named import read_digits, resolve
from .persons import reads_paths, refuse_persons

Split = Literal["train", "test"]
Found = TypeVar("Found", ImageSet, Listing)
FEW = 100  # images, or persons: among fewer, one is hard to hide
BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class _Wish:
    """What every reader is told."""

    split: Split
    labels: bool
    on_error: OnError
    classes: tuple[str, ...] | None
    person: str | None


def load_images(
    source: str | Path,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    split: Split = "train",
    labels: bool = True,
    classes: Classes | None = None,
    person: str | None = None,
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Read an image set.

    source: a folder of class sub-folders; a flat folder with `labels.csv`; `.npz`; IDX files; CIFAR batches;
        Parquet; WebDataset tar shards (`shard-{000..003}.tar` too); or the name of a known data set.
    size: crop each image to its central square and resize it to size×size; None keeps images as they are.
    mode: "grey" or "rgb"; None is what the images are, which must be all grey or all colour.
    split: which part of a source that has parts; others are read whole.
    labels: False reads everything as one unlabelled collection.
    classes: the names in the order of labels, or n for "0" to "n-1". Classes are public, so the labels must not decide
        them: needed where the source does not name its classes as folders, named sets, Parquet with names, `.npz`
        with an array `classes` and CIFAR's meta file do. A class may have no image.
    person: where to read whose image it is, for a guarantee per person; None: each image is its own unit. A column of
        `labels.csv` or Parquet, an array of `.npz` (also `train_NAME`, `NAME_train`), a key of WebDataset's `.json`;
        or from the path below the source folder (below `train` or `test` if it has these parts): "folder", the
        folder that holds the file; "folder:K", level K counted from 1; "regex:PATTERN", the one group of a regular
        expression. The name is the identity: folders of one name are one person, under different classes too.
    on_error: "skip" leaves out files that cannot be read, with a `DataWarning`.
    """
    _check_options(size=size, mode=mode, split=split, on_error=on_error)
    if classes is not None and not labels:
        raise DataError("classes= (--classes) names what labels mean, but labels=False reads none; leave one out")
    names = None if classes is None else class_names(classes)
    found = _read(source, _Wish(split, labels, on_error, names, person))
    if isinstance(found, ImageSet):
        found = _with_classes(found, names, source)
        images = refit(found, size=size, mode=mode, workers=workers, progress=progress)
    else:
        if found.count == 0:
            raise DataError(f"{source} holds no images")
        found = _with_classes(found, names, source)
        images = decode(found, size=size, mode=mode, on_error=on_error, workers=workers, progress=progress)
    _check_number(images, source, warn=split == "train")
    if images.labelled and len(images.classes) == 1:
        raise DataError(f"{source} holds one class only ({images.classes[0]}); {UNLABELLED}")
    return images


def _check_number(images: ImageSet, source: str | Path, *, warn: bool) -> None:
    """Refuse a single image (or person), and warn of a handful, without telling how many."""
    unit, number = "image", len(images)
    if images.persons is not None:
        unit, number = "person", len(images.persons.unique())
    if number == 1:
        raise DataError(f"{source} holds a single {unit}; one {unit} cannot be hidden among others")
    if warn and number < FEW:
        hiding = f"fewer than {FEW} {unit}s: hiding one of so few leaves little to see; expect noise"
        warnings.warn(DataWarning(f"{source} holds {hiding}"), stacklevel=3)


def _with_classes(images: Found, classes: tuple[str, ...] | None, source: str | Path) -> Found:
    """Replace the classes that a source names by declared ones, which must include them, in the declared order."""
    if classes is None or images.labels is None or images.classes == classes:
        return images
    missing = [name for name in images.classes if name not in classes]
    if missing:
        raise DataError(f"{source} has classes that classes= (--classes) does not name: {first_few(missing)}; add them")
    places = torch.tensor([classes.index(name) for name in images.classes])
    soft_labels = images.soft_labels
    if soft_labels is not None:
        soft_labels = torch.zeros(len(soft_labels), len(classes)).index_copy(1, places, soft_labels)
    return replace(images, labels=places[images.labels], classes=classes, soft_labels=soft_labels)


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


def _read(source: str | Path, wish: _Wish) -> ImageSet | Listing:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, wish)
    if path.exists():
        return _read_files([path], wish)
    if BRACES.search(str(source)):
        return _read_files(_expanded(str(path)), wish)
    if os.sep in str(source) or path.suffix:
        raise DataError(f"{source} does not exist")
    return _read_named(str(source), wish)


def _read_named(name: str, wish: _Wish) -> ImageSet | Listing:
    known, path = resolve(name)
    if path.name == "digits.csv.gz":
        refuse_persons(wish.person, name)
        images: ImageSet | Listing = read_digits(wish.split)
    else:
        images = _read(path, replace(wish, classes=known.classes if wish.labels else None))
    if not wish.labels:
        return ImageSet(images.images) if isinstance(images, ImageSet) and images.labelled else images
    if len(images.classes) != len(known.classes):
        raise DataError(f"{path} has {len(images.classes)} classes, but {name} has {len(known.classes)}")
    return replace(images, classes=known.classes)


def _read_folder(folder: Path, wish: _Wish) -> ImageSet | Listing:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error
    idx = find_idx(folder, wish.split)
    if idx is not None:
        return _read_files([idx], wish)
    cifar = find_cifar(folder)
    if cifar is not None:
        refuse_persons(wish.person, str(cifar))
        return read_cifar(cifar, labels=wish.labels, split=wish.split, classes=wish.classes)
    for suffix in (".parquet", ".tar"):
        shards = [file for file in files if file.suffix.lower() == suffix]
        if shards:
            return _read_files(_of_split(folder, shards, wish.split), wish)
    return list_folder(
        folder,
        labels=wish.labels,
        split=wish.split,
        on_error=wish.on_error,
        classes=wish.classes,
        person=wish.person,
    )


def _of_split(folder: Path, shards: list[Path], split: Split) -> list[Path]:
    """The shards of a split where their names tell (`train-00000-of-00002.parquet`), else all of them."""
    parts = {shard: re.split(r"[-_.]", shard.name.lower())[0] for shard in shards}
    if not set(parts.values()) & {"train", "test"}:
        return shards
    chosen = [shard for shard in shards if parts[shard] == split]
    if not chosen:
        raise DataError(f"{folder} has no shards for split {split!r}, only {shards[0].name}")
    return chosen


def _read_files(paths: list[Path], wish: _Wish) -> ImageSet | Listing:
    path = paths[0]
    suffix = path.suffix.lower()
    if IDX_IMAGES.match(path.name) and len(paths) == 1:
        refuse_persons(wish.person, str(path))
        return read_idx(path, labels=wish.labels, classes=wish.classes)
    if reads_paths(wish.person):
        what = f"person={wish.person!r} (--person) reads the paths of image files, and {path} has none"
        raise DataError(f"{what}; pass the name of a column, an array or a key")
    if suffix == ".tar":
        return list_webdataset(paths, labels=wish.labels, classes=wish.classes, person=wish.person)
    if suffix == ".parquet":
        return list_parquet(paths, labels=wish.labels, classes=wish.classes, person=wish.person)
    if len(paths) > 1:
        raise DataError(f"{path}: only .parquet and .tar files can be read in shards")
    if suffix == ".npz":
        return read_npz(path, labels=wish.labels, split=wish.split, classes=wish.classes, person=wish.person)
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
