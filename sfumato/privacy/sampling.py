"""Random draws for records: Poisson samples of units, batch slots, and standard normal numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sfumato.privacy.randomness import host_generator


def poisson_sample(units: int, probability: float) -> Tensor:
    """Return the indices of a fresh Poisson sample of units, ascending; it may be empty.

    Guarantee: each unit is included independently with `probability`, exact to 2^-53, which `accounting` charges for.
    Nothing outside this call can influence or repeat the draw.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"sampling probability must lie in (0, 1], got {probability}")
    if probability == 1:
        return torch.arange(units)
    return torch.from_numpy((host_generator().random(units) < probability).nonzero()[0])


def shuffled(index: Tensor, generator: np.random.Generator) -> Tensor:
    """Return the indices in a random order. Guarantee: uniform over all orders, up to the generator's 128-bit key."""
    return index[torch.from_numpy(generator.permutation(len(index)))]


def cap_per_person(persons: Tensor, max_per_person: int) -> Tensor:
    """Return at most `max_per_person` random records of each person, ascending. Guarantee: persons are independent."""
    order = shuffled(torch.arange(len(persons)), host_generator())
    order = order[persons[order].argsort(stable=True)]
    _, sizes = persons[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[rank < max_per_person].sort().values


def person_weights(unit_of: Tensor, chosen: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Return for each record 1/m and ceil(log2 m), where m is the number of its person's chosen records.

    Guarantee: the weights of a person's chosen records sum to 1. In a group, weights differ by less than a factor 2.
    """
    images = torch.bincount(unit_of[chosen], minlength=units)[unit_of].double()
    return 1.0 / images, images.log2().ceil().long()


def assign_slots(records: Tensor, groups: Tensor | None, size: int, generator: np.random.Generator) -> Tensor:
    """Assign records to slots of batches of `size`, at least one batch, in a random order; -1 marks an empty slot.

    Guarantee: groups start new batches, so m more records of a group take the slots of at most m others (proof 4).
    """
    parts = [records] if groups is None else [records[groups[records] == each] for each in groups[records].unique()]
    slots = [torch.full((max(size, -(-len(part) // size) * size),), -1) for part in parts or [records]]
    for row, part in zip(slots, parts, strict=False):
        row[: len(part)] = shuffled(part, generator)
    return torch.cat(slots)


def standard_normals(records: int, count: int, device: torch.device, generator: np.random.Generator) -> Tensor:
    """Return standard normals (no privacy noise), [records, count]. Guarantee: independent, up to the generator."""
    if device.type == "cpu":
        return torch.from_numpy(generator.standard_normal((records, count), dtype=np.float32))
    source = torch.Generator(device=device).manual_seed(int(generator.integers(2**63)))
    return torch.randn(records, count, device=device, generator=source)
