"""List the encoded images in Parquet files (Hugging Face layout) and WebDataset tar shards."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, Literal, Protocol

from sfumato.data.decode import SUFFIXES, Item, Listing
from sfumato.data.errors import UNLABELLED_HINT, DataError, first_few, reason
from sfumato.data.labels import (
    SOFT_LABELS,
    SeveralLabels,
    encode_columns,
    encode_labels,
    encode_soft_labels,
    one_label_each,
    split_columns,
)
from sfumato.data.persons import person_name

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels")
ROWS_PER_BATCH = 256
# Order of preference if a sample has several: a class index is more specific than a caption.
LABEL_SUFFIXES = (".cls", ".json", ".txt")


class Openable(Protocol):
    """A file: a path, or its content in memory (`shards.Content`)."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...


def list_parquet(
    paths: Sequence[Openable],
    *,
    labels: bool,
    classes: Sequence[str] | None = None,
    person: str | None = None,
    label_column: str | None = None,
    several: SeveralLabels = "combine",
) -> Listing:
    """List the images of Parquet shards.

    - classes: class names, used if the schema metadata has none.
    - person: column that holds the person of each image.
    - label_column: column that holds the labels, or several with commas between; default: label.
    """
    chosen = split_columns(label_column or "")
    pyarrow = import_pyarrow()
    rows, values, soft_labels, names, columns, people = 0, list[tuple[Any, ...]](), [], [], [], []
    for path in paths:
        try:
            with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
                schema = file.schema_arrow
                columns.append(_column(path, schema, IMAGE_COLUMNS))
                rows += file.metadata.num_rows
                if person is not None:
                    cells = file.read([_column(path, schema, (person,))]).column(person).to_pylist()
                    people += [person_name(cell, f"{path.name} row {row}") for row, cell in enumerate(cells)]
                if labels:
                    used = [_column(path, schema, (name,)) for name in chosen] or [_column(path, schema, LABEL_COLUMNS)]
                    values += zip(*(file.read([name]).column(name).to_pylist() for name in used), strict=True)
                    names.append(_class_names(path, schema, used[0]) if len(used) == 1 else None)
                    if SOFT_LABELS in schema.names:
                        soft_labels += file.read([SOFT_LABELS]).column(SOFT_LABELS).to_pylist()
        except DataError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {reason(error)}") from error
    items = _parquet_items(pyarrow, list(zip(paths, columns, strict=True)))
    persons = None if person is None else people
    if not labels:
        return Listing(items, rows, persons=persons)
    empty = next((row for row, cells in enumerate(values) if None in cells), None)
    if empty is not None:
        raise DataError(f"row {empty} of {_name_shards(paths)} has no label; {UNLABELLED_HINT}")
    if any(other != names[0] for other in names):
        raise DataError(f"the shards {_name_shards(paths)} have different class names")
    if soft_labels and len(soft_labels) < rows:
        raise DataError(f"only some of the shards {_name_shards(paths)} have soft labels")
    soft = encode_soft_labels(soft_labels) if soft_labels else None
    encoded, known = encode_columns(used, values, names[0], classes, several, _name_shards(paths))
    return Listing(items, rows, encoded, known, soft_labels=soft, persons=persons)


