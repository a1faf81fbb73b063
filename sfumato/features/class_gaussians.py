"""Gaussian distributions of embedded images, one for each class, from noisy sums of first and second moments.

A row z of norm at most one becomes the vector (a z, b zz') of norm at most one, where a² + b² = 1; the upper triangle
of zz' is stored, with factor sqrt(2) off the diagonal, so that its norm is |z|². A noisy sum of these vectors over a
class is all that is needed of the private images. The rest is post-processing:

- Noise hides the small entries of a covariance matrix. They are filtered: an entry of the difference from an expected
  matrix is kept by its share of signal (Wiener), where signal is in proportion to the spread in both directions. For
  the mean of all classes the spread of public images is expected; for each class, the mean of all.
- The trace is filtered likewise. What is indefinite loses its negative eigenvalues, and is scaled to that trace.
"""

from __future__ import annotations

import math

import torch

FIRST_WEIGHT = 0.5  # a
TINY = 1e-30  # where all rows are equal


def moment_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return first and second moments [N, moment_width] of rows [N, width] of norm at most one; their norm likewise."""
    upper = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
    products = rows[:, upper[0]] * rows[:, upper[1]] * _factors(upper)
    return torch.cat([FIRST_WEIGHT * rows, math.sqrt(1 - FIRST_WEIGHT**2) * products], 1)


def _factors(upper: torch.Tensor) -> torch.Tensor:
    return torch.where(upper[0] == upper[1], 1.0, math.sqrt(2))


class ClassGaussians:
    """Means [classes, width] and roots [classes, width, width] of covariances: z = mean + root n, with normal n."""

    def __init__(self, means: torch.Tensor, roots: torch.Tensor) -> None:
        self.means, self.roots = means, roots

    @classmethod
    def of(cls, sums: torch.Tensor, counts: torch.Tensor, noise: float, spread: torch.Tensor) -> ClassGaussians:
        """Estimate from noisy sums of `moment_rows`.

        - sums: [classes, moment_width]. counts: images of each class. noise: standard deviation in the sums.
        - spread: variance of public rows in each coordinate, [width].
        """
        counts = counts.double().clamp_min(1)
        width = int((math.sqrt(9 + 8 * sums.shape[1]) - 3) / 2)
        averages = sums.double() / counts[:, None]
        means = averages[:, :width] / FIRST_WEIGHT
        upper = torch.triu_indices(width, width, device=sums.device)
        entries = averages[:, width:] / (math.sqrt(1 - FIRST_WEIGHT**2) * _factors(upper))
        second = entries.new_zeros(len(sums), width, width)
        second[:, upper[0], upper[1]] = second[:, upper[1], upper[0]] = entries
        found = second - means[:, :, None] * means[:, None]
        bias = (noise / counts / FIRST_WEIGHT).square()  # of the noise in a mean, squared
        found = found + bias[:, None, None] * torch.eye(width, dtype=found.dtype, device=found.device)
        shares = counts / counts.sum()
        variance = (noise / counts).square() / (2 * (1 - FIRST_WEIGHT**2))  # of the noise in an entry of `found`
        common = _filtered(
            torch.diag(spread.double())[None],
            (shares[:, None, None] * found).sum(0, keepdim=True),
            (shares.square() * variance).sum()[None],
        )
        own = _filtered(common, found, variance)
        values, vectors = torch.linalg.eigh(own)
        means = means / means.norm(dim=1, keepdim=True).clamp_min(1)  # those of rows of norm at most one
        return cls(means.float(), (vectors * values.clamp_min(0).sqrt()[:, None]).float())

    def draw(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw a row for each label, [N, width]."""
        normals = torch.randn(len(labels), self.means.shape[1], generator=generator, device=labels.device)
        rows = torch.empty_like(normals)
        for number, (mean, root) in enumerate(zip(self.means, self.roots, strict=True)):
            rows[labels == number] = mean + normals[labels == number] @ root.T
        return rows


def _filtered(expected: torch.Tensor, noisy: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return covariances between an expected and noisy ones, [classes, width, width].

    - expected: [1, width, width]. variance: of the noise in the entries off the diagonal of each class, [classes].
    """
    width = noisy.shape[1]
    spread, basis = torch.linalg.eigh(expected)
    common, found = spread.sum(), noisy.diagonal(dim1=1, dim2=2).sum(1)
    trace = torch.lerp(common, found, _signal((found - common).square(), 2 * width * variance)).clamp_min(TINY)
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
