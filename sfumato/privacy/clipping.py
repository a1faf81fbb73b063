"""Clipping: whatever a record's vector is, what is added up for it has at most the given norm.

Rows of `Vault.sum` are plain vectors. Those of `Vault.vectors` come in *pieces*: a tensor, or two factors (left, right)
that stand for left^T right, as the gradient of a linear layer does. Where that is cheaper the product is never written
down: its squared norm is sum_{t,u} (l_t . l_u) (r_t . r_u), and the clipped sum over records is one matrix product.

Guarantee: the norm is taken of the very numbers that are added up. With a wrong rule for a layer a record's vector is
not its gradient, but it is as bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Piece = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Groups = Sequence[tuple[float, Sequence[int]]]  # a bound, and the pieces that are clipped to it together

CANCELLED = 1e-8  # of (sum_t |l_t| |r_t|)^2: added to squared norms, for what rounding leaves of terms that cancel
MOST_FACTOR = 1e12  # beyond, the other factor could be too small for float32
MOST_TIMES = 1e30  # a bound: a longer vector counts as zero, since the factor that clips it is no plain float32
CHEAPER = 4  # times fewer operations: then a product is not written down


def clip(rows: torch.Tensor, bound: float, unit: float, nonnegative: bool) -> torch.Tensor:
    """Return the rows in float64 and in units of `unit`, clipped; rows that are not finite become zero.

    Guarantee: each output row depends on its input row alone, has L2 norm at most `bound / unit`, and no negative
    entry if `nonnegative`.
    """
    rows = rows.to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows.masked_fill_(~norms.isfinite(), 0)  # a NaN or an infinity anywhere makes the norm one
    if nonnegative:
        norms = torch.linalg.vector_norm(rows.clamp_min_(0), dim=1, keepdim=True)
    return rows.mul_(bound / unit / norms.nan_to_num(nan=bound, posinf=bound).clamp_min(bound))


def clipped_sum(pieces: Sequence[Piece], groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over records of clipped vectors, [lanes, numbers], float32.

    Pieces are [lanes, records, ...]. In each group of pieces a record's vector is clipped to the group's bound; then it
    is multiplied by the record's weight, [lanes, records].

    Guarantee: a record adds a vector of norm at most its weight times the root of the sum of squared bounds, up to the
    rounding of float32. A record with a number that is not finite, or out of all proportion, adds zero.
    """
    if sorted(place for _, places in groups for place in places) != list(range(len(pieces))):
        raise ValueError("each piece of a gradient must be in exactly one group")
    held = [_Product(*piece) if isinstance(piece, tuple) else _Plain(piece) for piece in pieces]
    with matrix_precision("ieee"), torch.autocast(weights.device.type, enabled=False):
        squares = [piece.squares() for piece in held]
        norms = [torch.stack([squares[place] for place in places]).sum(0).sqrt() for _, places in groups]
        within = [norm <= MOST_TIMES * bound for norm, (bound, _) in zip(norms, groups, strict=True)]
        finite = torch.stack(within).all(0)  # a NaN is not
        factors: dict[int, torch.Tensor] = {}
        for norm, (bound, places) in zip(norms, groups, strict=True):
            factor = (torch.where(finite, bound / norm.clamp_min(bound), 0.0) * weights).float()
            factors |= dict.fromkeys(places, factor)
        return torch.cat([piece.total(factors[place], finite) for place, piece in enumerate(held)], 1)


class _Plain:
    """A piece as it is: [lanes, records, ...]."""

    def __init__(self, each: torch.Tensor) -> None:
        self.each = each.float().flatten(2) if each.ndim > 2 else each.float()[..., None]

    def squares(self) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(self.each, dim=2, dtype=torch.float64)
        return norms.square()

    def total(self, factors: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        each = self.each.masked_fill(~finite[..., None], 0)  # zero times NaN would be NaN
        return (factors[:, None] @ each)[:, 0]


class _Product:
    """A piece left^T right, [lanes, records, t, p] and [lanes, records, t, d], written down only where that is cheaper.

    Guarantee: `squares` bounds the squared norm of what `total` adds up, record by record.
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        (places, p), d = left.shape[2:], right.shape[3]
        self.written = None if CHEAPER * places * (p + d) <= p * d else _Plain(_multiplied(left, right))
        self.left, self.right = (left.float(), right.float()) if self.written is None else (left, right)

    def squares(self) -> torch.Tensor:
        if self.written is not None:
            return self.written.squares()
        most = torch.maximum(*(side.abs().amax((2, 3)) for side in (self.left, self.right)))
        if self.left.shape[2] == 1:  # one place: faster without a matrix product
            pairs = self.left.new_ones(()).double()
            for side in (self.left, self.right):
                pairs = pairs * torch.linalg.vector_norm(side, dim=3, keepdim=True, dtype=torch.float64).square()
        else:
            left, right = self.left.double(), self.right.double()
            pairs = (left @ left.mT) * (right @ right.mT)
        spread = pairs.diagonal(dim1=2, dim2=3).sqrt().sum(2).square()
        return torch.where(most <= MOST_FACTOR, pairs.sum((2, 3)).clamp_min(0) + CANCELLED * spread, math.inf)

    def total(self, factors: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        if self.written is not None:
            return self.written.total(factors, finite)
        left, right = (side.masked_fill(~finite[..., None, None], 0) for side in (self.left, self.right))
        return ((left * factors[..., None, None]).flatten(1, 2).mT @ right.flatten(1, 2)).flatten(1)


def _multiplied(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left^T right, [lanes, records, p d], in float32 (on a GPU by TF32 where convolutions are)."""
    ends = left.mT.flatten(0, 1), right.flatten(0, 1)
    with matrix_precision("tf32" if torch.backends.cudnn.allow_tf32 else "ieee"):
        if left.dtype == torch.bfloat16 and left.is_cuda:
            return torch.bmm(*ends, out_dtype=torch.float32).view(*left.shape[:2], -1)
        return torch.bmm(ends[0].float(), ends[1].float()).view(*left.shape[:2], -1)


@contextmanager
def matrix_precision(precision: str) -> Iterator[None]:
    """Take matrix products of float32 as such ("ieee"), or on a GPU in TF32, whatever the user has chosen."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            backend.fp32_precision = was