def import_pyarrow() -> ModuleType:
    """Import pyarrow, an optional dependency that only Parquet files need."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Parquet files need pyarrow: pip install 'sfumato[parquet]'") from error
    module: ModuleType = pyarrow
    return module


def _column(path: Openable, schema: Any, wanted: tuple[str, ...]) -> str:
    found = next((name for name in wanted if name in schema.names), None)
    if found is None:
        hint = f"; {UNLABELLED_HINT}" if wanted == LABEL_COLUMNS else ""
        raise DataError(f"{path} has no column {wanted[0]!r}, only {', '.join(schema.names)}{hint}")
    return found


def _class_names(path: Openable, schema: Any, column: str) -> tuple[str, ...] | None:
    """Read class names from the `huggingface` metadata (ClassLabel) or from a comma-separated `classes` entry."""
    metadata = schema.metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = features.get(column, {}).get("names")
        if names is None and b"classes" in metadata:
            names = metadata[b"classes"].decode().split(",")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} has unreadable schema metadata: {reason(error)}") from error
    return None if names is None else tuple(str(name) for name in names)


def _parquet_items(pyarrow: ModuleType, shards: Sequence[tuple[Openable, str]]) -> Iterator[Item]:
    for path, column in shards:
        try:
            with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
                number = count()
                for batch in file.iter_batches(ROWS_PER_BATCH, columns=[column]):
                    for cell in batch.column(0).to_pylist():
                        yield _bytes_item(cell, f"{path.name} row {next(number)}")
        except DataError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {reason(error)}") from error


def _bytes_item(cell: Any, name: str) -> Item:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise DataError(f"{name} holds no image bytes; embed the images in the file, not only their paths")
    return Item(name, partial(io.BytesIO, content))


@dataclass(frozen=True)
class _ByteRange:
    """Position of a member within a tar file; read only when it is decoded."""

    path: Openable
    offset: int
    size: int

    def open(self) -> BinaryIO:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return io.BytesIO(file.read(self.size))


def list_webdataset(
    paths: Sequence[Openable],
    *,
    labels: bool,
    classes: Sequence[str] | None = None,
    person: str | None = None,
    label_column: str | None = None,
    several: SeveralLabels = "combine",
) -> Listing:
    """List the samples of WebDataset shards. Members whose names agree up to the first dot form one sample.

    - person, label_column: keys in the `.json` members that hold the person and the label of each image.
    """
    items: list[Item] = []
    values: list[int | str | list[Any]] = []
    people: list[str] = []
    for path in paths:
        for key, sample in _read_samples(path).items():
            image = next((member for suffix, member in sample.items() if suffix in SUFFIXES), None)
            if image is None:
                raise DataError(f"{path}: sample {key!r} has no image among {first_few(sorted(sample))}")
            name = f"{path.name}:{image.name}"
            items.append(Item(name, _ByteRange(path, image.offset_data, image.size).open))
            if labels:
                values.append(_tar_label(path, key, sample, label_column))
            if person is not None:
                people.append(_tar_person(path, key, sample, person))
    if not items:
        raise DataError(f"{_name_shards(paths)} holds no images")
    persons = None if person is None else people
    if not labels:
        return Listing(items, len(items), persons=persons)
    if len({type(value) for value in values}) > 1:
        raise DataError(f"{_name_shards(paths)} mixes numbers and names as labels; use only one kind")
    single = one_label_each(values, classes, several, _name_shards(paths))
    return Listing(items, len(items), *encode_labels(single, classes, _name_shards(paths)), persons=persons)


def _read_samples(path: Openable) -> dict[str, dict[str, tarfile.TarInfo]]:
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with path.open("rb") as opened, tarfile.open(fileobj=opened, mode="r:") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if not member.isfile() or name.name.startswith("."):
                    continue
                stem, _, suffix = name.name.partition(".")
                sample = samples.setdefault((name.parent / stem).as_posix(), {})
                if f".{suffix.lower()}" in sample:
                    raise DataError(f"{path} holds {member.name} twice")
                sample[f".{suffix.lower()}"] = member
            opened.seek(archive.offset)
            if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # `tarfile` takes this for the end
                raise tarfile.ReadError("it is truncated")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a readable (uncompressed) tar file: {reason(error)}") from error
    return samples


def _tar_label(
    path: Openable, key: str, sample: dict[str, tarfile.TarInfo], column: str | None
) -> int | str | list[Any]:
    suffixes = LABEL_SUFFIXES if column is None else (".json",)
    suffix = next((suffix for suffix in suffixes if suffix in sample), None)
    if suffix is None:
        raise DataError(f"{path}: sample {key!r} has no label ({', '.join(suffixes)}); {UNLABELLED_HINT}")
    member = sample[suffix]
    try:
        value = _tar_json(path, member)[column or "label"] if suffix == ".json" else _tar_text(path, member)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the label in {member.name} cannot be read: {reason(error)}") from error
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str | list) or value in ("", []):
        raise DataError(f"{path}: the label in {member.name} is neither a whole number nor a name")
    return value


def _tar_person(path: Openable, key: str, sample: dict[str, tarfile.TarInfo], person: str) -> str:
    member = sample.get(".json")
    if member is None:
        raise DataError(f"{path}: sample {key!r} has no .json member with the key of person={person!r} (--person)")
    try:
        value = _tar_json(path, member)[person]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: {member.name} has no person under {person!r}: {reason(error)}") from error
    return person_name(value, f"{path}: {person!r} in {member.name}")


def _tar_json(path: Openable, member: tarfile.TarInfo) -> Any:
    return json.loads(_tar_text(path, member))


def _tar_text(path: Openable, member: tarfile.TarInfo) -> str:
    return _ByteRange(path, member.offset_data, member.size).open().read().decode().strip()


def _name_shards(paths: Sequence[Openable]) -> str:
    return first_few([str(path) for path in paths], limit=1)
