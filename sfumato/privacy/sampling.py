"""What is drawn for records: whether each is in a sample (Poisson subsampling), their order, numbers of their own."""

from __future__ import annotations

import numpy as np
import torch

from sfumato.privacy.randomness import device_generator, host_generator


def poisson_sample(units: int, probability: float) -> torch.Tensor:
    """Return the indices of a fresh Poisson sample of units, ascending; it may be empty.

    Guarantee: independent inclusion with `probability`, exact to 2^-53, which is the sampling that
    `accounting` charges for. Nothing outside this call can influence or repeat the draw.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"sampling probability must lie in (0, 1], got {probability}")
    if probability == 1:
        return torch.arange(units)
    return torch.from_numpy((host_generator().random(units) < probability).nonzero()[0])


def shuffled(index: torch.Tensor) -> torch.Tensor:
    """Return the same indices in a fresh random order. Guarantee: uniform over all orders, as far as 128 bits go."""
    return index[torch.from_numpy(host_generator().permutation(len(index)))]


def capped(persons: torch.Tensor, most: int) -> torch.Tensor:
    """Return the indices of at most `most` records of each person, chosen at random, ascending.

    Guarantee: which of a person's records are chosen depends on no other person.
    """
    order = shuffled(torch.arange(len(persons)))
    order = order[persons[order].argsort(stable=True)]
    _, sizes = persons[order].unique_consecutive(return_counts=True)
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[rank < most].sort().values


def seated(records: torch.Tensor, unit_of: torch.Tensor | None, size: int) -> torch.Tensor:
    """Return the records in a fresh random order, with -1 for empty seats, for batches of `size`: one at least.

    With persons, one of m records takes the next power of two of seats; those with as many stand together, from a new
    batch on. Guarantee: a unit more moves no record but those of one other unit, which gives up its seats for it.
    """
    order = shuffled(records)
    if unit_of is None:
        return torch.cat([order, torch.full((max(size, -(-len(order) // size) * size) - len(order),), -1)])
    order = order[unit_of[order].argsort(stable=True)]
    _, which, sizes = unit_of[order].unique_consecutive(return_inverse=True, return_counts=True)
    seats = 2 ** torch.ceil(torch.log2(sizes.double())).long()
    queue = shuffled(torch.arange(len(sizes)))
    queue = queue[seats[queue].argsort(stable=True)]
    starts, begin = torch.zeros_like(sizes), 0
    for width, count in zip(*seats[queue].unique_consecutive(return_counts=True), strict=True):
        starts[queue[seats[queue] == width]] = begin + width * torch.arange(int(count))
        begin += -(-int(width * count) // size) * size
    rank = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[which]
    return torch.full((max(begin, size),), -1).index_put_((starts[which] + rank,), order)


def standard_normals(records: int, count: int, device: torch.device) -> torch.Tensor:
    """Return fresh standard normal numbers, [records, count], float32.

    Guarantee: independent of each other, of the records and of all that was drawn before. (They protect nothing.)
    """
    if device.type == "cpu":
        return torch.from_numpy(host_generator().standard_normal((records, count), dtype=np.float32))
    return torch.randn(records, count, device=device, generator=device_generator(device))
