"""Random draws for records: Poisson samples of units, batch slots, and standard normal numbers."""

from __future__ import annotations

import numpy as np
import torch

from sfumato.privacy.randomness import device_generator, host_generator


def poisson_sample(units: int, probability: float) -> torch.Tensor:
    """Return the indices of a fresh Poisson sample of units, ascending; it may be empty.

    Guarantee: each unit is included independently with `probability`, exact to 2^-53: the sampling that `accounting`
    charges for. Nothing outside this call can influence or repeat the draw.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"sampling probability must lie in (0, 1], got {probability}")
    if probability == 1:
        return torch.arange(units)
    return torch.from_numpy((host_generator().random(units) < probability).nonzero()[0])


def shuffled(index: torch.Tensor) -> torch.Tensor:
    """Return the indices in a fresh random order. Guarantee: uniform over all orders, up to the 128-bit key."""
    return index[torch.from_numpy(host_generator().permutation(len(index)))]


def cap_per_person(persons: torch.Tensor, max_per_person: int) -> torch.Tensor:
    """Return at most `max_per_person` random records of each person, ascending. Guarantee: persons are independent."""
    order = shuffled(torch.arange(len(persons)))
    order = order[persons[order].argsort(stable=True)]
    _, sizes = persons[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[rank < max_per_person].sort().values


def assign_slots(records: torch.Tensor, unit_of: torch.Tensor | None, size: int) -> torch.Tensor:
    """Assign records to slots of batches of `size`, in a fresh random order; -1 marks an empty slot.

    Returns at least one batch. With persons, m records of one person take the next power of two of slots; persons with
    equally many slots are contiguous and start a new batch.

    Guarantee: one more unit moves the records of at most one other unit, whose slots it takes (proof 4).
    """
    order = shuffled(records)
    if unit_of is None:
        return torch.cat([order, torch.full((max(size, -(-len(order) // size) * size) - len(order),), -1)])
    order = order[unit_of[order].argsort(stable=True)]
    _, which, sizes = unit_of[order].unique_consecutive(return_inverse=True, return_counts=True)
    slots = 2 ** torch.ceil(torch.log2(sizes.double())).long()
    queue = shuffled(torch.arange(len(sizes)))
    queue = queue[slots[queue].argsort(stable=True)]
    starts, begin = torch.zeros_like(sizes), 0
    for width, count in zip(*slots[queue].unique_consecutive(return_counts=True), strict=True):
        starts[queue[slots[queue] == width]] = begin + width * torch.arange(int(count))
        begin += -(-int(width * count) // size) * size
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[which]
    return torch.full((max(begin, size),), -1).index_put_((starts[which] + rank,), order)


def standard_normals(records: int, count: int, device: torch.device) -> torch.Tensor:
    """Return fresh standard normals (no privacy noise), [records, count]. Guarantee: independent of everything else."""
    if device.type == "cpu":
        return torch.from_numpy(host_generator().standard_normal((records, count), dtype=np.float32))
    return torch.randn(records, count, device=device, generator=device_generator(device))
