"""Random generators for privacy noise and Poisson samples, seeded by the operating system.

Each draw uses a new generator: there is no state to save, share after a fork, or seed from outside. On the CPU it is
NumPy's Philox with a 128-bit key; PyTorch's CPU generator uses only 32 bits of its seed.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch


def host_generator() -> np.random.Generator:
    """Return a new Philox generator. Guarantee: its 128-bit key is OS entropy and serves one draw."""
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))


def device_generator(device: torch.device) -> torch.Generator:
    """Return a new Philox generator of an accelerator. Guarantee: its 63-bit seed is OS entropy and serves one draw."""
    if device.type == "cpu":
        raise ValueError("use host_generator on the CPU")
    generator = torch.Generator(device=device)
    generator.manual_seed(secrets.randbits(63))
    return generator
