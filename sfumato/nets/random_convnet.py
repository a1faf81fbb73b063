"""Random ConvNets as feature maps (Zhao and Bilen 2023, "Dataset Condensation with Distribution Matching").

A network has blocks of convolution, instance norm, ReLU and average pooling and is not trained. Instance norm makes the
scale and bias of a convolution irrelevant, and the features of an image do not depend on the rest of the batch.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from sfumato.nets.norm_relu_pool import norm_relu_pool

Shape = tuple[int, int, int]

WIDTH = 128


def depth_for(shape: Shape) -> int:
    """Return the number of blocks, so that the last maps have about 4 pixels per side: 3 for 28 and 32, 4 for 64."""
    return max(1, round(math.log2(min(shape[1:]) / 4)))


def draw_networks(count: int, shape: Shape, generator: torch.Generator, width: int = WIDTH) -> list[torch.Tensor]:
    """Draw the weights of `count` networks on the generator's device: for each block [count, out, in, 3, 3]."""
    inputs = [shape[0], *[width] * (depth_for(shape) - 1)]
    return [torch.randn(count, width, n, 3, 3, generator=generator, device=generator.device) for n in inputs]


def embed(images: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the features of images under one network, [N, features]."""
    padding = 3 if images.shape[2:] == (28, 28) else 1  # 28 pixels are padded to 32, as in the condensation papers
    one, zero = (weights[0].new_full((len(weights[0]),), value) for value in (1.0, 0.0))
    maps = images
    for weight in weights:
        maps = norm_relu_pool(functional.conv2d(maps, weight, padding=padding), one, zero)
        padding = 1
    return maps.flatten(1)
