"""RealNVP: an invertible network between vectors and normal numbers, with its exact density.

Every part is row-wise (no batch norm), so that it can be trained on one image's gradient at a time.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn

LOG_TWO_PI = math.log(2 * math.pi)


class Coupling(nn.Module):
    """Half of a vector shifts and scales the other half; then all coordinates change places.

    The scale is exp(tanh(.)), between 1/e and e. The last layer begins at zero: the identity, but for the places.
    """

    def __init__(self, size: int, hidden: int, context: int, order: torch.Tensor) -> None:
        super().__init__()
        self.kept = size // 2
        moved = size - self.kept
        self.trunk = nn.Sequential(
            nn.Linear(self.kept + context, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.scale, self.shift = nn.Linear(hidden, moved), nn.Linear(hidden, moved)
        for layer in (self.scale, self.shift):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())

    def forward(self, x: torch.Tensor, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The moved vector, and the logarithm of how much volume grows."""
        kept, moved = x[:, : self.kept], x[:, self.kept :]
        log_scale, shift = self._move(kept, context)
        y = torch.cat([kept, moved * log_scale.exp() + shift], 1)
        return y[:, self.get_buffer("order")], log_scale.sum(1)

    def inverse(self, y: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        y = y[:, self.get_buffer("back")]
        kept, moved = y[:, : self.kept], y[:, self.kept :]
        log_scale, shift = self._move(kept, context)
        return torch.cat([kept, (moved - shift) * torch.exp(-log_scale)], 1)

    def _move(self, kept: torch.Tensor, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.trunk(kept if context is None else torch.cat([kept, context], 1))
        return torch.tanh(self.scale(inputs)), self.shift(inputs)


class RealNVP(nn.Module):
    """A density on vectors of `size` numbers (at least two), given a context of `context` numbers or none.

    First comes an affine map, of which each context has its own (with a one-hot context, each class): a shift and, if
    `mixed`, a triangular matrix, else a scale for each coordinate. Alone it is a Gaussian with any covariance, which
    few numbers say. Then follow `couplings`, with fixed random permutations (from torch's random state).
    """

    def __init__(self, size: int, *, couplings: int, hidden: int, context: int = 0, mixed: bool = True) -> None:
        super().__init__()
        if size < 2:
            raise ValueError(f"a flow needs vectors of at least 2 numbers, got {size}")
        self.size = size
        kinds = max(1, context)
        self.log_scale = nn.Parameter(torch.zeros(kinds, size))
        self.shift = nn.Parameter(torch.zeros(kinds, size))
        self.mix = nn.Parameter(torch.zeros(kinds, size, size)) if mixed else None
        self.couplings = nn.ModuleList(Coupling(size, hidden, context, torch.randperm(size)) for _ in range(couplings))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normal numbers [N, size] for vectors [N, size], and log |det dz/dx| [N]."""
        log_scale, shift, mix = self._affine(context)
        z, log_determinant = x - shift, -log_scale.sum(1)
        z = z * torch.exp(-log_scale) if mix is None else z * torch.exp(-log_scale) + (mix @ z[:, :, None])[:, :, 0]
        for coupling in self.couplings:
            z, growth = coupling(z, context)
            log_determinant = log_determinant + growth
        return z, log_determinant.expand(len(x))

    def inverse(self, z: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """The vectors of these normal numbers."""
        for coupling in reversed(self.couplings):
            z = cast(Coupling, coupling).inverse(z, context)
        log_scale, shift, mix = self._affine(context)
        if mix is None:
            return z * torch.exp(log_scale) + shift
        matrix = mix + torch.diag_embed(torch.exp(-log_scale))
        x: torch.Tensor = torch.linalg.solve_triangular(matrix, z[:, :, None], upper=False)[:, :, 0] + shift
        return x

    def log_prob(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """Exact log-density of each vector, [N]."""
        z, log_determinant = self(x, context)
        density: torch.Tensor = log_determinant - (z.square().sum(1) + self.size * LOG_TWO_PI) / 2
        return density

    def _affine(self, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logarithms of scales, shifts, and what is below the diagonal of the matrix; of one kind, or of each row's."""
        below = None if self.mix is None else self.mix.tril(-1)
        if context is None:
            return self.log_scale, self.shift, below
        mix = None if below is None else (context @ below.flatten(1)).view(-1, self.size, self.size)
        return context @ self.log_scale, context @ self.shift, mix
