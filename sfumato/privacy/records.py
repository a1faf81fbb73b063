"""Private records in memory, and exact sums over Poisson samples of them. `Vault` adds plan, charges and noise.

A worker of a cluster holds a shard as such records. Vaults for data elsewhere override `_take`, `_exact`, `_mapped`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.privacy.accounting import Release
from sfumato.privacy.randomness import host_generator
from sfumato.privacy.sampling import assign_slots, cap_per_person, person_weights, poisson_sample, standard_normals
from sfumato.privacy.tracing import per_record


@dataclass(frozen=True)
class Query:
    """A traced query: `run(weights, *shared, *records)` is the sum over a batch, [rows, width], in `grid_step`s.

    Guarantee: one unit more or less moves the sum over all batches by at most `sensitivity`. `fast`: a CUDA graph.
    """

    run: Callable[..., Tensor]
    rows: int
    width: int
    sensitivity: float
    grid_step: float = 1.0
    fast: Any = None


class PrivateRecords:
    """Images [N, ...], labels [N] or None, and the unit of privacy that each record belongs to."""

    device: torch.device
    _images: Tensor
    _labels: Tensor | None

    def _set_units(self, persons: Tensor | None, max_per_person: int) -> None:
        """Set `_chosen` records and their `_weights`. Guarantee: of each unit at most `_cap`, with weights of sum 1."""
        count = self._units = len(self._images)
        self._cap, self._chosen, self._unit_of = 1, torch.arange(count), torch.arange(count)
        self._weights, self._groups = torch.ones(count, dtype=torch.float64), None if persons is None else self._unit_of
        if persons is not None:
            names, self._unit_of = persons.detach().cpu().unique(return_inverse=True)
            self._units, self._cap = len(names), max_per_person
            self._chosen = cap_per_person(self._unit_of, max_per_person)
            self._weights, self._groups = person_weights(self._unit_of, self._chosen, self._units)

    def _generator(self) -> np.random.Generator:
        """Return the generator of one draw. Guarantee: OS entropy that serves this draw alone."""
        return host_generator()

    def _drawn(self, release: Release) -> Tensor:
        """Return the records in the sample of a release. Guarantee: those of a fresh `poisson_sample` of units."""
        sample = poisson_sample(self._units, release.sampling_prob)
        if self._groups is None:
            return sample
        included = torch.zeros(self._units, dtype=torch.bool)
        included[sample] = True
        return self._chosen[included[self._unit_of[self._chosen]]]

    def _exact(
        self, release: Release, query: Query, lanes: int, size: int, shared: list[Tensor], normals: Any = ()
    ) -> Tensor:
        """Return the exact sum over a Poisson sample, [rows, width], float64. Guarantee: used by `_noised` only."""
        total = torch.zeros(query.rows, query.width, dtype=torch.float64, device=self.device)
        for records, weights in self._batches(self._drawn(release), lanes, size, normals) if self._units else ():
            total.add_((query.fast or query.run)(weights, *shared, *records).view_as(total))
        return total

    def _mapped(self, graph: Any, shape: torch.Size, size: int) -> Tensor:
        """Return the rows of a graph for all records in use, [N, *shape]; zeros for the others."""
        rows = torch.zeros(len(self._images), *shape, device=self._images.device)
        for index in assign_slots(self._chosen, self._groups, size, self._generator()).split(size):
            if self._units:
                found = per_record(graph, 0, 1)(self._pixels(index)).float().to(rows.device)
                rows[index[index >= 0].to(rows.device)] = found[(index >= 0).to(rows.device)]
        return rows

    def _batches(self, chosen: Tensor, lanes: int, size: int, normals: Any) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Yield ([images, labels, normals], weights), [lanes, size, ...]. Guarantee: fixed shapes; padding weighs 0."""
        labels = torch.zeros_like(self._unit_of) if self._labels is None else self._labels
        groups = [chosen] if lanes == 1 else [chosen[labels[chosen] == lane] for lane in range(lanes)]
        slots = [assign_slots(group, self._groups, size, self._generator()) for group in groups]
        slots = [nn.functional.pad(row, (0, max(map(len, slots)) - len(row)), value=-1) for row in slots]
        for index in torch.stack(slots).split(size, 1):
            occupied, record = index >= 0, index.clamp_min(0)
            records = [self._pixels(index), torch.where(occupied, labels[record], 0).to(self.device)]
            if normals:
                records.append(self._normals(index, math.prod(normals)).reshape(lanes, size, *normals))
            yield records, torch.where(occupied, self._weights[record], 0.0).to(self.device)

    def _pixels(self, index: Tensor) -> Tensor:
        """Return float images, with uint8 scaled to [-1, 1], and zeros for the index -1."""
        images: Tensor = self._images[index.clamp_min(0).to(self._images.device)].to(self.device)
        images = images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images.float()
        empty = (index < 0).reshape(*index.shape, *(1 for _ in images.shape[index.ndim :]))
        return images.masked_fill_(empty.to(self.device), 0)

    def _normals(self, index: Tensor, count: int) -> Tensor:
        """Return standard normal numbers for each slot of a batch. Guarantee: independent of everything else."""
        return standard_normals(index.numel(), count, self.device, self._generator())


def check_labels(labels: Tensor | None, records: int, classes: int) -> Tensor | None:
    """Return a copy of valid labels. Guarantee: each record is in exactly one class, so in one block of a sum."""
    if labels is None and classes == 1:
        return None
    if labels is None or labels.dtype != torch.int64 or labels.shape != (records,):
        raise ValueError(f"there are {classes} classes: labels must be int64, one for each image")
    if records and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"labels must lie between 0 and {classes - 1}")
    return labels.detach().cpu().clone()
