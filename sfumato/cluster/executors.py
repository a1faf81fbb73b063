"""Where shards are computed: in this process, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from sfumato.cluster.worker import Entry, Failure, Loaded, Partial, Step, Task, Worker


class Executor(Protocol):
    """Computes shards. Each method yields one result for each entry, in any order, or raises."""

    @property
    def number(self) -> int:
        """Return how many workers there are."""
        ...

    def hold(self, entries: Sequence[Entry]) -> None:
        """Make room for these entries before anything is charged: the room they need depends on the images."""
        ...

    def load(self, entries: Sequence[Entry]) -> Iterator[Loaded | Failure]: ...

    def total(self, task: Task, entries: Sequence[Entry]) -> Iterator[Partial | Failure]: ...

    def map(self, steps: Sequence[Step], device: str, entries: Sequence[Entry]) -> Iterator[Partial | Failure]: ...

    def matches(self, digests: frozenset[bytes], entries: Sequence[Entry]) -> Iterator[frozenset[bytes] | Failure]: ...

    def compute(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the results of calls, in order. Errors keep their messages, so that these must tell nothing private."""
        ...

    def share(self, value: Any) -> Any:
        """Return what stands for a value among the arguments of `compute`; it travels to each machine once."""
        ...

    def forget(self, owner: str) -> None:
        """Delete the pixels of one image set."""
        ...

    def close(self) -> None: ...


class InProcess:
    """One worker in this process, shard by shard."""

    number = 1

    def __init__(self) -> None:
        self._worker = Worker()

    def hold(self, entries: Sequence[Entry]) -> None:  # they are in this process
        pass

    def load(self, entries: Sequence[Entry]) -> Iterator[Loaded | Failure]:
        return (self._worker.load(entry) for entry in entries)

    def total(self, task: Task, entries: Sequence[Entry]) -> Iterator[Partial | Failure]:
        return (self._worker.total(task, entry) for entry in entries)

    def map(self, steps: Sequence[Step], device: str, entries: Sequence[Entry]) -> Iterator[Partial | Failure]:
        return (self._worker.map(steps, device, entry) for entry in entries)

    def matches(self, digests: frozenset[bytes], entries: Sequence[Entry]) -> Iterator[frozenset[bytes] | Failure]:
        return (self._worker.matches(digests, entry) for entry in entries)

    def compute(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        return (function(*call) for call in calls)

    def share(self, value: Any) -> Any:
        return value

    def forget(self, owner: str) -> None:
        self._worker.forget(owner)

    def close(self) -> None:
        self._worker = Worker()


def connect(cluster: Any = None, **options: Any) -> Executor:
    """Return where to compute.

    - cluster: None (this process), "local" (Ray on this machine), the address of a Ray cluster ("ray://host:10001",
      "auto"), or what an earlier call returned.
    - options: of `RayCluster`, such as `workers`.
    """
    if cluster is None:
        return InProcess()
    if not isinstance(cluster, str):
        found: Executor = cluster
        return found
    from sfumato.cluster.ray_cluster import RayCluster

    made: Executor = RayCluster(cluster, **options)
    return made
