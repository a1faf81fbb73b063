"""Gaussian distributions of embedded images, one for each class, from noisy sums of first and second moments.

A row z of norm at most one becomes the vector (a z, b zz') of norm at most one, where a² + b² = 1; the upper triangle
of zz' is stored, with factor sqrt(2) off the diagonal, so that its norm is |z|². Two noisy sums are all that is needed
of the private images: of these vectors over each class (`moment_rows`), and of zz' over all images (`product_rows`),
which has less noise for each image. The rest is post-processing:

- Both sums give the covariance matrix within the classes. Their mean is weighted by the inverse of their variances.
- Noise hides the small entries of a covariance matrix. They are filtered: an entry of the difference from an expected
  matrix is kept by its share of signal (Wiener), where signal is in proportion to the spread in both directions. For
  the covariance within the classes the spread of public images is expected; for that of a class, the former, or that
  of public images which resemble the class.
- The trace is filtered by the share of the variance that traces are expected to have. What is indefinite loses its
  negative eigenvalues, and is scaled to that trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

FIRST_WEIGHT = 0.58  # a
TINY = 1e-30  # where all rows are equal
TRACE_SPREAD = 0.5  # standard deviation of traces around the expected one, relative to it
LEAST_SPREAD = 1e-6  # relative to the largest eigenvalue, in a division by it
# Means [classes, width], shares [classes] and the covariance within classes [width, width] to covariances expected.
Expected = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def moment_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return first and second moments [N, moment_width] of rows [N, width] of norm at most one; their norm likewise."""
    return torch.cat([FIRST_WEIGHT * rows, math.sqrt(1 - FIRST_WEIGHT**2) * product_rows(rows)], 1)


def product_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return second moments of rows [N, width] of norm at most one; their norm likewise."""
    upper = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
    return rows[:, upper[0]] * rows[:, upper[1]] * _factors(upper)


def _matrices(products: torch.Tensor, width: int) -> torch.Tensor:
    """Return symmetric matrices [N, width, width] of sums of `product_rows`."""
    upper = torch.triu_indices(width, width, device=products.device)
    found = products.new_zeros(len(products), width, width)
    found[:, upper[0], upper[1]] = found[:, upper[1], upper[0]] = products / _factors(upper)
    return found


def _factors(upper: torch.Tensor) -> torch.Tensor:
    return torch.where(upper[0] == upper[1], 1.0, math.sqrt(2))


class ClassGaussians:
    """Means [classes, width] and roots [classes, width, width] of covariances: z = mean + root n, with normal n."""

    def __init__(self, means: torch.Tensor, roots: torch.Tensor) -> None:
        self.means, self.roots = means, roots

    @classmethod
    def of(
        cls,
        sums: torch.Tensor,
        counts: torch.Tensor,
        noise: float,
        spread: torch.Tensor,
        common: tuple[torch.Tensor, float] | None = None,
        expected: Expected | None = None,
    ) -> ClassGaussians:
        """Estimate from noisy sums.

        - sums: of `moment_rows` of each class, [classes, moment_width].
        - counts: images of each class.
        - noise: standard deviation in the sums.
        - spread: covariance matrix of public rows, [width, width].
        - common: sum of `product_rows` of all images, and the standard deviation of its noise; None: not known.
        - expected: gives the covariances that are expected of classes, [classes, width, width]; None: all equal.
        """
        counts = counts.double().clamp_min(1)
        width, total = len(spread), counts.sum()
        averages, shares = sums.double() / counts[:, None], counts / total
        means = averages[:, :width] / FIRST_WEIGHT
        bias = (noise / counts / FIRST_WEIGHT).square()  # of the noise in a mean, squared
        identity = torch.eye(width, dtype=means.dtype, device=means.device)
        squares = means[:, :, None] * means[:, None] - bias[:, None, None] * identity
        found = _matrices(averages[:, width:] / math.sqrt(1 - FIRST_WEIGHT**2), width) - squares
        variance = (noise / counts).square() / (2 * (1 - FIRST_WEIGHT**2))  # of the noise in an entry of `found`
        within, error = (shares[:, None, None] * found).sum(0, keepdim=True), (shares.square() * variance).sum()
        if common is not None:
            other = _matrices(common[0].double()[None] / total, width) - (shares[:, None, None] * squares).sum(0)
            other_error = (common[1] / total).square() / 2
            within = torch.lerp(within, other, error / (error + other_error).clamp_min(TINY))
            error = error * other_error / (error + other_error).clamp_min(TINY)
        within = _filtered(spread.double()[None], within, error[None])
        likely = within if expected is None else expected(means, shares, within[0])
        values, vectors = torch.linalg.eigh(_filtered(likely, found, variance))
        means = means / means.norm(dim=1, keepdim=True).clamp_min(1)  # those of rows of norm at most one
        return cls(means.float(), (vectors * values.clamp_min(0).sqrt()[:, None]).float())

    def draw(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw a row for each label, [N, width]."""
        normals = torch.randn(len(labels), self.means.shape[1], generator=generator, device=labels.device)
        rows = torch.empty_like(normals)
        for number, (mean, root) in enumerate(zip(self.means, self.roots, strict=True)):
            rows[labels == number] = mean + normals[labels == number] @ root.T
        return rows


