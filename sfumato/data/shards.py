"""Find the shards of a source, read one with its SHA-256, and decode it to a file.

A shard is a WebDataset tar or a Parquet file (local, or by URL through `fsspec`), some files of a folder, or a part of
a data set in memory. All of them are read once as bytes, hashed, and decoded from these very bytes.

A source that is not made of shard files is divided into a fixed number of shards: each record's shard is an independent
uniform draw from a secret seed. So one more record moves no other one to another shard (proof 9 of docs/proofs.md).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import torch

from sfumato.data.containers import list_parquet, list_webdataset
from sfumato.data.decode import Conversion, Item, Listing, OnError, Pixels, convert, decode_item, to_pil_image
from sfumato.data.errors import DataError, first_few, reason
from sfumato.data.imageset import ImageSet
from sfumato.data.load import BRACES, ReadOptions, Split, expand_braces, find_source, select_split, with_classes
from sfumato.data.parallel import map_in_order
from sfumato.data.storage import FileRows, Spool

SUFFIXES = (".tar", ".parquet")
SHARDS = 32  # of a source that is not made of shard files; a constant, so it depends on no image
GLOB_CHARACTERS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Reading:
    """How to read a shard: the options of `load_images`, the same for all shards."""

    options: ReadOptions
    conversion: Conversion
    workers: int | None = None


@dataclass(frozen=True)
class Content:
    """The bytes of a file that were read into memory, under its name."""

    name: str
    data: bytes

    def open(self, mode: Literal["rb"], /) -> BinaryIO:  # noqa: ARG002
        return io.BytesIO(self.data)

    def __str__(self) -> str:
        return self.name


class Shard(Protocol):
    """A part of a source that is read at once."""

    @property
    def name(self) -> str: ...

    def read(self, reading: Reading, expected: str | None) -> tuple[Listing | ImageSet, str]:
        """Return the encoded images and the SHA-256 of what they were read from.

        - expected: SHA-256 of an earlier reading; other bytes raise `MissingShard` before they are parsed.
        """
        ...


class MissingShard(DataError):
    """A shard is not there, cannot be read, or has other bytes; this does not depend on the images in it.

    - name: of the shard.
    - what: what is wrong.
    - detail: for the person who holds the images, before the first release.
    """

    def __init__(self, name: str, what: str, detail: str = "") -> None:
        self.brief = f"the shard {name} {what}"
        super().__init__(self.brief + (f": {detail}" if detail else ""))


@dataclass(frozen=True)
class FileShard:
    """A tar or Parquet file, by path or URL.

    - address: where it is read. A path is absolute, because workers may have another working directory.
    """

    name: str
    address: str

    def read(self, reading: Reading, expected: str | None) -> tuple[Listing, str]:
        data = read_bytes(self.name, self.address)
        sha256 = _checked(self.name, hashlib.sha256(data), expected)
        reader = list_webdataset if self.name.lower().endswith(".tar") else list_parquet
        found = reader([Content(self.name, data)], **reading.options.columns)
        return with_classes(found, reading.options.classes, self.name), sha256


@dataclass(frozen=True)
class ItemsShard:
    """Some image files of a folder, or rows of a Hugging Face data set, with their labels and persons."""

    name: str
    listing: Listing

    def read(self, reading: Reading, expected: str | None) -> tuple[Listing, str]:  # noqa: ARG002
        digest, items = hashlib.sha256(f"{self.name}\0".encode()), []
        for item in self.listing.items:
            try:
                with item.open() as file:
                    data = file.read()
            except OSError as error:
                raise MissingShard(self.name, "cannot be read", f"{item.name}: {reason(error)}") from error
            digest.update(f"{item.name}\0{len(data)}\0".encode() + data)
            items.append(replace(item, open=partial(io.BytesIO, data)))
        return replace(self.listing, items=items), _checked(self.name, digest, expected)


@dataclass(frozen=True)
class ArrayShard:
    """Images in memory."""

    name: str
    images: ImageSet

    def read(self, reading: Reading, expected: str | None) -> tuple[ImageSet, str]:  # noqa: ARG002
        digest = hashlib.sha256(f"{self.name}\0".encode() + self.images.images.numpy().tobytes())
        return self.images, _checked(self.name, digest, expected)


@dataclass(frozen=True)
class Decoded:
    """A shard after it was read: pixels in a file, and what belongs to each image."""

    sha256: str
    pixels: FileRows
    labels: torch.Tensor | None
    persons: Sequence[str] | None
    classes: tuple[str, ...]
    skipped: int


def find_shards(source: Any, reading: Reading, seed: int) -> list[Shard]:
    """Return the shards of a directory, a glob, WebDataset's braces, a URL, or anything that `load_images` reads.

    - seed: 128 secret bits that divide a source which is not made of shard files.
    """
    names = _file_names(str(source), reading.options.split) if isinstance(source, str | Path) else []
    if names:
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f"{twice[0]} is listed twice in {source}; a shard counts once")
        return [FileShard(name, name if "://" in name else str(Path(name).absolute())) for name in names]
    found = find_source(source, reading.options, reading.conversion, reading.workers)
    where = str(source) if isinstance(source, str | Path) else "images"
    if isinstance(found, ImageSet):
        return split_images(found, seed, where)
    items = list(found.items)
    shards: list[Shard] = []
    for number, part in enumerate(_divide(len(items), seed)):
        labels, soft = (None if each is None else each[part] for each in (found.labels, found.soft_labels))
        own = [items[index] for index in part]
        persons = None if found.persons is None else [found.persons[index] for index in part]
        some = replace(found, items=own, count=len(own), labels=labels, persons=persons, soft_labels=soft)
        shards.append(ItemsShard(f"{where} [{number}]", some))
    return shards


def split_images(images: ImageSet, seed: int, name: str = "images") -> list[Shard]:
    """Return the shards of images in memory."""
    nothing = Listing([], 0, None if images.labels is None else images.labels[:0], tuple(images.classes))
    nothing = nothing if images.persons is None else replace(nothing, persons=[])
    shards: list[Shard] = []
    for number, part in enumerate(_divide(len(images), seed)):
        own = f"{name} [{number}]"
        shards.append(ArrayShard(own, images.subset(part)) if len(part) else ItemsShard(own, nothing))
    return shards


def _divide(records: int, seed: int) -> list[torch.Tensor]:
    """Return the records of each shard, which may have none.

    Guarantee: each record's number is an independent uniform draw from 0 to `SHARDS` - 1, whatever the other records.
    """
    number = torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).integers(SHARDS, size=records))
    return [(number == each).nonzero()[:, 0] for each in range(SHARDS)]


def _checked(name: str, digest: Any, expected: str | None) -> str:
    """Return the SHA-256 of a shard; raise if it is not the expected one."""
    found: str = digest.hexdigest()
    if expected is not None and found != expected:
        raise MissingShard(name, "was changed since it was first read")
    return found


def decode_shard(
    shard: Shard, reading: Reading, on_error: OnError, spool: Spool | None = None, expected: str | None = None
) -> Decoded:
    """Read a shard and decode its images to a file (`spool`). Memory: the encoded shard and a few images.

    - expected: SHA-256 that the shard must have, default None: any.
    """
    found, sha256 = shard.read(reading, expected)
    conversion = reading.conversion
    if isinstance(found, ImageSet):
        wanted = [convert(to_pil_image(each), conversion.size, conversion.mode) for each in found.images.numpy()]
        rows = FileRows(wanted[0].shape, np.uint8, spool)
        rows.write(0, np.stack(wanted))
        persons = None if found.persons is None else [str(int(each)) for each in found.persons]
        return Decoded(sha256, rows, found.labels, persons, tuple(found.classes), 0)
    pixels: FileRows | None = None
    kept: list[int] = []
    skipped = 0

    def decode_one(item: Item) -> tuple[str, list[Pixels] | DataError]:
        return decode_item(item, conversion)

    with closing(map_in_order(decode_one, found.items, reading.workers)) as results:
        for index, (name, result) in enumerate(results):
            if isinstance(result, DataError):
                if on_error == "raise":
                    raise DataError(f"{shard.name}: {result}")
                skipped += 1
                continue
            if len(result) > 1 and found.persons is None:
                raise DataError(f"{name} of {shard.name} holds several images of one person; pass person (--person)")
            for image in result:
                image = image if conversion.mode != "rgb" or len(image) == 3 else np.repeat(image, 3, 0)
                pixels = pixels or FileRows(image.shape, np.uint8, spool)
                if image.shape != pixels.shape[1:]:
                    raise DataError(f"{name} of {shard.name} has another size or colour; pass size and mode")
                pixels.write(len(kept), image[None])
                kept.append(index)
    if pixels is None and isinstance(shard, FileShard):
        raise DataError(f"{shard.name} holds no image that can be read")
    pixels = pixels or FileRows((0,), np.uint8, spool)
    labels = None if found.labels is None else found.labels[torch.tensor(kept, dtype=torch.int64)]
    persons = None if found.persons is None else [found.persons[index] for index in kept]
    return Decoded(sha256, pixels, labels, persons, tuple(found.classes), skipped)


def read_bytes(name: str, address: str) -> bytes:
    """Return the content of a file, local or by URL; errors name it by `name`."""
    try:
        if "://" not in address:
            return Path(address).read_bytes()
        with _fsspec().open(address, "rb") as file:
            data: bytes = file.read()
            return data
    except Exception as error:  # file systems of fsspec raise many kinds
        raise MissingShard(name, "cannot be read", reason(error)) from error


def _file_names(source: str, split: Split) -> list[str]:
    """Return the addresses of tar and Parquet files that a source names; none if it names something else."""
    if "://" in source:
        names = _remote_names(source)
    elif BRACES.search(source):
        names = expand_braces(str(Path(source).expanduser()))
    elif GLOB_CHARACTERS.search(source) and not Path(source).exists():
        path = Path(source).expanduser()
        plain = next(index for index, part in enumerate(path.parts) if GLOB_CHARACTERS.search(part))
        pattern = str(PurePosixPath(*path.parts[plain:]))
        names = sorted(str(each) for each in Path(*path.parts[:plain]).glob(pattern) if each.is_file())
        if not names:
            raise DataError(f"no file matches {source}")
    else:
        path = Path(source).expanduser()
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        for suffix in SUFFIXES:
            some = [file for file in files if file.suffix.lower() == suffix and not file.name.startswith(".")]
            if some:
                return [str(each) for each in select_split(path, some, split)]
        return []
    if other := [name for name in names if not name.lower().endswith(SUFFIXES)]:
        raise DataError(f"{first_few(other)}: only .tar and .parquet files can be read in shards")
    return names


def _remote_names(source: str) -> list[str]:
    if BRACES.search(source):
        return expand_braces(source)
    if source.lower().endswith(SUFFIXES) and not GLOB_CHARACTERS.search(source):
        return [source]
    try:
        system, path = _fsspec().core.url_to_fs(source)
        found = system.glob(path) if GLOB_CHARACTERS.search(source) else system.ls(path, detail=False)
        names = sorted(system.unstrip_protocol(each) for each in found)
    except Exception as error:
        raise DataError(f"{source} cannot be listed: {reason(error)}; name the shards with braces") from error
    chosen = [name for name in names if PurePosixPath(name).suffix.lower() in SUFFIXES]
    if not chosen:
        raise DataError(f"{source} holds no .tar or .parquet files")
    return chosen


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise DataError("shards by URL need fsspec: pip install 'sfumato[cluster]'") from error
    return fsspec
