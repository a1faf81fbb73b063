"""A worker: it reads shards, keeps their pixels in files without a name, and computes exact sums over them (trusted).

The same class runs in the driver's process and as an actor of a cluster. It logs and prints nothing. An error becomes a
`Failure` without its message, because the message could contain pixel values.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

import sfumato.data
from sfumato.cluster.shard_records import ShardRecords
from sfumato.data.decode import OnError
from sfumato.data.errors import DataError
from sfumato.data.shards import Decoded, MissingShard, Reading, Shard, decode_shard
from sfumato.data.storage import FileRows, Spool
from sfumato.privacy import Release
from sfumato.privacy.records import Query

MAX_EXACT_INTEGER = 2**53  # float64 represents integers up to this


OTHER_PROGRAM = "a worker has another version of sfumato, Python, torch, numpy or Pillow than the driver"


class ShardError(DataError):
    """A query stopped for a reason that does not depend on an image: a shard or a machine is gone. Charges stand."""


class WorkersDied(RuntimeError):
    """One call ended several workers in a row. That may depend on an image, so that it voids a run."""


@dataclass(frozen=True)
class Entry:
    """A shard of the manifest as the workers need it; private.

    - owner: identifies the image set; several may be on the same workers.
    - first: number of the first record in the whole set.
    - units, weights, groups: of each record, see `ShardRecords`; None if each image is a unit, of weight 1.
    """

    owner: str
    number: int
    shard: Shard
    reading: Reading
    on_error: OnError
    sha256: str | None = None
    records: int = 0
    first: int = 0
    units: Tensor | None = None
    weights: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True)
class Loaded:
    """What the driver learns about a shard: no pixels."""

    number: int
    sha256: str
    records: int
    shape: tuple[int, ...]
    labels: Tensor | None
    persons: Sequence[str] | None
    classes: tuple[str, ...]
    skipped: int


@dataclass(frozen=True)
class Step:
    """A map that was applied to the records: its traced graph, the shape of a row, batch size and key."""

    identity: str
    graph: Any
    shape: torch.Size
    size: int
    key: bytes


@dataclass(frozen=True)
class Task:
    """A query as it travels: the traced graph with constants, clipping norm and grid, and the key of the sample."""

    identity: str
    query: Query
    release: Release
    lanes: int
    size: int
    shared: list[Tensor]
    normals: tuple[int, ...]
    key: bytes
    device: str
    integer: bool
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Partial:
    """The exact sum over one shard; private. The driver takes one for each entry of the manifest."""

    task: str
    number: int
    sha256: str
    total: Tensor


@dataclass(frozen=True)
class Failure:
    """An error on a worker: `message` only where it does not depend on an image, else None."""

    number: int
    kind: str
    message: str | None = None


@dataclass
class _LoadedShard:
    """A shard on this worker, and the rows of maps by their identity. All rows are in the file: memory stays flat."""

    sha256: str
    pixels: FileRows
    labels: FileRows | None
    mapped: dict[str, FileRows] = field(default_factory=dict)


class Worker:
    """Reads shards and sums over them, one call at a time: the rows of two calls may not mix in the file.

    - code: digest of the driver's program (`code_digest`); a worker with another program fails.
    """

    def __init__(self, code: str | None = None) -> None:
        self._held: dict[tuple[str, int], _LoadedShard] = {}
        self._spool = Spool()
        self._unpacked: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._same_code = code is None or code == code_digest()

    def load(self, entry: Entry) -> Loaded | Failure:
        """Read, hash and decode a shard; return what is known about it."""

        def load() -> Loaded:
            found = self._read(entry)
            shape, count = tuple(found.pixels.shape[1:]), len(found.pixels)
            facts = found.labels, found.persons, found.classes, found.skipped
            return Loaded(entry.number, found.sha256, count, shape, *facts)

        loaded: Loaded | Failure = self._safely(entry, load, loading=True)
        return loaded

    def total(self, task: Task, entry: Entry) -> Partial | Failure:
        """Return the exact sum of a query over a shard."""

        def total() -> Partial:
            held, device = self._hold(entry), _usable(entry, task.device)
            rows = self._rows(task.steps, entry, held, device)
            records = self._records(rows, entry, held, task.key, device)
            shared = [each.to(device) for each in task.shared]
            found = records._exact(task.release, task.query, task.lanes, task.size, shared, task.normals).cpu()
            if task.integer:
                if float(found.abs().max()) >= MAX_EXACT_INTEGER:
                    raise OverflowError
                found = found.to(torch.int64)
            return Partial(task.identity, entry.number, held.sha256, found)

        partial: Partial | Failure = self._safely(entry, total)
        return partial

    def map(self, task: Sequence[Step], device: str, entry: Entry) -> Partial | Failure:
        """Apply maps to a shard, and keep the rows; the partial is empty."""

        def apply() -> Partial:
            held = self._hold(entry)
            self._rows(tuple(task), entry, held, _usable(entry, device))
            return Partial(task[-1].identity, entry.number, held.sha256, torch.zeros(0))

        partial: Partial | Failure = self._safely(entry, apply)
        return partial

    def matches(self, digests: frozenset[bytes], entry: Entry) -> frozenset[bytes] | Failure:
        """Return which of these SHA-256 are of an image of the shard."""

        def find() -> frozenset[bytes]:
            pixels = self._hold(entry).pixels
            rows = (pixels[torch.tensor([index])][0].numpy().tobytes() for index in range(len(pixels)))
            return digests & {hashlib.sha256(row).digest() for row in rows}

        found: frozenset[bytes] | Failure = self._safely(entry, find)
        return found

    def forget(self, owner: str) -> None:
        """Delete the pixels and rows of an image set; their space on disk is free when no set is left."""
        with self._lock:
            self._held = {place: held for place, held in self._held.items() if place[0] != owner}
            if not self._held:
                self._unpacked.clear()
                self._spool = Spool()

    def check_code(self) -> None:
        """Raise `DataError` if the driver runs another program."""
        if not self._same_code:
            raise DataError(OTHER_PROGRAM)

    def unpack(self, packed: bytes) -> Any:
        """Return an unpickled object; the same bytes are unpickled once."""
        identity = hashlib.sha256(packed).hexdigest()
        if identity not in self._unpacked:
            if len(self._unpacked) > 16:
                self._unpacked.clear()
            self._unpacked[identity] = pickle.loads(packed)
        return self._unpacked[identity]

    def _read(self, entry: Entry) -> Decoded:
        """Read and decode a shard; keep its pixels and labels in the file."""
        found = decode_shard(entry.shard, entry.reading, entry.on_error, self._spool, entry.sha256)
        labels = None if found.labels is None else FileRows((), np.int32, self._spool)
        if labels is not None and found.labels is not None:
            labels.write(0, found.labels.numpy())
        self._held[entry.owner, entry.number] = _LoadedShard(found.sha256, found.pixels, labels)
        return found

    def _hold(self, entry: Entry) -> _LoadedShard:
        place = entry.owner, entry.number
        if place not in self._held:
            self._read(entry)
        held = self._held[place]
        if entry.sha256 is not None and held.sha256 != entry.sha256:
            raise MissingShard(entry.shard.name, "is not the one of the manifest")
        return held

    def _rows(self, steps: tuple[Step, ...], entry: Entry, held: _LoadedShard, device: torch.device) -> FileRows:
        if not steps:
            return held.pixels
        last = steps[-1]
        if last.identity not in held.mapped:
            before = self._rows(steps[:-1], entry, held, device)
            records = self._records(before, entry, held, last.key, device)
            held.mapped[last.identity] = records.map_to_file(last.graph, last.shape, last.size, self._spool)
        return held.mapped[last.identity]

    def _records(
        self, rows: FileRows, entry: Entry, held: _LoadedShard, key: bytes, device: torch.device
    ) -> ShardRecords:
        if entry.records != len(rows):  # from the same bytes: that depends on an image, so that it voids the run
            raise RuntimeError("the shard has another number of records than the manifest")
        labels = None if held.labels is None else held.labels[torch.arange(len(held.labels))].long()
        units, weights = entry.units, entry.weights
        if units is None or weights is None:
            units, weights = entry.first + torch.arange(len(rows)), torch.ones(len(rows), dtype=torch.float64)
        return ShardRecords(rows, labels, units, weights, entry.groups, entry.number, key, device)

    def _safely(self, entry: Entry, compute: Callable[[], Any], loading: bool = False) -> Any:
        """Return the result, or a `Failure`.

        Messages leave the worker when it loads. After that, `MissingShard` names the shard, and no file in it.
        """
        if not self._same_code:
            return Failure(entry.number, "OtherProgram", OTHER_PROGRAM)
        try:
            flags = {"benchmark": False, "deterministic": True, "allow_tf32": torch.backends.cudnn.allow_tf32}
            with (  # as in `Vault`
                self._lock,
                torch.no_grad(),
                torch.backends.cudnn.flags(enabled=True, **flags),
                warnings.catch_warnings(action="ignore"),
            ):
                return compute()
        except MissingShard as error:
            return Failure(entry.number, "MissingShard", str(error) if loading else error.brief)
        except DataError as error:
            return Failure(entry.number, "DataError", str(error) if loading else None)
        except Exception as error:
            return Failure(entry.number, type(error).__name__)


def _usable(entry: Entry, device: str) -> torch.device:
    """Return a device; raise if this machine does not have it, which does not depend on an image."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingShard(entry.shard.name, "is on a worker without a GPU, but the driver computes on one")
    return torch.device(device)


@cache
def code_digest() -> str:
    """Return a digest of the program that the guarantee of a cluster run rests on."""
    root = Path(sfumato.data.__file__).parents[1]
    files = sorted(path for folder in ("privacy", "cluster", "data") for path in (root / folder).glob("*.py"))
    versions = platform.python_version(), torch.__version__, np.__version__, PIL.__version__
    whole = hashlib.sha256(repr(versions).encode())
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()
