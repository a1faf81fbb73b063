"""Functional Rényi DP: releases of a function (Jiang, Sun, Kamp, Fritz; "Functional Rényi Differential Privacy").

The function is f_D = sum over records x of k(x, .), an element of the kernel's Hilbert space H; a record adds a
vector of norm sqrt(k(x, x)) = 1. Its noisy version is f_D + z G, with G a Gaussian process of covariance k.

**What may be released.** Let l_1, …, l_n be bounded linear functionals on H (values at points, derivatives at
points), chosen without the data, with Gram matrix M. The vector v_D = (l_i(f_D)) of exact numbers changes by u =
(l_i(k(x, .))) when x comes or goes. By the reproducing property u' M^-1 u is the squared norm of the projection of
k(x, .) onto the span of the functionals' representers, at most 1. So M^-1/2 v_D is an ordinary sum of rows of norm at
most 1, and v_D + M^1/2 N(0, z² I), which is v_D with the noise z G seen by the same functionals, is the Gaussian
mechanism with noise multiplier z. This is how `Points` releases: whitened rows through the vault, coloured again
afterwards. Everything that is computed from it is post-processing; what is *not* are other functionals of the exact
f_D, such as a derivative of which only the values were noised. That is where the published training leaks.

**A whole path.** `Frequencies` releases, for frequencies w_1, …, w_m drawn without the data, the sum of phi(x) = (cos
w_j . x, sin w_j . x)_j / sqrt(m), whose norm is exactly 1. Then y -> <phi(y), released> is a noisy function that is
known everywhere, with all its derivatives: every use of it is post-processing. Its noise z <phi(.), n> has covariance
<phi(x), phi(y)>, whose mean over the frequencies is k, and which tends to k as m grows.

**The calculus of f-RDP in ledger events.** Sequential composition: each release is a charge. Sub-sampling: the sum is
over a Poisson sample, with the charge's probability. Parallel composition: functions of different classes are blocks
of one vector (`by_class`), and one record touches one block, so that they cost as much as one. Conversion to
(epsilon, delta): `accounting`, by PLD, which is tighter than by way of Rényi orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sfumato.functional.kernels import Gaussian, Spectrum

Representation = Callable[[torch.Tensor], torch.Tensor]  # images to vectors, one by one
Block = tuple[Representation, torch.Tensor, float]  # of frequencies [count, dimension], and what scales their features

RANK = 1e-6  # eigenvalues of a Gram matrix below this share of the largest are none: those functionals are dependent


@dataclass(frozen=True)
class Part:
    """A kernel on a representation of images, by its frequencies, and its weight in a sum of such kernels."""

    representation: Representation
    kernel: Spectrum
    weight: float = 1.0


class Frequencies:
    """Random Fourier features of a weighted sum of kernels: rows of norm 1 for images.

    phi has 2 * `count` entries. The parts have frequencies in proportion to their weights, and weights are scaled to
    sum to 1, so that <phi(x), phi(y)> is the sum kernel on average.
    """

    def __init__(self, parts: list[Part], count: int, like: torch.Tensor, generator: torch.Generator) -> None:
        total = sum(part.weight for part in parts)
        self._blocks: list[Block] = []
        for part in parts:
            share = part.weight / total
            number = max(1, round(count * share))
            dimension = part.representation(like[:1]).shape[1]
            drawn = part.kernel.frequencies(number, dimension, generator)
            self._blocks.append((part.representation, drawn, math.sqrt(share / number)))

    def drawn(self, count: int, generator: torch.Generator, means: torch.Tensor) -> tuple[Frequencies, torch.Tensor]:
        """Some `count` of the frequencies, at random, as features of norm 1; and `means` [N, features] in these."""
        total = sum(len(frequencies) for _, frequencies, _ in self._blocks)
        blocks: list[Block] = []
        chosen: list[torch.Tensor] = []
        start = 0
        for representation, frequencies, scale in self._blocks:
            number = len(frequencies)
            some = max(1, round(count * number / total))
            picked = torch.randint(number, (some,), generator=generator, device=generator.device)
            larger = math.sqrt(number / some)
            blocks.append((representation, frequencies[picked], scale * larger))
            chosen.append(means[:, torch.cat([start + picked, start + number + picked])] * larger)
            start += 2 * number
        return Frequencies._of(blocks), torch.cat(chosen, 1)

    @staticmethod
    def beside(several: Sequence[Frequencies]) -> Frequencies:
        """phi of each, one after the other: the norm is the root of their number."""
        return Frequencies._of([block for features in several for block in features._blocks])

    def tensors(self) -> list[torch.Tensor]:
        return [frequencies for _, frequencies, _ in self._blocks]

    def like(self, tensors: Sequence[torch.Tensor]) -> Frequencies:
        """The same features with these frequencies."""
        return Frequencies._of([(block[0], new, block[2]) for block, new in zip(self._blocks, tensors, strict=True)])

    @classmethod
    def _of(cls, blocks: list[Block]) -> Frequencies:
        made = object.__new__(cls)
        made._blocks = blocks
        return made

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """phi, [N, features]."""
        rows = []
        for representation, frequencies, scale in self._blocks:
            phase = representation(images) @ frequencies.T
            rows += [phase.cos() * scale, phase.sin() * scale]
        return torch.cat(rows, 1)


class Points:
    """Values of a function, and its derivatives, at chosen public points: exact, whatever their covariance.

    For vectors [n, d] and a mixture of Gaussian kernels. With d much larger than n derivatives are cheap all the same:
    across the span of the points' differences they are independent of each other and of the values, with covariance
    mean of K_h / h² for every direction; only within that span, of n - 1 dimensions, there is a dense Gram matrix.
    """

    def __init__(self, kernel: Gaussian, points: torch.Tensor, *, derivatives: bool = True) -> None:
        self.kernel, self.points = kernel, points.detach().double()
        _, sizes, directions = torch.linalg.svd(self.points - self.points.mean(0), full_matrices=True)
        rank = int((sizes > RANK * sizes.max().clamp_min(1e-30)).sum())
        if not derivatives:
            directions, rank = directions[:0], 0
        self._within, self._across = directions[:rank], directions[rank:]
        inside, outside = self._gram()
        self._inside, self._white_inside = _roots(inside)
        self._outside, self._white_outside = _roots(outside)

    @property
    def width(self) -> int:
        """Length of a row."""
        return len(self._inside) + len(self.points) * len(self._across)

    def rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """For each vector x the whitened functionals of k(x, .), [N, width]: norm at most 1."""
        values, slopes = self._functionals(vectors.double())
        inner = torch.cat([values, (slopes @ self._within.T).flatten(1)], 1) @ self._white_inside.T
        outer = self._white_outside @ (slopes @ self._across.T)
        return torch.cat([inner, outer.flatten(1)], 1)

    def coloured(self, released: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From a noisy sum of rows to values [n] and derivatives [n, d] of the noisy function."""
        count = len(self.points)
        inner, outer = released.double()[: len(self._inside)], released.double()[len(self._inside) :]
        inner = self._inside @ inner
        values, within = inner[:count], inner[count:].view(count, len(self._within))
        across = self._outside @ outer.view(count, len(self._across))
        return values, within @ self._within + across @ self._across

    def interpolation(self, released: torch.Tensor) -> torch.Tensor:
        """Weights c of the smoothest function with the released values: it is x -> sum of c_i k(w_i, x)."""
        count = len(self.points)
        return (self._white_inside @ released.double()[: len(self._inside)])[:count]

    def _functionals(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k(x, w_i), [N, n], and its derivative in w_i, [N, n, d]."""
        differences = vectors[:, None] - self.points
        squares = differences.square().sum(2)
        values = torch.zeros_like(squares)
        slopes = torch.zeros_like(squares)
        for h in self.kernel.bandwidths:
            each = torch.exp(-squares / (2 * h**2)) / len(self.kernel.bandwidths)
            values, slopes = values + each, slopes + each / h**2
        return values, slopes[..., None] * differences

    def _gram(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gram matrices: of values and derivatives within the span, and of derivatives across it."""
        count, rank = len(self.points), len(self._within)
        places = self.points @ self._within.T
        differences = places[:, None] - places  # w_i - w_j
        squares = torch.cdist(self.points, self.points, compute_mode="donot_use_mm_for_euclid_dist").square()
        whole = squares.new_zeros(count, 1 + rank, count, 1 + rank)
        outside = torch.zeros_like(squares)
        eye = torch.eye(rank, dtype=squares.dtype, device=squares.device)
        for h in self.kernel.bandwidths:
            each = torch.exp(-squares / (2 * h**2)) / len(self.kernel.bandwidths)
            outside += each / h**2
            whole[:, 0, :, 0] += each
            slope = each[..., None] * differences / h**2
            whole[:, 0, :, 1:] += slope  # value at i, derivative at j
            whole[:, 1:, :, 0] -= slope.permute(0, 2, 1)
            bend = eye / h**2 - differences[..., :, None] * differences[..., None, :] / h**4
            whole[:, 1:, :, 1:] += (each[..., None, None] * bend).permute(0, 2, 1, 3)
        # rows as `rows` lays them out: all values, then derivatives point by point
        values, slopes = whole[:, :1].flatten(0, 1), whole[:, 1:].flatten(0, 1)
        ordered = torch.cat([values, slopes]).view(-1, count, 1 + rank)
        inside = torch.cat([ordered[:, :, 0], ordered[:, :, 1:].flatten(1)], 1)
        return inside, outside


def _roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric root of a Gram matrix and its inverse; directions without size are left out of both."""
    sizes, vectors = torch.linalg.eigh(gram)
    there = sizes > RANK * sizes.max().clamp_min(1e-30) if len(sizes) else sizes > 0
    roots = torch.where(there, sizes.clamp_min(0).sqrt(), 0.0)
    inverse = torch.where(there, 1 / roots.clamp_min(1e-300), 0.0)
    return vectors * roots @ vectors.T, vectors * inverse @ vectors.T
