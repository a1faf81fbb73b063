"""The Gaussian mechanism, continuous and discrete. The only file that draws privacy noise.

Formal guarantees: let one added or removed unit change a sum by at most s in L2 norm. Then `sum + N(0, (z s)^2 I)` is
the Gaussian mechanism with noise multiplier z, which is the event that the ledger charges.

The discrete form adds to each coordinate of an integer sum K ~ exp(-k^2 / 2 sigma^2) with sigma^2 = t^2 + 9, t = z R,
where R bounds the change of the sum. It is as private as continuous noise of standard deviation t (proof 3) and avoids
floating-point attacks (Mironov 2012): sums are integers, and OpenDP's sampler is exact and uses OS entropy.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from sfumato.privacy.randomness import device_generator, host_generator

SMOOTHING = 3.0  # the 3 of proof 3: sigma^2 = t^2 + SMOOTHING^2
CHUNK = 20_000  # coordinates per call of the exact sampler


def add_gaussian(total: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `total` plus independent Gaussian noise of standard deviation `scale` (the "fast" form).

    Guarantee: the Gaussian mechanism up to floating-point effects, which `add_discrete_gaussian` avoids. A scale of 0
    adds no noise; the accountants charge it as epsilon = inf.
    """
    _check_scale(scale)
    if scale == 0:
        return total.clone()
    if total.device.type == "cpu":
        noise = torch.from_numpy(host_generator().standard_normal(tuple(total.shape)))
    else:
        source = device_generator(total.device)
        noise = torch.randn(total.shape, dtype=torch.float64, device=total.device, generator=source)
    return (total.double() + scale * noise).to(total.dtype)


def add_discrete_gaussian(total: torch.Tensor, scale: float) -> torch.Tensor:
    """Return int64 `total` plus discrete noise ("secure"). Guarantee: as private as N(0, scale^2), exact (proof 3)."""
    if total.dtype != torch.int64:
        raise TypeError("the discrete mechanism needs an int64 tensor")
    _check_scale(scale)
    if scale == 0:
        return total.clone()
    sigma = math.sqrt(scale**2 + SMOOTHING**2)
    sizes = [min(CHUNK, total.numel() - start) for start in range(0, total.numel(), CHUNK)]
    with ThreadPoolExecutor() as pool:
        noise = [value for chunk in pool.map(lambda size: _exact_samples(sigma, size), sizes) for value in chunk]
    return total + torch.tensor(noise, dtype=torch.int64).reshape(total.shape).to(total.device)


def _exact_samples(sigma: float, size: int) -> list[int]:
    """Return `size` independent discrete Gaussian samples. Guarantee: exact, by OpenDP's proof of its sampler."""
    import opendp.prelude as opendp

    opendp.enable_features("contrib")
    measure = opendp.m.make_gaussian(
        opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T=float), scale=sigma
    )
    return list(measure([0] * size))


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"noise scale must be finite and not negative, got {scale}")
