"""Convolutional autoencoders for images of any size, without anything that mixes a batch."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

Shape = tuple[int, int, int]

ACROSS = 7  # the smallest map is at most this many pixels across: two halvings for 28 pixels, three for 32, six for 256


def halvings(shape: Shape) -> int:
    """How often a map is halved on its way to the code."""
    return max(1, math.ceil(math.log2(max(shape[1:]) / ACROSS)))


class Encoder(nn.Module):
    """Images in [-1, 1] to codes: convolutions that halve the map and double the channels, then a linear layer."""

    def __init__(self, shape: Shape, *, code: int, width: int) -> None:
        super().__init__()
        channels, maps = _sizes(shape, width)
        layers: list[nn.Module] = []
        for wide, wider in pairwise(channels):
            layers += [nn.Conv2d(wide, wider, 3, 2, 1), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * math.prod(maps), code))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        codes: torch.Tensor = self.trunk(images)
        return codes


class Decoder(nn.Module):
    """Codes, with a context of `context` numbers or none behind them, to logits of pixels: the encoder's mirror."""

    def __init__(self, shape: Shape, *, code: int, width: int, context: int = 0) -> None:
        super().__init__()
        channels, maps = _sizes(shape, width)
        _, self.height, self.width = shape
        layers: list[nn.Module] = [
            nn.Linear(code + context, channels[-1] * math.prod(maps)),
            nn.SiLU(),
            nn.Unflatten(1, (channels[-1], *maps)),
        ]
        for wide, narrow in pairwise(reversed(channels)):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1), nn.SiLU()]
        self.trunk = nn.Sequential(*layers[:-1])

    def forward(self, codes: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.trunk(codes if context is None else torch.cat([codes, context], 1))
        return logits[:, :, : self.height, : self.width]


def _sizes(shape: Shape, width: int) -> tuple[list[int], tuple[int, int]]:
    """Channels from the image to the smallest map, and that map's size."""
    times = halvings(shape)
    channels = [shape[0], *(width * 2**level for level in range(times))]
    return channels, (math.ceil(shape[1] / 2**times), math.ceil(shape[2] / 2**times))
