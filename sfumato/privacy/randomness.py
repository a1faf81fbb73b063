"""Generators for privacy noise and Poisson samples, seeded by the operating system.

One is made for each draw and dropped: there is no state to save, to resume, to share after a fork, or to seed from
outside. (PyTorch's CPU generator keeps 32 bits of its seed, few enough to try them all; NumPy's Philox takes 128.)
"""

from __future__ import annotations

import secrets

import numpy as np
import torch


def host_generator() -> np.random.Generator:
    """Return a counter-based generator. Guarantee: its 128-bit key is OS entropy, and used for one draw."""
    return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))


def device_generator(device: torch.device) -> torch.Generator:
    """Return PyTorch's Philox on an accelerator. Guarantee: as above, with 63 bits; never on the CPU."""
    if device.type == "cpu":
        raise ValueError("use host_generator on the CPU")
    generator = torch.Generator(device=device)
    generator.manual_seed(secrets.randbits(63))
    return generator
