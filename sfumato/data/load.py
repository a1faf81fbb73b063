"""Read an image set from any supported source."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import Dataset

from sfumato.data.arrays import IDX_IMAGES, find_idx, read_idx, read_npz
from sfumato.data.cifar import find_cifar, read_cifar
from sfumato.data.containers import list_parquet, list_webdataset
from sfumato.data.decode import (
    Conversion,
    Frames,
    Item,
    Listing,
    Mode,
    OnError,
    Progress,
    convert_images,
    count_frames,
    decode,
    decode_item,
    report_left_out,
)
from sfumato.data.errors import UNLABELLED_HINT, DataError, DataWarning, first_few
from sfumato.data.folders import list_folder
from sfumato.data.imageset import ImageSet
from sfumato.data.labels import Classes, SeveralLabels, class_names
from sfumato.data.medical import ValueRange
from sfumato.data.named import read_digits, resolve
from sfumato.data.persons import encode_persons, reads_paths, refuse_persons
from sfumato.data.python_datasets import (
    is_hugging_face,
    is_saved_dataset,
    list_hugging_face,
    open_saved_dataset,
    read_torch,
)

Split = Literal["train", "test"]
Found = TypeVar("Found", ImageSet, Listing)
MIN_UNITS = 100  # images or persons; a smaller set gives a warning
BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class ReadOptions:
    """Options that every reader takes; see `load_images`."""

    split: Split
    labels: bool
    on_error: OnError
    classes: tuple[str, ...] | None
    person: str | None
    label_column: str | None
    several: SeveralLabels

    @property
    def columns(self) -> dict[str, Any]:
        """The options of readers that find labels and persons by name."""
        names = ("labels", "classes", "person", "label_column", "several")
        return {name: getattr(self, name) for name in names}


def load_images(
    source: Any,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    split: Split = "train",
    labels: bool = True,
    classes: Classes | None = None,
    person: str | None = None,
    label_column: str | None = None,
    several_labels: SeveralLabels = "combine",
    frames: Frames | None = None,
    value_range: ValueRange | None = None,
    on_error: OnError = "raise",
    workers: int | None = None,
    progress: Progress | None = None,
) -> ImageSet:
    """Read an image set.

    - source: a folder of class sub-folders; a flat folder with `labels.csv` or `metadata.csv`; `.npz`; IDX files; CIFAR
      batches; Parquet; WebDataset tar shards (also as a pattern, `shard-{000..003}.tar`); a folder that Hugging Face
      `datasets` saved; the name of a known data set; or an object: a Hugging Face `Dataset` or `DatasetDict`, or a
      PyTorch `Dataset` of (image, label).
    - size: crop each image to its central square and resize it to size×size. None keeps the images unchanged.
    - mode: "grey" or "rgb". None keeps the mode of the images, which must be all grey or all colour.
    - split: "train" or "test", for sources that have both; other sources are read completely.
    - labels: False reads all images without labels.
    - classes: class names in label order, or n for "0" to "n-1". A class may have no images. Classes are public, so
      the labels must not define them. Required unless the source names its classes: class folders, named data sets,
      Parquet with names, `.npz` with an array `classes`, and CIFAR with its meta file do.
    - person: where to read the person of each image, for a guarantee that protects persons. None: each image is one
      unit. A column of `labels.csv` or Parquet, an array of `.npz` (also `train_NAME`, `NAME_train`) or a key of the
      `.json` members of WebDataset; or a rule for the files below the source (or split) folder: "folder" (the folder
      that holds the file), "folder:K" (level K, starting at 1), "regex:PATTERN" (the only group of a regular
      expression on the path), "file" (each file is a person) or "dicom:KEYWORD" (such as PatientID). Equal names are
      the same person, also in different classes.
    - label_column: where to read the label, as for `person`; several columns with commas between make combinations.
      Default: the column or array `label`, or the class folders.
    - several_labels: how an image with several labels (a list, or `a|b`) gets one class. "combine": each combination is
      a class. "first": the first of the declared classes among its labels.
    - frames: which images to read from a file that holds several (TIFF pages, DICOM frames, NIfTI slices): "first",
      "middle" or "all". None refuses such files. "all" needs `person`.
    - value_range: (low, high), the values that become black and white in images of more than 8 bits. Default: 0 and
      65535 for 16-bit files, 0 and 1 for floats, the window in the file for DICOM, the values of the volume for NIfTI.
    - on_error: "raise", or "skip" to leave out unreadable files with a `DataWarning`.
    - workers: number of decoding threads; default: the usable cores, at most 32.
    - progress: function that is called with (images done, images in total).
    """
    conversion = Conversion(size, mode, frames, value_range)
    options = check_options(conversion, split, labels, on_error, classes, person, label_column, several_labels)
    if isinstance(source, Dataset) and not is_hugging_face(source):
        refuse_persons(person, "a PyTorch data set")
        images = read_torch(
            source, conversion, labels=labels, classes=options.classes, several=several_labels, progress=progress
        )
    else:
        found = find_source(source, options, conversion, workers)
        if isinstance(found, ImageSet):
            images = convert_images(found, size=size, mode=mode, workers=workers, progress=progress)
        else:
            images = decode(found, conversion, on_error=on_error, workers=workers, progress=progress)
    check_number(images, source, warn=split == "train")
    check_classes(images, source)
    return images


def read_outline(
    source: str | Path,
    *,
    size: int | None = None,
    mode: Mode | None = None,
    split: Split = "train",
    labels: bool = True,
    classes: Classes | None = None,
    person: str | None = None,
    label_column: str | None = None,
    several_labels: SeveralLabels = "combine",
    frames: Frames | None = None,
    value_range: ValueRange | None = None,
    on_error: OnError = "raise",
) -> ImageSet:
    """Read labels, classes, persons and shape, with blank pixels that take no memory. See `load_images`.

    Decode at most one image, and none if `size` and `mode` are given.
    """
    conversion = Conversion(size, mode, frames, value_range)
    options = check_options(conversion, split, labels, on_error, classes, person, label_column, several_labels)
    found = find_source(source, options, conversion, None)
    if isinstance(found, ImageSet):
        shape, counts = convert_images(found.subset([0]), size=size, mode=mode).shape, torch.ones(len(found)).long()
        persons = found.persons
    else:
        report_left_out(found.others, found.skipped)
        items = iter(found.items)
        shape = (3 if mode == "rgb" else 1, size, size) if size and mode else _first_shape(items, conversion, on_error)
        known = found.items if isinstance(found.items, list) else [None] * found.count
        counts = torch.tensor([1 if item is None else item.images for item in known])
        persons = None if found.persons is None else encode_persons(found.persons).repeat_interleave(counts)
    expanded = None if found.labels is None else found.labels.repeat_interleave(counts)
    blank = torch.zeros(1, dtype=torch.uint8).expand(int(counts.sum()), *shape)  # no memory
    images = ImageSet(blank, expanded, found.classes, persons=persons)
    check_number(images, source, warn=split == "train")
    check_classes(images, source)
    return images


def _first_shape(items: Iterator[Item], conversion: Conversion, on_error: OnError) -> tuple[int, int, int]:
    for item in items:
        _, result = decode_item(item, conversion)
        if not isinstance(result, DataError):
            channels, height, width = result[0].shape
            return (3 if conversion.mode == "rgb" else channels), height, width
        if on_error == "raise":
            raise result
    raise DataError("no image could be read")


def check_options(
    conversion: Conversion,
    split: Split,
    labels: bool,
    on_error: OnError,
    classes: Classes | None,
    person: str | None,
    label_column: str | None,
    several: SeveralLabels,
) -> ReadOptions:
    """Check the options and collect those of the readers."""
    size, limits = conversion.size, conversion.value_range
    if size is not None and (not isinstance(size, int) or not 1 <= size <= 8192):
        raise DataError(f"size={size!r}: expected an integer from 1 to 8192 (pixels)")
    for name, value, allowed in (
        ("mode", conversion.mode, ("grey", "rgb", None)),
        ("frames", conversion.frames, ("first", "middle", "all", None)),
        ("several_labels", several, ("combine", "first")),
        ("split", split, ("train", "test")),
        ("on_error", on_error, ("raise", "skip")),
    ):
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed if choice is not None)
            raise DataError(f"{name}={value!r}: expected {choices}")
    if limits is not None and not (len(limits) == 2 and -math.inf < limits[0] < limits[1] < math.inf):
        raise DataError(f"value_range={limits!r} (--range): expected two numbers, the lower one first")
    if conversion.frames == "all" and person is None:
        how = "pass person= (--person): file, folder, regex:(…), dicom:PatientID or a column"
        raise DataError(f"frames='all' (--frames all) reads several images of one person from a file; {how}")
    if classes is not None and not labels:
        raise DataError("classes= (--classes) cannot be combined with labels=False (--unlabelled); pass only one")
    names = None if classes is None else class_names(classes)
    return ReadOptions(split, labels, on_error, names, person, label_column, several)


def find_source(source: Any, options: ReadOptions, conversion: Conversion, workers: int | None) -> ImageSet | Listing:
    """List the files of a source, or read its arrays; with the declared classes, and frames counted."""
    if is_hugging_face(source):
        found: ImageSet | Listing = list_hugging_face(source, split=options.split, **options.columns)
    elif isinstance(source, str | Path):
        found = _read(source, options)
    else:
        kinds = "a path, a name, a Hugging Face data set or a PyTorch data set"
        raise DataError(f"images cannot be read from a {type(source).__name__}; pass {kinds}")
    if isinstance(found, ImageSet):
        return with_classes(found, options.classes, source)
    if found.count == 0:
        raise DataError(f"{source} holds no images")
    if conversion.frames == "all":
        found = count_frames(found, workers)
    return with_classes(found, options.classes, source)


def check_classes(images: ImageSet, source: Any) -> None:
    """Refuse labels of a single class."""
    if images.labelled and len(images.classes) == 1:
        raise DataError(f"{_name(source)} has only one class ({images.classes[0]}); {UNLABELLED_HINT}")


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | Path) else "the data set"


def check_number(images: ImageSet, source: Any, *, warn: bool) -> None:
    """Refuse a set of one image (or person), and warn about a small set without giving its size, which is private."""
    unit, number = "image", len(images)
    if images.persons is not None:
        unit, number = "person", len(images.persons.unique())
    if number == 1:
        raise DataError(f"{_name(source)} holds a single {unit}; differential privacy needs several")
    if warn and number < MIN_UNITS:
        message = f"{_name(source)} holds fewer than {MIN_UNITS} {unit}s; in so small a set the noise dominates"
        warnings.warn(DataWarning(message), stacklevel=3)


def with_classes(images: Found, classes: tuple[str, ...] | None, source: Any) -> Found:
    """Replace the classes of a source by the declared ones, which must include them, and renumber the labels."""
    if classes is None or images.labels is None or images.classes == classes:
        return images
    missing = [name for name in images.classes if name not in classes]
    if missing:
        raise DataError(
            f"{_name(source)} has classes that classes= (--classes) does not name: {first_few(missing)}; add them"
        )
    positions = torch.tensor([classes.index(name) for name in images.classes])
    soft_labels = images.soft_labels
    if soft_labels is not None:
        soft_labels = torch.zeros(len(soft_labels), len(classes)).index_copy(1, positions, soft_labels)
    return replace(images, labels=positions[images.labels], classes=classes, soft_labels=soft_labels)


def _read(source: str | Path, options: ReadOptions) -> ImageSet | Listing:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, options)
    if path.exists():
        return _read_files([path], options)
    if BRACES.search(str(source)):
        return _read_files([Path(each) for each in expand_braces(str(path))], options)
    if os.sep in str(source) or path.suffix:
        raise DataError(f"{source} does not exist")
    return _read_named(str(source), options)


def _read_named(name: str, options: ReadOptions) -> ImageSet | Listing:
    known, path = resolve(name)
    if path.name == "digits.csv.gz":
        refuse_persons(options.person, name)
        images: ImageSet | Listing = read_digits(options.split)
    else:
        images = _read(path, replace(options, classes=known.classes if options.labels else None))
    if not options.labels:
        return ImageSet(images.images) if isinstance(images, ImageSet) and images.labelled else images
    if len(images.classes) != len(known.classes):
        raise DataError(f"{path} has {len(images.classes)} classes, but {name} has {len(known.classes)}")
    return replace(images, classes=known.classes)


def _read_folder(folder: Path, options: ReadOptions) -> ImageSet | Listing:
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error
    idx = find_idx(folder, options.split)
    if idx is not None:
        return _read_files([idx], options)
    cifar = find_cifar(folder)
    if cifar is not None:
        refuse_persons(options.person, str(cifar))
        return read_cifar(cifar, labels=options.labels, split=options.split, classes=options.classes)
    if is_saved_dataset(folder):
        return list_hugging_face(open_saved_dataset(folder), split=options.split, **options.columns)
    for suffix in (".parquet", ".tar"):
        shards = [file for file in files if file.suffix.lower() == suffix]
        if shards:
            return _read_files(select_split(folder, shards, options.split), options)
    return list_folder(folder, split=options.split, on_error=options.on_error, **options.columns)


def select_split(folder: Path, shards: list[Path], split: Split) -> list[Path]:
    """Return the shards of a split if their names contain it (`train-00000-of-00002.parquet`), or else all shards."""
    prefixes = {shard: re.split(r"[-_.]", shard.name.lower())[0] for shard in shards}
    if not set(prefixes.values()) & {"train", "test"}:
        return shards
    chosen = [shard for shard in shards if prefixes[shard] == split]
    if not chosen:
        raise DataError(f"{folder} has no shards for split {split!r}, only {shards[0].name}")
    return chosen


def _read_files(paths: list[Path], options: ReadOptions) -> ImageSet | Listing:
    path = paths[0]
    suffix = path.suffix.lower()
    if IDX_IMAGES.match(path.name) and len(paths) == 1:
        refuse_persons(options.person, str(path))
        return read_idx(path, labels=options.labels, classes=options.classes)
    if reads_paths(options.person):
        what = f"person={options.person!r} (--person) reads the paths of image files, which {path} does not have"
        raise DataError(f"{what}; pass the name of a column, array or key")
    if suffix == ".tar":
        return list_webdataset(paths, **options.columns)
    if suffix == ".parquet":
        return list_parquet(paths, **options.columns)
    if len(paths) > 1:
        raise DataError(f"{path}: only .parquet and .tar files can be read in shards")
    if suffix == ".npz":
        columns = {name: value for name, value in options.columns.items() if name != "several"}
        return read_npz(path, split=options.split, **columns)
    raise DataError(f"{path}: unknown file type; expected a folder, .npz, .parquet, .tar or IDX images")


def expand_braces(pattern: str) -> list[str]:
    """Expand a brace pattern: `{000..003}` is a range, `{a,b}` is a list. Raise if a local file does not exist."""
    pieces = BRACES.split(pattern)
    choices = [[piece] if index % 2 == 0 else _expand_brace(piece) for index, piece in enumerate(pieces)]
    paths = ["".join(combination) for combination in product(*choices)]
    missing = next((path for path in paths if "://" not in path and not Path(path).is_file()), None)
    if missing is not None:
        raise DataError(f"{missing} does not exist (from the pattern {pattern})")
    return paths


def _expand_brace(piece: str) -> list[str]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", piece)
    if ends is None:
        return piece.split(",")
    first, last = ends.groups()
    if not 0 <= int(last) - int(first) < 100_000:
        raise DataError(f"the pattern {{{piece}}} is not an ascending range of at most 100,000 numbers")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
