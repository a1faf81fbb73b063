"""The vault over shards: the driver's side (trusted in such runs).

A query travels to the workers, and one exact sum for each shard comes back. The driver takes exactly one for each line
of the manifest, all of them, or fails; then the vault adds noise, once, and stores the result before it returns it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sfumato.cluster.sharded_images import ShardedImages
from sfumato.cluster.worker import Entry, Failure, Partial, ShardError, Step, Task
from sfumato.engine.gradient_vault import GradientVault
from sfumato.privacy import Release
from sfumato.privacy.records import Query
from sfumato.privacy.sampling import cap_per_person, person_weights

KEY_BYTES = 16


@dataclass(frozen=True)
class RemoteRecords:
    """Stands for the images in a vault over shards: the shape of a record, and the maps that were applied."""

    shape: torch.Size
    steps: tuple[Step, ...] = ()


class ClusterVault(GradientVault):
    """A vault whose records are `ShardedImages`.

    Guarantee: that of `Vault`. A unit is in a sample with all its records, in whichever shards they are, or with none.
    """

    def _take(self, records: ShardedImages, most: int) -> None:
        """Number the units. Guarantee: as in `PrivateRecords._set_units`, over all shards together.

        Images that were in memory are sent to the cluster now: no query does, whose failure would depend on them.
        """
        count, persons = len(records), records.persons
        self._executor, self._labels, self._cap, self._units = records.executor, None, 1, count
        owned: tuple[Tensor, ...] = ()
        if self.plan.budget.unit == "person":
            if persons is None or type(most) is not int or most < 1:
                raise ValueError("the unit is a person: give persons, one number per image, and max_per_person >= 1")
            names, units = persons.unique(return_inverse=True)
            chosen, self._cap, self._units = cap_per_person(units, most), most, len(names)
            every, groups = person_weights(units, chosen, len(names))
            owned = units, torch.zeros_like(every).index_copy_(0, chosen, every[chosen]), groups
        begin, self._entries = 0, list[Entry]()
        for entry in records.entries:
            part = slice(begin, begin + entry.records)
            if entry.records:  # some have none by chance, or all their files were skipped
                own: dict[str, Any] = dict(
                    zip(("units", "weights", "groups"), (each[part].clone() for each in owned), strict=False)
                )
                self._entries.append(replace(entry, first=begin, **own))
            begin += entry.records
        self._executor.hold(self._entries)  # what does not fit is refused here, before the ledger is open
        self._images: Any = RemoteRecords(torch.Size((count, *records.shape)))

    def unprotected(self, reason: str) -> tuple[Tensor, Tensor | None]:
        """Refuse: raw images in shards cannot be handed out. Nothing is charged or voided."""
        raise ValueError(f"this method needs the raw images in memory ({reason}); it cannot use shards or a cluster")

    def _exact(
        self, release: Release, query: Query, lanes: int, size: int, shared: list[Tensor], normals: Any = ()
    ) -> Tensor:
        """Return the exact sum over all shards. Guarantee: one partial of this query for each line of the manifest."""
        task = Task(
            secrets.token_hex(16),
            replace(query, fast=None),
            release,
            lanes,
            size,
            shared,
            tuple(normals),
            new_key(),  # forgotten with the task
            self.device.type,
            self._secure(release),
            self._images.steps,
        )
        partials = collect(self._executor.total(task, self._entries), task.identity, self._entries)
        total = torch.zeros(query.rows, query.width, dtype=torch.int64 if task.integer else torch.float64)
        for partial in partials:  # in the order of the manifest, so that float sums do not depend on the workers
            if partial.shape != total.shape or partial.dtype != total.dtype:
                raise ShardError("a worker returned a sum of another shape")
            total += partial
        return total.to(self.device)

    def _mapped(self, graph: Any, shape: torch.Size, size: int) -> Any:
        """Apply a graph on the workers. Guarantee: nothing returns."""
        key, identity = new_key(), secrets.token_hex(16)
        steps = (*self._images.steps, Step(identity, graph, shape, size, key))
        collect(self._executor.map(steps, self.device.type, self._entries), identity, self._entries)
        return RemoteRecords(torch.Size((self._images.shape[0], *shape)), steps)

    def _void_on_failure(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result. Guarantee: as in `Vault`, except that a `ShardError` does not void the run."""
        fault: list[str] = []

        def guarded() -> Tensor:
            try:
                return compute()
            except ShardError as error:
                fault.append(str(error))
                return torch.zeros(0)

        total = super()._void_on_failure(guarded)
        if fault:
            raise ShardError(f"{fault[0]}. Nothing was released; what was charged stays charged")
        return total


def new_key() -> bytes:
    """Return the key of one query. Guarantee: OS entropy, and never used again."""
    return secrets.token_bytes(KEY_BYTES)


def collect(results: Iterable[Partial | Failure], task: str, entries: Sequence[Entry]) -> list[Tensor]:
    """Return the sums of all shards in the order of the manifest.

    Guarantee: exactly one for each entry, of this task, from the content that the manifest names. Anything else raises:
    `ShardError` if it does not depend on an image, otherwise another error, which voids the run.
    """
    found: dict[int, Tensor] = {}
    expected = {entry.number: entry.sha256 for entry in entries}
    for result in results:
        if isinstance(result, Failure):
            if result.message is not None:
                raise ShardError(result.message)
            raise RuntimeError(f"a worker failed with {result.kind}")
        if result.task != task or expected.get(result.number) != result.sha256:
            raise ShardError("a worker returned the sum of another query or of another shard")
        if result.number in found:
            raise ShardError("a worker returned the sum of a shard twice")
        found[result.number] = result.total
    if len(found) < len(expected):
        raise ShardError(f"the sums of {len(expected) - len(found)} shards are missing")
    return [found[entry.number] for entry in entries]
