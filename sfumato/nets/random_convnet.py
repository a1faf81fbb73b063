"""Random networks as feature maps: three blocks of convolution, instance norm, ReLU, average pooling, never trained.

Instance norm makes scale and bias of a convolution irrelevant and keeps images apart: a row depends on its image only.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from sfumato.nets.fused import norm_relu_pool

Shape = tuple[int, int, int]

WIDTH = 128


def depth_for(shape: Shape) -> int:
    """Blocks until maps are some four pixels across: three for 28 and 32 pixels, four for 64."""
    return max(1, round(math.log2(min(shape[1:]) / 4)))


def draw_networks(count: int, shape: Shape, generator: torch.Generator, width: int = WIDTH) -> list[torch.Tensor]:
    """Weights of `count` networks: for each block [count, out, in, 3, 3], drawn where the generator is."""
    entering = [shape[0], *[width] * (depth_for(shape) - 1)]
    return [torch.randn(count, width, n, 3, 3, generator=generator, device=generator.device) for n in entering]


def embed(images: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Features of images by one network, [N, features]."""
    # Images of 28 pixels are padded to 32 at the entry, as the condensation papers do.
    padding = 3 if images.shape[2:] == (28, 28) else 1
    one, zero = (weights[0].new_full((len(weights[0]),), value) for value in (1.0, 0.0))
    maps = images
    for weight in weights:
        maps = norm_relu_pool(functional.conv2d(maps, weight, padding=padding), one, zero)
        padding = 1
    return maps.flatten(1)
