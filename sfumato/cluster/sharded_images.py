"""Image sets in shards: labels and persons are known, pixels stay in files or on the workers of a cluster."""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sfumato.cluster.executors import Executor, connect
from sfumato.cluster.worker import Entry, Failure, Loaded
from sfumato.data.atomic import replacing
from sfumato.data.decode import Conversion, Frames, Mode, OnError, Progress
from sfumato.data.errors import DataError, DataWarning
from sfumato.data.imageset import ImageSet, PublicFacts, image_digests
from sfumato.data.labels import Classes, SeveralLabels
from sfumato.data.load import Split, check_number, check_options
from sfumato.data.medical import ValueRange
from sfumato.data.shards import Reading, Shard, find_shards, split_images

FORMAT = "sfumato-manifest/1"


@dataclass(frozen=True)
class ManifestLine:
    """A shard: its name, the SHA-256 of its content, and its number of records; private."""

    name: str
    sha256: str
    records: int


class ShardedImages:
    """Images in shards. Everything but the pixels is in memory.

    - entries: the shards, in the order of the manifest. outline: labels, classes, persons, and blank pixels.
    - executor: where the pixels are. alone: whether nothing else uses it, so that `close` closes it.
    """

    def __init__(self, entries: Sequence[Entry], outline: ImageSet, executor: Executor, alone: bool) -> None:
        self.entries, self.outline, self.executor, self._alone = tuple(entries), outline, executor, alone

    def __len__(self) -> int:
        return len(self.outline)

    def __repr__(self) -> str:
        return f"ShardedImages(shape={self.shape}, classes={len(self.classes)}, labelled={self.labelled})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.outline.shape

    @property
    def classes(self) -> Sequence[str]:
        return self.outline.classes

    @property
    def labelled(self) -> bool:
        return self.outline.labelled

    @property
    def persons(self) -> torch.Tensor | None:
        return self.outline.persons

    def public(self, declare_size: bool = False) -> PublicFacts:
        """Return the public facts. The number of images in each class is included only if declared public."""
        return self.outline.public(declare_size)

    def manifest(self) -> list[ManifestLine]:
        """Return the shards with their hashes. Private: it tells the number of images."""
        return [ManifestLine(entry.shard.name, entry.sha256 or "", entry.records) for entry in self.entries]

    def contains(self, images: ImageSet) -> list[int]:
        """Return the indices of images that are also in this set, pixel for pixel."""
        digests = list(image_digests(images)) if images.shape == self.shape else []
        found: set[bytes] = set()
        for result in self.executor.matches(frozenset(digests), self.entries) if digests else ():
            if isinstance(result, Failure):
                raise DataError(result.message or f"a shard cannot be read: {result.kind}")
            found |= result
        return [index for index, digest in enumerate(digests) if digest in found]

    def close(self) -> None:
        """Delete the pixels, and stop a cluster that was started for these images."""
        if self._alone:
            self.executor.close()
        else:
            self.executor.forget(self.entries[0].owner)

    def __enter__(self) -> ShardedImages:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_shards(
    source: Any,
    *,
    cluster: Any = None,
    manifest: str | Path | None = None,
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
) -> ShardedImages:
    """Read an image set shard by shard. Pixels are decoded once, to files without a name, and never loaded whole.

    - source: a directory, glob (`scans/*.tar`) or pattern with braces (`w-{000..999}.tar`) of WebDataset or Parquet
      files, local or by URL (`s3://…`, `https://…`, through fsspec); or anything that `load_images` reads.
    - cluster: where to compute, default None: in this process; see `connect`.
    - manifest: JSON file with the hash of each shard. If it exists, a shard that is missing, additional or changed is
      refused; otherwise it is written.
    - workers: decoding threads of each worker.
    - others: see `load_images`.
    """
    conversion = Conversion(size, mode, frames, value_range)
    options = check_options(conversion, split, labels, on_error, classes, person, label_column, several_labels)
    reading = Reading(options, conversion, workers)
    shards = split_images(source) if isinstance(source, ImageSet) else find_shards(source, reading)
    executor = connect(cluster)
    own, alone = replace(reading, workers=workers or getattr(executor, "threads", None)), executor is not cluster
    try:
        return _load(shards, own, on_error, executor, alone, manifest, source, progress)
    except BaseException:
        if alone:
            executor.close()
        raise


