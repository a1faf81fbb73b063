"""One shard as the vault's records, with samples, batch slots and random numbers from a key (trusted in such runs).

The driver draws a key of 128 bits from the operating system for each query. Every random choice of a shard is a
function of the key, the shard's number and the unit's number. So a shard that is computed again, on any machine, gives
the same sum, and the images of a person that lie in several shards are in the sample together or not at all.

The generator is Philox with a 128-bit key, as in `privacy/randomness.py`; docs/proofs.md (proof 9) says what follows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.data.storage import FileRows, Spool
from sfumato.privacy.accounting import Release
from sfumato.privacy.records import PrivateRecords
from sfumato.privacy.sampling import assign_slots
from sfumato.privacy.tracing import per_record

BLOCK = 256  # numbers that one stream of the generator gives


def keyed_generator(key: bytes, *purpose: str | int) -> np.random.Generator:
    """Return a generator. Guarantee: a function of key and purpose; other purposes give unrelated numbers."""
    digest = hashlib.blake2b(repr(purpose).encode(), key=key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest)))


def keyed_uniforms(key: bytes, units: Tensor) -> Tensor:
    """Return a number in [0, 1) for each unit. Guarantee: a function of key and unit; independent over units."""
    blocks, which = (units // BLOCK).unique(return_inverse=True)
    found = [keyed_generator(key, "unit", int(block)).random(BLOCK) for block in blocks]
    table = torch.from_numpy(np.stack(found)) if found else torch.zeros(0, BLOCK, dtype=torch.float64)
    return table[which, units % BLOCK]


class ShardRecords(PrivateRecords):
    """The records of a shard.

    - pixels: images or mapped rows; labels: int64 or None.
    - units: number of each record's unit in the whole set. weights: zero for records that are not used.
    - groups: see `person_weights`; None if each image is a unit.
    - number, key: of the shard, and of the query.
    """

    def __init__(
        self,
        pixels: FileRows,
        labels: Tensor | None,
        units: Tensor,
        weights: Tensor,
        groups: Tensor | None,
        number: int,
        key: bytes,
        device: torch.device,
    ) -> None:
        self._images: Any = pixels
        self._labels, self._unit_of, self._weights, self._groups = labels, units, weights, groups
        self._chosen, self._units, self.device = weights.nonzero()[:, 0], len(units), device
        self._key, self._number, self._draws = key, number, 0

    def _generator(self) -> np.random.Generator:
        """Return the generator of the next draw. Guarantee: no two draws of a query share numbers."""
        self._draws += 1
        return keyed_generator(self._key, "shard", self._number, self._draws)

    def _drawn(self, release: Release) -> Tensor:
        """Return the records in the sample. Guarantee: a unit's records are all in it, with the charged probability."""
        if release.sampling_prob == 1:
            return self._chosen
        return self._chosen[keyed_uniforms(self._key, self._unit_of[self._chosen]) < release.sampling_prob]

    def map_to_file(self, graph: Any, shape: torch.Size, size: int, spool: Spool) -> FileRows:
        """Return the rows of a graph for all records in use, in a file; zeros for the others."""
        rows = FileRows(shape, np.float32, spool)
        rows.write(len(self._images) - 1, np.zeros((1, *shape), np.float32))
        for index in assign_slots(self._chosen, self._groups, size, self._generator()).split(size):
            if len(self._chosen):
                found = per_record(graph, 0, 1)(self._pixels(index)).float().cpu().numpy()
                for place, row in zip(index.tolist(), found, strict=True):
                    if place >= 0:
                        rows.write(place, row[None])
        return rows
