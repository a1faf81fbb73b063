"""Have two samples the same mean? The test of Bai and Saranadasa (Statistica Sinica 1996), for d > n.

Hotelling's T² needs the inverse of the pooled covariance S, which does not exist for d > n. This test leaves it out and
compares the squared distance of the means with what S lets expect. With n = n1 + n2 - 2 and tau = n1 n2 / (n1 + n2):

    Z = (tau |x - y|² - tr S) / sqrt(2 (n + 1) / n · B²),    B² = n² / ((n + 2) (n - 1)) · (tr S² - (tr S)² / n)

For equal means tau |x - y|² has expectation tr Σ and variance 2 tr Σ², tr S adds a variance of 2 tr Σ² / n, and B² is
unbiased for tr Σ²; so Z tends to N(0, 1). A difference of means makes Z large, never small: the test is one-sided.

A Z far below 0 is no difference of means. It says that the means are nearer to each other than those of independent
samples can be, so that the samples are not what the test supposes: rows depend on each other, across the samples (drawn
from the same noise) or within one (images that were fitted jointly to a mean, as condensation does).
"""

from __future__ import annotations

import math

import torch
from scipy.stats import norm


def bai_saranadasa(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """(Z, p) for samples [n1, …] and [n2, …] of the same shape; p is the chance of such a Z or a larger one."""
    if one.shape[1:] != other.shape[1:] or min(len(one), len(other)) < 2:
        raise ValueError(
            f"two samples of one shape are needed, of two rows or more, got {tuple(one.shape)} and {tuple(other.shape)}"
        )
    samples = [sample.flatten(1).double() for sample in (one, other)]
    means = [sample.mean(0) for sample in samples]
    centred = torch.cat([sample - mean for sample, mean in zip(samples, means, strict=True)])
    gram = centred @ centred.T  # n S = centred^T centred has its traces, and is d x d
    n = len(centred) - 2
    trace, trace_square = float(gram.trace()) / n, float(gram.square().sum()) / n**2
    spread = trace_square - trace**2 / n
    if not spread > 1e-12 * trace_square:
        raise ValueError("these samples do not vary, or by the same amount in all directions: Z is not defined")
    tau = len(one) * len(other) / (len(one) + len(other))
    distance = tau * float((means[0] - means[1]).square().sum())
    b_square = n**2 / ((n + 2) * (n - 1)) * spread
    z = (distance - trace) / math.sqrt(2 * (n + 1) / n * b_square)
    return z, float(norm.sf(z))
