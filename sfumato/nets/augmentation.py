"""Differentiable siamese augmentation (Zhao and Bilen, ICML 2021): one random operation for a whole batch.

Every operation is differentiable in the images, batched, and runs where they are. With `shared=True` all images get
the same parameters, so that real and synthetic ones can be treated alike by passing the same generator state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

Operation = Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]

BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
SHIFT, CUTOUT, SCALE, ROTATION = 0.125, 0.5, 1.2, 15.0


def augment(
    images: torch.Tensor, generator: torch.Generator, *, flip: bool = True, shared: bool = False
) -> torch.Tensor:
    """One operation, drawn at random, on images [N, C, H, W] in [-1, 1]. Digits should not be flipped."""
    operations = [colour, crop, cutout, scale, rotate, *([mirror] if flip else [])]
    device = generator.device
    choice = int(torch.randint(len(operations), (), generator=generator, device=device))

    def uniform() -> torch.Tensor:
        """A number in [0, 1) for each image, or one for all."""
        drawn = torch.rand(1 if shared else len(images), generator=generator, device=device)
        return drawn.to(images.device).expand(len(images))

    return operations[choice](images, uniform)


def colour(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Brightness, saturation, contrast."""
    shape = (-1, 1, 1, 1)
    images = images + BRIGHTNESS * (uniform() - 0.5).view(shape)
    grey = images.mean(1, keepdim=True)
    images = grey + (images - grey) * (SATURATION * uniform()).view(shape)
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * (uniform() + CONTRAST).view(shape)


def crop(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A shift by up to an eighth in each direction; what enters is black."""
    rows, columns = (((2 * uniform() - 1) * SHIFT * size).round() / size * 2 for size in images.shape[2:])
    return _warp(images, torch.ones_like(rows), torch.zeros_like(rows), columns, rows, mode="nearest")


def cutout(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A square of half the side, anywhere, blackened."""
    keep = torch.ones_like(images[:, :1])
    places = []
    for size in images.shape[2:]:
        centre = (uniform() * size).floor()[:, None]
        places.append((torch.arange(size, device=images.device) - centre).abs() <= CUTOUT * size / 2)
    keep = keep * ~(places[0][:, None, :, None] & places[1][:, None, None, :])
    return (images + 1) * keep - 1


def mirror(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Left and right exchanged, for half of the images."""
    return torch.where((uniform() < 0.5).view(-1, 1, 1, 1), images.flip(3), images)


def scale(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Larger or smaller by up to a fifth, about the centre."""
    factor = SCALE ** (2 * uniform() - 1)
    zero = torch.zeros_like(factor)
    return _warp(images, factor, zero, zero, zero)


def rotate(images: torch.Tensor, uniform: Callable[[], torch.Tensor]) -> torch.Tensor:
    """By up to fifteen degrees either way."""
    angle = (2 * uniform() - 1) * math.radians(ROTATION)
    zero = torch.zeros_like(angle)
    return _warp(images, torch.ones_like(angle), angle, zero, zero)


def _warp(
    images: torch.Tensor,
    factor: torch.Tensor,
    angle: torch.Tensor,
    right: torch.Tensor,
    down: torch.Tensor,
    mode: str = "bilinear",
) -> torch.Tensor:
    """Scaled, rotated and shifted; outside is black (-1)."""
    cos, sin = factor * angle.cos(), factor * angle.sin()
    matrix = torch.stack([torch.stack([cos, -sin, right], 1), torch.stack([sin, cos, down], 1)], 1).to(images.dtype)
    grid = functional.affine_grid(matrix, list(images.shape), align_corners=False)
    return functional.grid_sample(images + 1, grid, mode=mode, align_corners=False) - 1
