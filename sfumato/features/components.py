"""Principal components of public rows, with the smaller ones enlarged, so that gradients converge at like speeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELLING, MIN_SPREAD = 0.5, 1e-4  # power by which the components' spreads are levelled
TINY = 1e-12  # where all rows are equal


@dataclass(frozen=True)
class Components:
    """Principal components of public rows, scaled: rows get a mean norm of one, smaller components more weight."""

    centre: torch.Tensor
    axes: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, count: int, seed: int) -> Components:
        """Return at most `count` components of these rows."""
        centre = rows.mean(0)
        count = min(count, *rows.shape)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed)
            _, spread, axes = torch.svd_lowrank(rows - centre, count, niter=2)
        axes = axes * (spread / spread[0].clamp_min(TINY)).clamp_min(MIN_SPREAD) ** -LEVELLING
        return cls(centre, axes / ((rows - centre) @ axes).norm(dim=1).mean().clamp_min(TINY))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = (rows - self.centre) @ self.axes
        return projected
