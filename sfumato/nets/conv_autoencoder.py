"""Convolutional encoder and decoder for images of any size, without batch norm."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

Shape = tuple[int, int, int]

MAX_INNER_SIDE = 7  # pixels per side of the smallest map, at most: 2 halvings for 28 pixels, 3 for 32, 6 for 256


def halvings(shape: Shape) -> int:
    """Return the number of convolutions of stride 2."""
    return max(1, math.ceil(math.log2(max(shape[1:]) / MAX_INNER_SIDE)))


class ConvEncoder(nn.Module):
    """Map images in [-1, 1] to codes: convolutions of stride 2 that double the channels, then a linear layer.

    - shape: channels, height and width of the images.
    - code: dimension of the codes.
    - width: channels after the first convolution.
    """

    def __init__(self, shape: Shape, *, code: int, width: int) -> None:
        super().__init__()
        channels, inner_size = _sizes(shape, width)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(channels):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.SiLU()]
        self.trunk = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * math.prod(inner_size), code))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        codes: torch.Tensor = self.trunk(images)
        return codes


class ConvDecoder(nn.Module):
    """Map codes to pixel logits: the mirror image of `ConvEncoder`.

    - shape: channels, height and width of the images.
    - code: dimension of the codes.
    - width: channels before the last convolution.
    - context: dimension of a context vector, for example a one-hot label; 0 (default): none.
    """

    def __init__(self, shape: Shape, *, code: int, width: int, context: int = 0) -> None:
        super().__init__()
        channels, inner_size = _sizes(shape, width)
        _, self.height, self.width = shape
        layers: list[nn.Module] = [
            nn.Linear(code + context, channels[-1] * math.prod(inner_size)),
            nn.SiLU(),
            nn.Unflatten(1, (channels[-1], *inner_size)),
        ]
        for inputs, outputs in pairwise(reversed(channels)):
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.SiLU()]
        self.trunk = nn.Sequential(*layers[:-1])

    def forward(self, codes: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.trunk(codes if context is None else torch.cat([codes, context], 1))
        return logits[:, :, : self.height, : self.width]


def _sizes(shape: Shape, width: int) -> tuple[list[int], tuple[int, int]]:
    """Return the channels from the image to the smallest map, and the size of that map."""
    times = halvings(shape)
    channels = [shape[0], *(width * 2**level for level in range(times))]
    return channels, (math.ceil(shape[1] / 2**times), math.ceil(shape[2] / 2**times))
