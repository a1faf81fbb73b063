"""Release of kernel mean embeddings (Jiang, Sun, Kamp, Fritz; "Functional Rényi Differential Privacy").

The exact function is f_D = sum over records x of k(x, .), an element of the kernel's Hilbert space H. One record adds a
vector of norm sqrt(k(x, x)) = 1. The noisy function is f_D + z G, where G is a Gaussian process with covariance k.

**What may be released.** Let l_1, …, l_n be bounded linear functionals on H (values or derivatives at points) that do
not depend on the data, with Gram matrix M. If record x is added or removed, the vector v_D = (l_i(f_D)) changes by u =
(l_i(k(x, .))). By the reproducing property, u' M^-1 u is the squared norm of the projection of k(x, .) onto the span of
the representers of the functionals, hence at most 1. So M^-1/2 v_D is a sum of rows of norm at most 1, and
v_D + M^1/2 N(0, z² I) is the Gaussian mechanism with noise multiplier z. Its noise has the law of z G evaluated by the
same functionals. `PointEvaluations` releases this: the vault sums whitened rows, and `unwhiten` multiplies by M^1/2
afterwards. All computations on the released vector are post-processing. Other functionals of the exact f_D are *not*
post-processing, for example a derivative if only the values have noise. This is the leak of the published training.

**Release of a whole path.** `RandomFourierFeatures` draws frequencies w_1, …, w_m without the data and releases the sum
of phi(x) = (cos w_j . x, sin w_j . x)_j / sqrt(m), whose norm is exactly 1. The noisy function y -> <phi(y), released>
is then known everywhere with all its derivatives, and every use of it is post-processing. Its noise z <phi(.), n> has
covariance z² <phi(x), phi(y)>. The expectation of <phi(x), phi(y)> over the frequencies is k, and it converges to k as
m grows.

**Accounting.** Sequential composition: each release is one charge in the ledger. Subsampling: the sum is over a Poisson
sample with the sampling probability of the charge. Parallel composition: functions of different classes are blocks of
one vector (`by_class`); one record changes one block, so all classes cost as much as one. `privacy.accounting` converts
to (epsilon, delta) with privacy loss distributions (PLD), which is tighter than the conversion from Rényi orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sfumato.features.kernels import GaussianKernel, SpectralDensity

Representation = Callable[[torch.Tensor], torch.Tensor]  # row-wise function from images to vectors
_Block = tuple[Representation, torch.Tensor, float]  # representation, frequencies [count, dimension], scale of features

RANK_TOLERANCE = 1e-6  # relative threshold: smaller eigenvalues of a Gram matrix count as zero


@dataclass(frozen=True)
class FrequencyBlock:
    """One term of a weighted sum of kernels.

    - representation: row-wise function from images to the vectors on which the kernel acts.
    - kernel: the spectral density of the kernel.
    - weight: relative weight of the term, default 1.
    """

    representation: Representation
    kernel: SpectralDensity
    weight: float = 1.0


class RandomFourierFeatures:
    """Random Fourier features (Rahimi and Recht 2007) of a weighted sum of kernels; each image has a row of norm 1.

    The weights are normalised to sum 1, and each term gets frequencies in proportion to its weight. The expectation of
    <phi(x), phi(y)> is the weighted sum of the kernels.

    - terms: the kernels.
    - count: number of frequencies; phi has 2 * `count` entries.
    - like: images, from which the dimension of each representation is determined.
    - generator: draws the frequencies.
    """

    def __init__(self, terms: list[FrequencyBlock], count: int, like: torch.Tensor, generator: torch.Generator) -> None:
        total = sum(term.weight for term in terms)
        self._blocks: list[_Block] = []
        for term in terms:
            share = term.weight / total
            number = max(1, round(count * share))
            dimension = term.representation(like[:1]).shape[1]
            frequencies = term.kernel.frequencies(number, dimension, generator)
            self._blocks.append((term.representation, frequencies, math.sqrt(share / number)))

    def subsample(
        self, count: int, generator: torch.Generator, means: torch.Tensor
    ) -> tuple[RandomFourierFeatures, torch.Tensor]:
        """Return features of `count` random frequencies, scaled to norm 1, and the matching entries of `means`.

        - means: mean embeddings [N, features] in terms of all frequencies.
        """
        total = sum(len(frequencies) for _, frequencies, _ in self._blocks)
        blocks: list[_Block] = []
        selected: list[torch.Tensor] = []
        start = 0
        for representation, frequencies, scale in self._blocks:
            number = len(frequencies)
            subset = max(1, round(count * number / total))
            index = torch.randint(number, (subset,), generator=generator, device=generator.device)
            factor = math.sqrt(number / subset)
            blocks.append((representation, frequencies[index], scale * factor))
            selected.append(means[:, torch.cat([start + index, start + number + index])] * factor)
            start += 2 * number
        return RandomFourierFeatures._of(blocks), torch.cat(selected, 1)

    @staticmethod
    def concatenate(several: Sequence[RandomFourierFeatures]) -> RandomFourierFeatures:
        """Return the concatenation of all features; the norm is the square root of their number."""
        return RandomFourierFeatures._of([block for features in several for block in features._blocks])

    def tensors(self) -> list[torch.Tensor]:
        """Return the frequencies of each term."""
        return [frequencies for _, frequencies, _ in self._blocks]

    def like(self, tensors: Sequence[torch.Tensor]) -> RandomFourierFeatures:
        """Return the same features with other frequencies."""
        pairs = zip(self._blocks, tensors, strict=True)
        return RandomFourierFeatures._of([(block[0], frequencies, block[2]) for block, frequencies in pairs])

    @classmethod
    def _of(cls, blocks: list[_Block]) -> RandomFourierFeatures:
        features = object.__new__(cls)
        features._blocks = blocks
        return features

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return phi, [N, features]."""
        rows = []
        for representation, frequencies, scale in self._blocks:
            phase = representation(images) @ frequencies.T
            rows += [phase.cos() * scale, phase.sin() * scale]
        return torch.cat(rows, 1)


