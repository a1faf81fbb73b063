"""A vector-quantised code of an image, from a public network and a public codebook.

The network is an autoencoder's first half, or a classifier's activations (`load_perceptual`). The codebook has the
centres of what it makes of smooth random images: nobody's data. Each entry is named by a vector of standard normal
numbers, so that noise can stand where a code is missing, and nobody sees by the scale which is which.

Entries are chosen softly: a hard choice would turn the rounding of a device into another code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .autoencoder import NAMES, load_autoencoder
from .perceptual import load_perceptual

ENTRIES, WIDTH = 256, 16  # of the codebook; numbers in the name of an entry
SMOOTH_IMAGES, ROUNDS = 256, 10  # public images for the codebook, and rounds of Lloyd's algorithm
SOFTNESS = 0.1  # temperature, in units of the mean squared distance to the nearest entry


class Code(nn.Module):
    """Images [N, C, H, W] in [-1, 1] to codes [N, 16, *size]."""

    entries: torch.Tensor
    names: torch.Tensor
    spread: torch.Tensor

    def __init__(self, source: str, shape: tuple[int, int, int], size: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        self.size = size
        self._maps = _maps(source, shape, size, device)
        generator = torch.Generator().manual_seed(0)  # the same for everybody
        with torch.no_grad():
            images = _smooth(shape, generator).to(device)
            seen = torch.cat([self._vectors(part).flatten(0, 1) for part in images.split(32)])
            entries = seen[torch.randperm(len(seen), generator=generator)[:ENTRIES].to(device)]
            for _ in range(ROUNDS):
                nearest = functional.one_hot(torch.cdist(seen, entries).argmin(1), len(entries)).to(seen)
                count = nearest.sum(0)[:, None]
                entries = torch.where(count > 0, nearest.T @ seen / count.clamp_min(1), entries)
            spread = torch.cdist(seen, entries).min(1).values.square().mean().clamp_min(1e-12)
        self.register_buffer("entries", entries)
        self.register_buffer("spread", spread)
        self.register_buffer("names", torch.randn(len(entries), WIDTH, generator=generator).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        vectors = self._vectors(images)
        squares = vectors.square().sum(-1, keepdim=True) - 2 * vectors @ self.entries.T + self.entries.square().sum(-1)
        chosen: torch.Tensor = torch.softmax(-squares / (SOFTNESS * self.spread), -1) @ self.names
        codes: torch.Tensor = chosen.mT.unflatten(2, self.size)
        return codes

    def _vectors(self, images: torch.Tensor) -> torch.Tensor:
        """[N, places, channels]."""
        return functional.interpolate(self._maps(images).float(), self.size, mode="nearest").flatten(2).mT


def facts(source: str) -> dict[str, Any]:
    """What a certificate says of a code's network."""
    return load_autoencoder().facts if source in NAMES else load_perceptual(source).facts


def _maps(
    source: str, shape: tuple[int, int, int], size: tuple[int, int], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The public network's maps, of about that size."""
    if source in NAMES:
        return load_autoencoder(device).encode
    encoder = load_perceptual(source, device)
    sides = [of[1] for of in encoder.shapes(shape)]
    place = min(range(len(sides)), key=lambda place: (abs(sides[place] - size[0]), -place))
    return lambda images: encoder(images)[place]


def _smooth(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Public images: noise at several scales, the coarse ones strongest; in part flat at one end of the range."""
    total = torch.zeros(SMOOTH_IMAGES, *shape)
    for side in (2, 4, 8, 16):
        noise = torch.randn(SMOOTH_IMAGES, shape[0], side, side, generator=generator)
        total += functional.interpolate(noise, shape[1:], mode="bicubic", align_corners=False) * (2 / side) ** 0.5
    shift = torch.randn(SMOOTH_IMAGES, 1, 1, 1, generator=generator)
    return torch.tanh(2 * (total + shift))