def _load(
    shards: Sequence[Shard],
    reading: Reading,
    on_error: OnError,
    executor: Executor,
    alone: bool,
    manifest: str | Path | None,
    source: Any,
    progress: Progress | None,
) -> ShardedImages:
    expected = None if manifest is None else _read_manifest(Path(manifest), shards)
    owner = secrets.token_hex(16)
    entries = [
        Entry(owner, number, shard, reading, on_error, None if expected is None else expected[shard.name].sha256)
        for number, shard in enumerate(shards)
    ]
    found: dict[int, Loaded] = {}
    names: dict[str, int] = {}
    loaded: list[Loaded] = []
    persons: list[torch.Tensor] = []
    for result in executor.load(entries):
        if isinstance(result, Failure):
            raise DataError(result.message or f"{shards[result.number].name} cannot be read: {result.kind}")
        found[result.number] = result
        while len(loaded) in found:  # persons are numbered in the order of the manifest, whichever shard comes first
            each = found.pop(len(loaded))
            if each.persons is not None:
                persons.append(torch.tensor([names.setdefault(name, len(names)) for name in each.persons]))
            loaded.append(replace(each, persons=None))
        if progress is not None:
            progress(len(loaded), len(entries))
    if len(loaded) < len(entries):
        raise DataError("a worker did not return all shards; nothing was released")
    _check_alike(shards, loaded)
    entries = [
        replace(entry, sha256=each.sha256, records=each.records) for entry, each in zip(entries, loaded, strict=True)
    ]
    blank = torch.zeros(1, dtype=torch.uint8).expand(sum(each.records for each in loaded), *loaded[0].shape)
    labels = [each.labels for each in loaded if each.labels is not None]
    people = torch.cat(persons) if persons else None
    if isinstance(source, ImageSet) and source.persons is not None:
        people = source.persons
    outline = ImageSet(blank, torch.cat(labels) if labels else None, loaded[0].classes, persons=people)
    check_number(outline, source, warn=reading.options.split == "train")
    if skipped := sum(each.skipped for each in loaded):
        warnings.warn(DataWarning(f"{skipped} files cannot be read and were left out"), stacklevel=3)
    images = ShardedImages(entries, outline, executor, alone)
    if manifest is not None and expected is None:
        content = {"format": FORMAT, "shards": [asdict(line) for line in images.manifest()]}
        with replacing(Path(manifest), overwrite=False) as partial:
            partial.write_text(json.dumps(content, indent=1))
    return images


def _check_alike(shards: Sequence[Shard], loaded: Sequence[Loaded]) -> None:
    """Raise unless all shards have one shape and the same classes, and no two have the same content."""
    seen: dict[str, str] = {}
    for shard, each in zip(shards, loaded, strict=True):
        if each.sha256 in seen:
            raise DataError(f"{shard.name} has the same content as {seen[each.sha256]}; a shard counts once")
        seen[each.sha256] = shard.name
        if each.shape != loaded[0].shape:
            raise DataError(f"{shard.name} has images of another size or colour; pass size and mode (--size, --mode)")
        if each.classes != loaded[0].classes:
            raise DataError(f"{shard.name} has other classes than {shards[0].name}; pass classes (--classes)")


def _read_manifest(path: Path, shards: Sequence[Shard]) -> dict[str, ManifestLine] | None:
    """Return the lines of a manifest by name, or None if there is no file yet."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        lines = [ManifestLine(**line) for line in content["shards"]] if content["format"] == FORMAT else []
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a manifest of shards") from error
    known = {line.name: line for line in lines}
    if len(known) < len(lines):
        raise DataError(f"{path} lists a shard twice; a shard counts once")
    names = {shard.name for shard in shards}
    for what, some in (("is missing", known.keys() - names), ("is not in the manifest", names - known.keys())):
        if some:
            raise DataError(f"the shard {min(some)} {what} ({path}); nothing was released")
    return known
