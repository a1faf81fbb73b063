"""Image sets in shards: labels and persons are known, pixels stay in files or on the workers of a cluster."""

from __future__ import annotations

import json
import secrets
import warnings
from array import array
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
from sfumato.data.load import Split, check_classes, check_number, check_options
from sfumato.data.medical import ValueRange
from sfumato.data.persons import encode_persons
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
    - seed: see `find_shards`. file: the manifest, if there is one.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        outline: ImageSet,
        executor: Executor,
        alone: bool,
        seed: int,
        file: Path | None = None,
    ) -> None:
        self.entries, self.outline, self.executor, self._alone = tuple(entries), outline, executor, alone
        self._seed, self.file = seed, file

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

    def save_manifest(self, path: Path) -> None:
        """Write the manifest to a file that only this user can read."""
        lines = [asdict(line) for line in self.manifest()]
        content = {"format": FORMAT, "seed": f"{self._seed:032x}", "shards": lines}
        with replacing(path, overwrite=False) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(content, indent=1))

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
    - manifest: JSON file with the hash of each shard; private. If it exists, a shard that is missing, additional or
      changed is refused; otherwise it is written. It may not be in the folder of a run.
    - workers: decoding threads of each worker.
    - others: see `load_images`.
    """
    conversion = Conversion(size, mode, frames, value_range)
    options = check_options(conversion, split, labels, on_error, classes, person, label_column, several_labels)
    reading, file = Reading(options, conversion, workers), None if manifest is None else Path(manifest)
    seed, lines = (secrets.randbits(128), None) if file is None or not file.exists() else _read_manifest(file)
    shards = split_images(source, seed) if isinstance(source, ImageSet) else find_shards(source, reading, seed)
    expected = None if file is None or lines is None else _match(file, lines, shards)
    executor = connect(cluster)
    own, alone = replace(reading, workers=workers or getattr(executor, "threads", None)), executor is not cluster
    try:
        entries, outline = _load(shards, own, on_error, executor, expected, source, progress)
        images = ShardedImages(entries, outline, executor, alone, seed, file)
        if file is not None and expected is None:
            images.save_manifest(file)
        return images
    except BaseException:
        if alone:
            executor.close()
        raise


def _load(
    shards: Sequence[Shard],
    reading: Reading,
    on_error: OnError,
    executor: Executor,
    expected: dict[str, ManifestLine] | None,
    source: Any,
    progress: Progress | None,
) -> tuple[list[Entry], ImageSet]:
    """Decode all shards, check them, and return them with everything but their pixels."""
    owner = secrets.token_hex(16)
    entries = [
        Entry(owner, number, shard, reading, on_error, None if expected is None else expected[shard.name].sha256)
        for number, shard in enumerate(shards)
    ]
    found: dict[int, Loaded] = {}
    names: dict[str, int] = {}
    loaded: list[Loaded] = []
    labels, persons = bytearray(), bytearray()  # one block each: small tensors between shards would split the heap
    for result in executor.load(entries):
        if isinstance(result, Failure):
            raise DataError(result.message or f"{shards[result.number].name} cannot be read: {result.kind}")
        found[result.number] = result
        while len(loaded) in found:  # persons are numbered in the order of the manifest, whichever shard comes first
            each = found.pop(len(loaded))
            if each.persons is not None:
                persons += array("q", [names.setdefault(name, len(names)) for name in each.persons]).tobytes()
            if each.labels is not None:
                labels += each.labels.to(torch.int32).numpy().tobytes()
            loaded.append(replace(each, persons=None, labels=None))
        if progress is not None:
            progress(len(loaded), len(entries))
    if len(loaded) < len(entries):
        raise DataError("a worker did not return all shards; nothing was released")
    _check_alike(shards, loaded)
    entries = [
        replace(entry, sha256=each.sha256, records=each.records) for entry, each in zip(entries, loaded, strict=True)
    ]
    some = [each for each in loaded if each.records]
    blank = torch.zeros(1, dtype=torch.uint8).expand(sum(each.records for each in some), *some[0].shape)
    known = torch.frombuffer(labels, dtype=torch.int32).long() if labels else None
    owners = torch.frombuffer(persons, dtype=torch.int64) if persons else None
    people = None if owners is None else encode_persons(list(names))[owners]  # names as `load_images` reads them
    outline = ImageSet(blank, known, some[0].classes, persons=people)
    check_number(outline, source, warn=reading.options.split == "train")
    check_classes(outline, source)
    if skipped := sum(each.skipped for each in loaded):
        warnings.warn(DataWarning(f"{skipped} files cannot be read and were left out"), stacklevel=3)
    return entries, outline


def _check_alike(shards: Sequence[Shard], loaded: Sequence[Loaded]) -> None:
    """Raise unless all shards have one shape and the same classes, and no two have the same content."""
    seen: dict[str, str] = {}
    first = next((each for each in loaded if each.records), None)
    if first is None:
        raise DataError("no image could be read")
    for shard, each in zip(shards, loaded, strict=True):
        if each.sha256 in seen:
            raise DataError(f"{shard.name} has the same content as {seen[each.sha256]}; a shard counts once")
        seen[each.sha256] = shard.name
        if each.records and each.shape != first.shape:
            raise DataError(f"{shard.name} has images of another size or colour; pass size and mode (--size, --mode)")
        if each.classes != first.classes:
            raise DataError(f"{shard.name} has other classes than {shards[0].name}; pass classes (--classes)")


def check_apart(manifest: str | Path | None, folder: str | Path | None) -> None:
    """Refuse a manifest in the folder of a run: it is private, and the folder is made to be shared."""
    if manifest is not None and folder is not None and Path(manifest).resolve().is_relative_to(Path(folder).resolve()):
        what = f"the manifest {manifest} would lie in {folder}, which is made to be shared"
        raise DataError(f"{what}; it is private, because it tells the number of images. Choose another place")


def _read_manifest(path: Path) -> tuple[int, list[ManifestLine]]:
    """Return the seed and the lines of a manifest."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError
        return int(content["seed"], 16), [ManifestLine(**line) for line in content["shards"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{path} is not a manifest of shards") from error


def _match(path: Path, lines: Sequence[ManifestLine], shards: Sequence[Shard]) -> dict[str, ManifestLine]:
    """Return the lines of a manifest by name; raise unless they name these shards."""
    known = {line.name: line for line in lines}
    if len(known) < len(lines):
        raise DataError(f"{path} lists a shard twice; a shard counts once")
    names = {shard.name for shard in shards}
    for what, some in (("is missing", known.keys() - names), ("is not in the manifest", names - known.keys())):
        if some:
            raise DataError(f"the shard {min(some)} {what} ({path}); nothing was released")
    return known
