"""Generators for privacy noise and Poisson samples, seeded by the operating system.

A generator is made for each draw and dropped afterwards. So there is no state to save, to resume, to share
after a fork, or to seed from outside: the user's `seed` has no way in. (PyTorch's CPU generator keeps only
32 bits of its seed, few enough to try them all; NumPy's Philox takes a 128-bit key.)
"""

from __future__ import annotations

import secrets

import numpy as np
import torch


def host_generator() -> np.random.Generator:
    """A counter-based generator under a fresh 128-bit key.

    Guarantee: the key comes from the operating system's entropy and is used for one draw.
    """
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))


def device_generator(device: torch.device) -> torch.Generator:
    """The same on an accelerator: PyTorch's Philox under a fresh 64-bit key.

    Guarantee: as above; never called for the CPU, whose generator would keep 32 bits only.
    """
    if device.type == "cpu":
        raise ValueError("use host_generator on the CPU")
    generator = torch.Generator(device=device)
    generator.manual_seed(secrets.randbits(63))
    return generator
