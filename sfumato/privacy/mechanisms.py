"""The Gaussian mechanism, continuous and discrete. The only file that draws privacy noise.

Guarantee: for a sum whose L2 norm changes by at most s when one record is added or removed,
`sum + N(0, (z s)^2 I)` is the Gaussian mechanism with noise multiplier z, which is the event charged in the
ledger.

On integer vectors the noise is K ~ exp(-k^2 / 2 sigma^2) on each coordinate, sigma^2 = t^2 + 9, t = z R, where R bounds
a record's integer norm: at least as private as the continuous mechanism of standard deviation t (proof 3 of
docs/proofs.md). It leaves no floating-point trace of the sum (Mironov 2012): numbers are exact integers and the sampler
is OpenDP's, exact and from OS entropy.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from sfumato.privacy.randomness import device_generator, host_generator

SMOOTHING = 3.0  # the s of proof 3
CHUNK = 20_000  # coordinates for one call of the exact sampler


def add_gaussian(total: torch.Tensor, scale: float) -> torch.Tensor:
    """`total` plus independent Gaussian noise of standard deviation `scale` ("fast": floating point).

    Guarantee: the Gaussian mechanism, up to floating-point effects; those are what `add_discrete_gaussian`
    is for. A scale of zero draws nothing and is charged as no guarantee at all.
    """
    _check(scale)
    if scale == 0:
        return total.clone()
    if total.device.type == "cpu":
        noise = torch.from_numpy(host_generator().standard_normal(tuple(total.shape)))
    else:
        source = device_generator(total.device)
        noise = torch.randn(total.shape, dtype=torch.float64, device=total.device, generator=source)
    return (total.double() + scale * noise).to(total.dtype)


def add_discrete_gaussian(total: torch.Tensor, scale: float) -> torch.Tensor:
    """Integer `total` plus exact discrete Gaussian noise. Guarantee: as continuous noise of that scale (proof 3)."""
    if total.dtype != torch.int64:
        raise TypeError("the discrete mechanism needs an int64 tensor")
    _check(scale)
    if scale == 0:
        return total.clone()
    sigma = math.sqrt(scale**2 + SMOOTHING**2)
    sizes = [min(CHUNK, total.numel() - start) for start in range(0, total.numel(), CHUNK)]
    with ThreadPoolExecutor() as pool:
        noise = [value for chunk in pool.map(lambda size: _exact_samples(sigma, size), sizes) for value in chunk]
    return total + torch.tensor(noise, dtype=torch.int64).reshape(total.shape).to(total.device)


def _exact_samples(sigma: float, size: int) -> list[int]:
    """`size` exact samples of the discrete Gaussian. Guarantee: OpenDP's proof of its sampler."""
    import opendp.prelude as opendp

    opendp.enable_features("contrib")
    measure = opendp.m.make_gaussian(
        opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T=float), scale=sigma
    )
    return list(measure([0] * size))


def _check(scale: float) -> None:
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"noise scale must be finite and not negative, got {scale}")