def moved(rows: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return rows [N, width] with this mean and covariance: the affine map that moves Gaussian rows least."""
    values, vectors = torch.linalg.eigh(torch.cov(rows.double().T))
    values = values.clamp_min(LEAST_SPREAD * values.max()).sqrt()
    root, inverse = (vectors * values) @ vectors.T, (vectors / values) @ vectors.T
    values, vectors = torch.linalg.eigh(root @ covariance @ root)
    change = inverse @ ((vectors * values.clamp_min(0).sqrt()) @ vectors.T) @ inverse
    found: torch.Tensor = mean + (rows - rows.double().mean(0)) @ change
    return found


def weighted_covariances(rows: torch.Tensor, weights: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Return covariances [classes, width, width] of rows [N, width] with weights [N, classes].

    - common: a covariance matrix, which counts as much as `width` rows of a class. Weights w are worth as much as
      (sum of w)² / (sum of w²) rows; where a class has few, its own covariance says little.
    """
    weights = weights.double()
    totals, squares = weights.sum(0), weights.square().sum(0).clamp_min(TINY)
    weights = weights / totals.clamp_min(TINY)
    means = weights.T @ rows
    products = torch.stack([(rows * column[:, None]).T @ rows for column in weights.T])
    own, worth = products - means[:, :, None] * means[:, None], totals.square() / squares
    return torch.lerp(common.expand_as(own), own, (worth / (worth + rows.shape[1]))[:, None, None])


def _filtered(expected: torch.Tensor, noisy: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return covariances between an expected and noisy ones, [classes, width, width].

    - expected: [1 or classes, width, width].
    - variance: of the noise in the entries off the diagonal of each class, [classes].
    """
    width = noisy.shape[1]
    spread, basis = torch.linalg.eigh(expected)
    common, found = spread.sum(1), noisy.diagonal(dim1=1, dim2=2).sum(1)
    likely = (TRACE_SPREAD * common).square()
    trace = torch.lerp(common, found, likely / (likely + 2 * width * variance).clamp_min(TINY)).clamp_min(TINY)
    spread = spread.clamp_min(0) * (trace / common.clamp_min(TINY))[:, None]
    differences = basis.mT @ noisy @ basis - torch.diag_embed(spread)
    squares, noise = differences.square().sum((1, 2)), width * (width + 1) * variance
    scale = squares * _signal(squares, noise) / trace.square()
    power = scale[:, None, None] * spread[:, :, None] * spread[:, None]  # expected square of an entry, without noise
    kept = power / (power + variance[:, None, None]).clamp_min(TINY)
    values, vectors = torch.linalg.eigh(torch.diag_embed(spread) + kept * differences)
    values = values.clamp_min(0)
    values = values * (trace / values.sum(1).clamp_min(TINY))[:, None]
    axes = basis @ vectors
    covariances: torch.Tensor = (axes * values[:, None]) @ axes.mT
    return covariances


def _signal(squares: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the share of signal in squared differences, given what noise alone is expected to have (James-Stein)."""
    return (1 - noise / squares.clamp_min(TINY)).clamp(0, 1)
