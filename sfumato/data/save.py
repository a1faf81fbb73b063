"""Write image sets as a folder of PNG files, as `.npz`, or as `.parquet` in the Hugging Face layout."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.data.atomic import replacing
from sfumato.data.containers import import_pyarrow
from sfumato.data.decode import to_pil_image
from sfumato.data.errors import DataError
from sfumato.data.folders import folder_name
from sfumato.data.imageset import ImageSet
from sfumato.data.labels import SOFT_LABELS
from sfumato.data.parallel import map_in_order
from sfumato.progress import bar

ROWS_PER_GROUP = 1000


def save_images(images: ImageSet, target: str | Path, *, overwrite: bool = False) -> Path:
    """Write a set in the format of the file extension: `.npz`, `.parquet`, or none for a folder of PNG files.

    The folder contains `<class>/<number>.png` (flat if unlabelled), where the number is the index in the set. Reading
    it back sorts the classes by name. The other two formats keep the order of the classes. They also hold soft labels,
    which a folder cannot. Persons are private and never written.
    """
    target = Path(target)
    write = _writer(target)
    if write is _write_folder and images.soft_labels is not None:
        raise DataError(f"{target}: a folder of PNG files cannot hold soft labels; save them as .npz or .parquet")
    if overwrite:
        _check_replaceable(target)
    with replacing(target, overwrite=overwrite) as temporary:
        write(images, temporary)
    return target


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode one image [C, H, W] as PNG."""
    buffer = io.BytesIO()
    to_pil_image(pixels).save(buffer, "png")
    return buffer.getvalue()


def _writer(target: Path) -> Callable[[ImageSet, Path], None]:
    writers = {"": _write_folder, ".npz": _write_npz, ".parquet": _write_parquet}
    suffix = target.suffix.lower()
    if suffix not in writers:
        raise DataError(f"{target}: unknown extension {suffix!r}; use .npz, .parquet, or none for a folder")
    return writers[suffix]


def _check_replaceable(target: Path) -> None:
    """Refuse to replace a folder that holds anything other than PNG files."""
    if target.is_dir():
        files = (path for path in sorted(target.rglob("*")) if not path.is_dir())
        foreign = next((path.relative_to(target) for path in files if path.suffix != ".png"), None)
        if foreign is not None:
            raise DataError(f"{target} is not replaced because it also holds {foreign}; remove that file first")


def _file_names(count: int) -> list[str]:
    width = max(5, len(str(count - 1)))
    return [f"{index:0{width}}.png" for index in range(count)]


def _write_folder(images: ImageSet, folder: Path) -> None:
    folder.mkdir()
    names = _file_names(len(images))
    if images.labels is None:
        paths = [folder / name for name in names]
    else:
        places = [folder / folder_name(name) for name in images.classes]
        labels = images.labels.tolist()
        for place in places:
            place.mkdir()
        paths = [places[label] / name for label, name in zip(labels, names, strict=True)]

    def write(index: int) -> None:
        paths[index].write_bytes(encode_png(images.images[index].numpy()))

    with closing(map_in_order(write, range(len(images)))) as written, bar("writing images") as advance:
        for index, _ in enumerate(written):
            advance(index + 1, len(images))


def _write_npz(images: ImageSet, path: Path) -> None:
    arrays: dict[str, Any] = {"images": images.images.numpy()}
    if images.labels is not None:
        arrays |= {"labels": images.labels.numpy(), "classes": np.array(images.classes, dtype=np.str_)}
    if images.soft_labels is not None:
        arrays[SOFT_LABELS] = images.soft_labels.numpy()
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _write_parquet(images: ImageSet, path: Path) -> None:
    pyarrow = import_pyarrow()
    columns = {"image": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})}
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    if images.labels is not None:
        columns["label"] = pyarrow.int64()
        features["label"] = {"names": list(images.classes), "_type": "ClassLabel"}
    if images.soft_labels is not None:
        columns[SOFT_LABELS] = pyarrow.list_(pyarrow.float32())
        features[SOFT_LABELS] = {"feature": {"dtype": "float32", "_type": "Value"}, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pyarrow.schema(columns, metadata=metadata)
    names = _file_names(len(images))
    with (
        pyarrow.parquet.ParquetWriter(path, schema) as writer,
        closing(map_in_order(encode_png, images.images.numpy())) as encoded,
    ):
        for start in range(0, len(images), ROWS_PER_GROUP):
            chosen = names[start : start + ROWS_PER_GROUP]
            rows: dict[str, Any] = {"image": [{"bytes": next(encoded), "path": name} for name in chosen]}
            if images.labels is not None:
                rows["label"] = images.labels[start : start + ROWS_PER_GROUP].tolist()
            if images.soft_labels is not None:
                rows[SOFT_LABELS] = images.soft_labels[start : start + ROWS_PER_GROUP].tolist()
            writer.write_table(pyarrow.table(rows, schema=schema))
