"""Two-sample test of equal means for d > n (Bai and Saranadasa, Statistica Sinica 1996).

Hotelling's T² needs the inverse of the pooled covariance S, which does not exist for d > n. This test does not use it.
It compares the squared distance of the means with its expectation. With n = n1 + n2 - 2 and tau = n1 n2 / (n1 + n2):

    Z = (tau |x - y|² - tr S) / sqrt(2 (n + 1) / n · B²),    B² = n² / ((n + 2) (n - 1)) · (tr S² - (tr S)² / n)

For equal means, tau |x - y|² has expectation tr Σ and variance 2 tr Σ², tr S adds a variance of 2 tr Σ² / n, and B² is
an unbiased estimate of tr Σ². So Z converges to N(0, 1). A difference of the means makes Z large, so the test is
one-sided.

A Z far below 0 does not indicate a difference of the means. It indicates that the means are closer than those of
independent samples, which violates the assumptions of the test. Rows then depend on each other, across the samples
(drawn from the same noise) or within one sample (images fitted jointly to a mean, as in condensation).
"""

from __future__ import annotations

import math

import torch
from scipy.stats import norm


def bai_saranadasa(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return Z and its one-sided p-value for samples [n1, …] and [n2, …] with rows of the same shape."""
    if one.shape[1:] != other.shape[1:] or min(len(one), len(other)) < 2:
        raise ValueError(
            "the samples need rows of the same shape and at least two rows each, "
            f"got {tuple(one.shape)} and {tuple(other.shape)}"
        )
    samples = [sample.flatten(1).double() for sample in (one, other)]
    means = [sample.mean(0) for sample in samples]
    centred = torch.cat([sample - mean for sample, mean in zip(samples, means, strict=True)])
    gram = centred @ centred.T  # has the same traces as n S = centred^T centred, which is d x d
    n = len(centred) - 2
    trace, trace_square = float(gram.trace()) / n, float(gram.square().sum()) / n**2
    spread = trace_square - trace**2 / n
    if not spread > 1e-12 * trace_square:
        raise ValueError("the samples are constant, or their covariance has no spread, so Z is not defined")
    tau = len(one) * len(other) / (len(one) + len(other))
    distance = tau * float((means[0] - means[1]).square().sum())
    b_square = n**2 / ((n + 2) * (n - 1)) * spread
    z = (distance - trace) / math.sqrt(2 * (n + 1) / n * b_square)
    return z, float(norm.sf(z))
