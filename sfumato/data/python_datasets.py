"""Read data sets that are objects in Python: Hugging Face `datasets` and PyTorch datasets; write the former."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from sfumato.data.containers import IMAGE_COLUMNS, LABEL_COLUMNS
from sfumato.data.decode import Conversion, Item, Listing, PixelBuffer, Progress, convert, to_eight_bit, to_pil_image
from sfumato.data.errors import UNLABELLED_HINT, DataError, first_few, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.labels import SeveralLabels, encode_columns, encode_labels, one_label_each, split_columns
from sfumato.data.persons import person_name
from sfumato.data.save import encode_png

SAVED_DICT, SAVED_STATE = "dataset_dict.json", "state.json"  # files of `save_to_disk`


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` wrote this folder (`save_to_disk`)."""
    return (folder / SAVED_DICT).is_file() or ((folder / SAVED_STATE).is_file() and any(folder.glob("*.arrow")))


def is_hugging_face(source: Any) -> bool:
    """Return whether an object is a `Dataset` or `DatasetDict` of `datasets`, without importing it."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__)


def open_saved_dataset(folder: Path) -> Any:
    """Open a folder that `datasets` wrote."""
    try:
        return _datasets().load_from_disk(str(folder.absolute()))  # workers may have another working directory
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise DataError(f"{folder} is not a readable folder of datasets: {reason(error)}") from error


def list_hugging_face(
    source: Any,
    *,
    labels: bool,
    split: str,
    classes: Sequence[str] | None,
    person: str | None,
    label_column: str | None,
    several: SeveralLabels,
) -> Listing:
    """List the images of a Hugging Face data set. Its image files are decoded like all others."""
    if hasattr(source, "keys"):
        if split not in source:
            raise DataError(f"the data set has no split {split!r}, only {', '.join(source)}")
        source = source[split]
    if not hasattr(source, "__getitem__"):
        raise DataError("a streaming data set has no length; load it without streaming=True")
    columns = list(source.features)
    images = [name for name, kind in source.features.items() if type(kind).__name__ == "Image"]
    image = images[0] if images else _column(columns, IMAGE_COLUMNS)
    encoded = source.select_columns([image]).cast_column(image, _datasets().Image(decode=False))
    items = [Item(f"row {index}", _Cell(encoded, image, index).open) for index in range(len(source))]
    persons = None
    if person is not None:
        cells = source[_column(columns, (person,))]
        persons = [person_name(cell, f"row {index}") for index, cell in enumerate(cells)]
    if not labels:
        return Listing(items, len(items), persons=persons)
    used = split_columns(label_column or "") or [_column(columns, LABEL_COLUMNS)]
    rows = list(zip(*(list(source[_column(columns, (name,))]) for name in used), strict=True))
    if any(None in row for row in rows):
        raise DataError(f"an image of the data set has no label; {UNLABELLED_HINT}")
    kind = source.features[used[0]]
    names = getattr(kind, "names", None) or getattr(getattr(kind, "feature", None), "names", None)
    known = names if len(used) == 1 else None
    encoded_labels, found = encode_columns(used, rows, known, classes, several, "the data set")
    return Listing(items, len(items), encoded_labels, found, persons=persons)


class _Cell:
    """The bytes of one image of a data set, read when it is decoded."""

    def __init__(self, source: Any, column: str, index: int) -> None:
        self.source, self.column, self.index = source, column, index

    def open(self) -> BinaryIO:
        cell = self.source[self.index][self.column] or {}
        if cell.get("bytes") is not None:
            return io.BytesIO(cell["bytes"])
        if cell.get("path"):
            return open(cell["path"], "rb")
        raise DataError("holds no image")


def read_torch(
    source: Dataset[Any],
    conversion: Conversion,
    *,
    labels: bool,
    classes: Sequence[str] | None,
    several: SeveralLabels,
    progress: Progress | None,
) -> ImageSet:
    """Read a PyTorch data set of images, or of (image, label): Pillow images, uint8 tensors, floats in [0, 1]."""
    try:
        count = len(source)  # type: ignore[arg-type]
    except TypeError:
        raise DataError("a PyTorch data set needs a length (__len__); iterable data sets cannot be read") from None
    if count == 0:
        raise DataError("the data set holds no images")
    buffer, values = PixelBuffer(count, conversion.mode), []
    for index in range(count):
        image, label = _pair(source[index], index, labels)
        buffer.write(index, f"item {index}", convert(_image(image, index), conversion.size, conversion.mode))
        values.append(label.tolist() if isinstance(label, torch.Tensor | np.generic) else label)
        if progress is not None:
            progress(index + 1, count)
    if not labels:
        return ImageSet(buffer.images(count))
    known = classes or getattr(_innermost(source), "classes", None)
    known = None if known is None else [str(name) for name in known]
    single = one_label_each(values, known, several, "the data set")
    encoded, names = encode_labels(single, known, "the data set")
    return ImageSet(buffer.images(count), encoded, names)


def to_hugging_face(images: ImageSet) -> Any:
    """Return a Hugging Face `Dataset` with the columns `image` and `label` (extra `huggingface`)."""
    library = _datasets()
    features = {"image": library.Image()}
    columns: dict[str, Any] = {
        "image": [{"bytes": encode_png(pixels), "path": None} for pixels in images.images.numpy()]
    }
    if images.labels is not None:
        features["label"] = library.ClassLabel(names=list(images.classes))
        columns["label"] = images.labels.tolist()
    return library.Dataset.from_dict(columns, features=library.Features(features))


def _column(columns: Sequence[str], wanted: Sequence[str]) -> str:
    found = next((name for name in wanted if name in columns), None)
    if found is None:
        raise DataError(f"the data set has no column {wanted[0]!r}, only {first_few(columns, 12)}")
    return found


def _pair(item: Any, index: int, labels: bool) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list):
        if labels:
            raise DataError(f"item {index} of the data set has no label; {UNLABELLED_HINT}")
        return item, None
    if len(item) < 2 and labels:
        raise DataError(f"item {index} of the data set has no label; {UNLABELLED_HINT}")
    return item[0], item[1] if labels else None


def _image(value: Any, index: int) -> Image.Image:
    if isinstance(value, Image.Image):
        return to_eight_bit(value)
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise DataError(f"item {index} of the data set is a {type(value).__name__}, not an image")
    try:
        return to_pil_image(ImageSet.from_arrays(value[None]).images[0].numpy())
    except DataError as error:
        raise DataError(f"item {index} of the data set: {error}; leave out its normalisation") from error


def _innermost(source: Any) -> Any:
    """Return the data set below subsets."""
    while hasattr(source, "dataset") and not hasattr(source, "classes"):
        source = source.dataset
    return source


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise DataError("Hugging Face data sets need datasets: pip install 'sfumato[huggingface]'") from error
