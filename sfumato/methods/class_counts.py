"""Class counts: declared public, or released with noise; and labels in their proportions.

They only scale and balance; no noise depends on them.
"""

from __future__ import annotations

import torch

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.privacy import Release

COUNTS_WEIGHT = 4.0  # noise of the counts over that of the other releases together: costs 3 % of their precision


def counts_release(public: PublicFacts, weight: float = 1.0) -> list[Release]:
    """Return the planned release of the counts; none if sizes are declared public.

    - weight: noise multiplier of a single release on all data that is as precise as the method's other releases.
    """
    return [] if public.sizes else [Release("counts", weight=COUNTS_WEIGHT * weight, nonnegative=True)]


def class_counts(vault: GradientVault, public: PublicFacts) -> torch.Tensor:
    """Return the number of images in each class, [classes], float, at least 1: declared, or released."""
    counts = torch.tensor(public.sizes, device=vault.device) if public.sizes else vault.counts()
    return counts.float().clamp_min(1)


def allocate(n: int, proportions: torch.Tensor) -> torch.Tensor:
    """Return `n` labels in these proportions, by largest remainders, in class order."""
    shares = proportions.double().clamp_min(0)
    shares = n * shares / shares.sum() if shares.sum() > 0 else torch.full_like(shares, n / len(shares))
    counts = shares.floor().long()
    order = (shares - counts).argsort(descending=True, stable=True)
    counts[order[: n - int(counts.sum())]] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
