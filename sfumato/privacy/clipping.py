"""Clipping: bound the L2 norm of every record's contribution to a sum.

Vectors of `Vault.vectors` consist of *pieces*: a tensor, or two factors (left, right) that stand for the matrix left^T
right, such as the gradient of a linear layer. Where it is cheaper, the matrix is not formed (ghost clipping): its
squared norm is sum_{t,u} (l_t . l_u) (r_t . r_u), and the clipped sum over records is one matrix product.

The norm is computed from the numbers that are summed. A wrong layer rule gives another vector, with the same bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Piece = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Groups = Sequence[tuple[float, Sequence[int]]]  # (clipping norm, indices of the pieces clipped to it together)

CANCELLATION = 1e-8  # times (sum_t |l_t| |r_t|)^2, added to squared norms: rounding error of terms that cancel
MAX_FACTOR = 1e12  # largest entry of a factor; beyond, the entries of the other factor could underflow in float32
MAX_NORM_RATIO = 1e30  # norm over clipping norm; a longer vector becomes zero, as its factor would underflow in float32
MIN_SAVING = 4  # keep a product factored if that needs this many times fewer operations


def clip(rows: torch.Tensor, bound: float, unit: float, nonnegative: bool) -> torch.Tensor:
    """Return the rows in float64, clipped to the norm `bound` and divided by `unit`; non-finite rows become zero.

    Guarantee: each output row depends on its input row alone and has an L2 norm of at most `bound / unit`. With
    `nonnegative` it has no negative entry.
    """
    rows = rows.to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows.masked_fill_(~norms.isfinite(), 0)  # the norm of a row with a NaN or an infinity is not finite
    if nonnegative:
        norms = torch.linalg.vector_norm(rows.clamp_min_(0), dim=1, keepdim=True)
    return rows.mul_(bound / unit / norms.nan_to_num(nan=bound, posinf=bound).clamp_min(bound))


def clipped_sum(pieces: Sequence[Piece], groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over records of clipped vectors, [lanes, entries], float32.

    - pieces: [lanes, records, ...]. A lane is one of several networks that are evaluated side by side.
    - groups: each piece is in exactly one group; a record's vector in a group is clipped to the group's norm.
    - weights: factor for each record after clipping, [lanes, records].

    Guarantee: a record adds a vector of norm at most its weight times the root of the sum of squared clipping norms, up
    to float32 rounding. A record with a non-finite entry, or one beyond `MAX_FACTOR` or `MAX_NORM_RATIO`, adds zero.
    """
    if sorted(index for _, indices in groups for index in indices) != list(range(len(pieces))):
        raise ValueError("each piece of a gradient must be in exactly one group")
    parts = [_Factored(*piece) if isinstance(piece, tuple) else _Dense(piece) for piece in pieces]
    with matrix_precision("ieee"), torch.autocast(weights.device.type, enabled=False):
        squares = [part.squared_norms() for part in parts]
        norms = [torch.stack([squares[index] for index in indices]).sum(0).sqrt() for _, indices in groups]
        within = [norm <= MAX_NORM_RATIO * bound for norm, (bound, _) in zip(norms, groups, strict=True)]
        finite = torch.stack(within).all(0)  # False for NaN
        factors: dict[int, torch.Tensor] = {}
        for norm, (bound, indices) in zip(norms, groups, strict=True):
            factor = (torch.where(finite, bound / norm.clamp_min(bound), 0.0) * weights).float()
            factors |= dict.fromkeys(indices, factor)
        return torch.cat([part.weighted_sum(factors[index], finite) for index, part in enumerate(parts)], 1)


class _Dense:
    """A piece that is a tensor: [lanes, records, ...]."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows.float().flatten(2) if rows.ndim > 2 else rows.float()[..., None]

    def squared_norms(self) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(self.rows, dim=2, dtype=torch.float64)
        return norms.square()

    def weighted_sum(self, factors: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        rows = self.rows.masked_fill(~finite[..., None], 0)  # zero times NaN would be NaN
        return (factors[:, None] @ rows)[:, 0]


class _Factored:
    """A piece left^T right, [lanes, records, t, p] and [lanes, records, t, d]; multiplied only where that is cheaper.

    Guarantee: `squared_norms` bounds the squared norm of what `weighted_sum` adds, for each record.
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        (terms, p), d = left.shape[2:], right.shape[3]
        self.dense = None if MIN_SAVING * terms * (p + d) <= p * d else _Dense(_multiply(left, right))
        self.left, self.right = (left.float(), right.float()) if self.dense is None else (left, right)

    def squared_norms(self) -> torch.Tensor:
        if self.dense is not None:
            return self.dense.squared_norms()
        largest = torch.maximum(*(side.abs().amax((2, 3)) for side in (self.left, self.right)))
        if self.left.shape[2] == 1:  # a single term: faster without a matrix product
            pairs = self.left.new_ones(()).double()
            for side in (self.left, self.right):
                pairs = pairs * torch.linalg.vector_norm(side, dim=3, keepdim=True, dtype=torch.float64).square()
        else:
            left, right = self.left.double(), self.right.double()
            pairs = (left @ left.mT) * (right @ right.mT)
        magnitude = pairs.diagonal(dim1=2, dim2=3).sqrt().sum(2).square()
        return torch.where(largest <= MAX_FACTOR, pairs.sum((2, 3)).clamp_min(0) + CANCELLATION * magnitude, math.inf)

    def weighted_sum(self, factors: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        if self.dense is not None:
            return self.dense.weighted_sum(factors, finite)
        left, right = (side.masked_fill(~finite[..., None, None], 0) for side in (self.left, self.right))
        return ((left * factors[..., None, None]).flatten(1, 2).mT @ right.flatten(1, 2)).flatten(1)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left^T right, [lanes, records, p d], in float32 (on a GPU in TF32 if cuDNN may use it)."""
    factors = left.mT.flatten(0, 1), right.flatten(0, 1)
    with matrix_precision("tf32" if torch.backends.cudnn.allow_tf32 else "ieee"):
        if left.dtype == torch.bfloat16 and left.is_cuda:
            return torch.bmm(*factors, out_dtype=torch.float32).view(*left.shape[:2], -1)
        return torch.bmm(factors[0].float(), factors[1].float()).view(*left.shape[:2], -1)


@contextmanager
def matrix_precision(precision: str) -> Iterator[None]:
    """Compute float32 matrix products in full precision ("ieee"), or on a GPU in "tf32", whatever the user has set."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, previous in zip(backends, before, strict=True):
            backend.fp32_precision = previous
