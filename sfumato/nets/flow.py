"""RealNVP (Dinh et al. 2017): a normalising flow with exact density.

There is no batch norm: rows are independent, so per-example gradients are defined.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn

LOG_TWO_PI = math.log(2 * math.pi)


class Coupling(nn.Module):
    """Affine coupling layer and a fixed permutation of the coordinates.

    The first half of the vector determines scale and shift of the second half. The scale is exp(tanh(.)), between 1/e
    and e. The last layers are initialised with zeros, so the coupling starts as the identity before the
    permutation.

    - size: dimension of the vectors.
    - hidden: width of the hidden layers.
    - context: dimension of the context, 0 for none.
    - order: the permutation.
    """

    def __init__(self, size: int, hidden: int, context: int, order: torch.Tensor) -> None:
        super().__init__()
        self.kept = size // 2
        transformed = size - self.kept
        self.trunk = nn.Sequential(
            nn.Linear(self.kept + context, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.scale, self.shift = nn.Linear(hidden, transformed), nn.Linear(hidden, transformed)
        for layer in (self.scale, self.shift):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.register_buffer("order", order)
        self.register_buffer("inverse_order", order.argsort())

    def forward(self, x: torch.Tensor, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the transformed vectors and log |det dy/dx|."""
        kept, transformed = x[:, : self.kept], x[:, self.kept :]
        log_scale, shift = self._scale_and_shift(kept, context)
        y = torch.cat([kept, transformed * log_scale.exp() + shift], 1)
        return y[:, self.get_buffer("order")], log_scale.sum(1)

    def inverse(self, y: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
        """Return the vectors that `forward` maps to `y`."""
        y = y[:, self.get_buffer("inverse_order")]
        kept, transformed = y[:, : self.kept], y[:, self.kept :]
        log_scale, shift = self._scale_and_shift(kept, context)
        return torch.cat([kept, (transformed - shift) * torch.exp(-log_scale)], 1)

    def _scale_and_shift(self, kept: torch.Tensor, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(kept if context is None else torch.cat([kept, context], 1))
        return torch.tanh(self.scale(hidden)), self.shift(hidden)


class RealNVP(nn.Module):
    """A density on vectors, with an optional context.

    The first layer is an affine map that depends linearly on the context; a one-hot context gives each class its own.
    With `mixed` its matrix is triangular, so this layer alone represents any Gaussian. Coupling layers follow, with
    fixed permutations drawn from torch's global random state.

    - size: dimension of the vectors, at least 2.
    - couplings: number of coupling layers.
    - hidden: width of the hidden layers of a coupling.
    - context: dimension of the context; 0 (default): none.
    - mixed: triangular matrix (default) or diagonal matrix in the affine map.
    """

    def __init__(self, size: int, *, couplings: int, hidden: int, context: int = 0, mixed: bool = True) -> None:
        super().__init__()
        if size < 2:
            raise ValueError(f"a flow needs vectors of dimension 2 or more, got {size}")
        self.size = size
        contexts = max(1, context)
        self.log_scale = nn.Parameter(torch.zeros(contexts, size))
        self.shift = nn.Parameter(torch.zeros(contexts, size))
        self.mix = nn.Parameter(torch.zeros(contexts, size, size)) if mixed else None
        self.couplings = nn.ModuleList(Coupling(size, hidden, context, torch.randperm(size)) for _ in range(couplings))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent vectors z [N, size] and log |det dz/dx| [N]."""
        log_scale, shift, mix = self._affine(context)
        z, log_determinant = x - shift, -log_scale.sum(1)
        z = z * torch.exp(-log_scale) if mix is None else z * torch.exp(-log_scale) + (mix @ z[:, :, None])[:, :, 0]
        for coupling in self.couplings:
            z, contribution = coupling(z, context)
            log_determinant = log_determinant + contribution
        return z, log_determinant.expand(len(x))

    def inverse(self, z: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """Return the vectors [N, size] of latent vectors z."""
        for coupling in reversed(self.couplings):
            z = cast(Coupling, coupling).inverse(z, context)
        log_scale, shift, mix = self._affine(context)
        if mix is None:
            return z * torch.exp(log_scale) + shift
        matrix = mix + torch.diag_embed(torch.exp(-log_scale))
        x: torch.Tensor = torch.linalg.solve_triangular(matrix, z[:, :, None], upper=False)[:, :, 0] + shift
        return x

    def log_prob(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        """Return the exact log-density of each vector, [N]."""
        z, log_determinant = self(x, context)
        density: torch.Tensor = log_determinant - (z.square().sum(1) + self.size * LOG_TWO_PI) / 2
        return density

    def _affine(self, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return log-scales, shifts and the strictly lower triangle of the matrix, per row if there is a context."""
        below = None if self.mix is None else self.mix.tril(-1)
        if context is None:
            return self.log_scale, self.shift, below
        mix = None if below is None else (context @ below.flatten(1)).view(-1, self.size, self.size)
        return context @ self.log_scale, context @ self.shift, mix
