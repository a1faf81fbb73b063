"""Poisson subsampling: each record is in the sample independently, with the same public probability."""

from __future__ import annotations

import torch

from sfumato.privacy.randomness import host_generator


def poisson_sample(records: int, probability: float) -> torch.Tensor:
    """Indices of a fresh Poisson sample of `records` records, in ascending order; it may be empty.

    Guarantee: independent inclusion with `probability`, exact to 2^-53, which is the sampling that
    `accounting` charges for. Nothing outside this call can influence or repeat the draw.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"sampling probability must lie in (0, 1], got {probability}")
    if probability == 1:
        return torch.arange(records)
    return torch.from_numpy((host_generator().random(records) < probability).nonzero()[0])