class PointEvaluations:
    """Values, and derivatives, of a function at public points; the noise has the exact covariance of the process.

    Derivatives along directions orthogonal to all differences of the points are independent of each other and of the
    values; their covariance is the mean of K_h / h² for every direction. Only the span of the differences, of at most
    n - 1 dimensions, needs a dense Gram matrix. So derivatives are cheap even if d is much larger than n.

    - kernel: a mixture of Gaussian kernels.
    - points: [n, d], must not depend on the private data.
    - derivatives: release derivatives as well, default True.
    """

    def __init__(self, kernel: GaussianKernel, points: torch.Tensor, *, derivatives: bool = True) -> None:
        self.kernel, self.points = kernel, points.detach().double()
        _, singular_values, directions = torch.linalg.svd(self.points - self.points.mean(0), full_matrices=True)
        rank = int((singular_values > RANK_TOLERANCE * singular_values.max().clamp_min(1e-30)).sum())
        if not derivatives:
            directions, rank = directions[:0], 0
        self._span, self._complement = directions[:rank], directions[rank:]
        inner, outer = self._gram()
        self._root_inner, self._white_inner = _roots(inner)
        self._root_outer, self._white_outer = _roots(outer)

    @property
    def width(self) -> int:
        """Length of a row."""
        return len(self._root_inner) + len(self.points) * len(self._complement)

    def rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the whitened functionals of k(x, .) for each vector x, [N, width]; the norm is at most 1."""
        values, slopes = self._functionals(vectors.double())
        inner = torch.cat([values, (slopes @ self._span.T).flatten(1)], 1) @ self._white_inner.T
        outer = self._white_outer @ (slopes @ self._complement.T)
        return torch.cat([inner, outer.flatten(1)], 1)

    def unwhiten(self, released: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values [n] and derivatives [n, d] of the noisy function, from a noisy sum of rows."""
        count = len(self.points)
        inner, outer = released.double()[: len(self._root_inner)], released.double()[len(self._root_inner) :]
        inner = self._root_inner @ inner
        values, along = inner[:count], inner[count:].view(count, len(self._span))
        across = self._root_outer @ outer.view(count, len(self._complement))
        return values, along @ self._span + across @ self._complement

    def interpolation(self, released: torch.Tensor) -> torch.Tensor:
        """Return the weights c of the minimum-norm interpolant x -> sum of c_i k(w_i, x) of the released values."""
        count = len(self.points)
        return (self._white_inner @ released.double()[: len(self._root_inner)])[:count]

    def _functionals(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k(x, w_i), [N, n], and its derivative with respect to w_i, [N, n, d]."""
        differences = vectors[:, None] - self.points
        squares = differences.square().sum(2)
        values = torch.zeros_like(squares)
        slopes = torch.zeros_like(squares)
        for h in self.kernel.bandwidths:
            term = torch.exp(-squares / (2 * h**2)) / len(self.kernel.bandwidths)
            values, slopes = values + term, slopes + term / h**2
        return values, slopes[..., None] * differences

    def _gram(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two Gram matrices: of values and derivatives in the span, and of derivatives in its complement."""
        count, rank = len(self.points), len(self._span)
        coordinates = self.points @ self._span.T
        differences = coordinates[:, None] - coordinates  # w_i - w_j
        squares = torch.cdist(self.points, self.points, compute_mode="donot_use_mm_for_euclid_dist").square()
        gram = squares.new_zeros(count, 1 + rank, count, 1 + rank)
        outer = torch.zeros_like(squares)
        eye = torch.eye(rank, dtype=squares.dtype, device=squares.device)
        for h in self.kernel.bandwidths:
            term = torch.exp(-squares / (2 * h**2)) / len(self.kernel.bandwidths)
            outer += term / h**2
            gram[:, 0, :, 0] += term
            first = term[..., None] * differences / h**2
            gram[:, 0, :, 1:] += first  # value at i, derivative at j
            gram[:, 1:, :, 0] -= first.permute(0, 2, 1)
            second = eye / h**2 - differences[..., :, None] * differences[..., None, :] / h**4
            gram[:, 1:, :, 1:] += (term[..., None, None] * second).permute(0, 2, 1, 3)
        # The order of `rows`: all values, then the derivatives point by point.
        values, slopes = gram[:, :1].flatten(0, 1), gram[:, 1:].flatten(0, 1)
        ordered = torch.cat([values, slopes]).view(-1, count, 1 + rank)
        inner = torch.cat([ordered[:, :, 0], ordered[:, :, 1:].flatten(1)], 1)
        return inner, outer


def _roots(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the symmetric square root of a Gram matrix and its pseudo-inverse."""
    eigenvalues, vectors = torch.linalg.eigh(gram)
    if len(eigenvalues):
        positive = eigenvalues > RANK_TOLERANCE * eigenvalues.max().clamp_min(1e-30)
    else:
        positive = eigenvalues > 0
    roots = torch.where(positive, eigenvalues.clamp_min(0).sqrt(), 0.0)
    inverse = torch.where(positive, 1 / roots.clamp_min(1e-300), 0.0)
    return vectors * roots @ vectors.T, vectors * inverse @ vectors.T
