"""Differentiable Siamese augmentation (Zhao and Bilen, ICML 2021), and a small random affine warp.

Each image gets one of six operations with random strength: colour, shift, cutout, scale, rotation, mirror. The
parameters are drawn first and applied afterwards, so real and synthetic images can get the same augmentation. All six
operations are computed as one colour transform, one warp and one mask, which are the identity unless drawn. So a batch
can mix operations, there is no loop over operations and no synchronisation with the host, and a CUDA graph can capture
the augmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
SHIFT, CUTOUT, SCALE, ROTATION = 0.125, 0.5, 1.2, 15.0  # fraction of the side, fraction of the side, factor, degrees
WARP_ANGLE, WARP_SCALE, WARP_SHIFT = 8.0, 0.06, 0.05  # degrees, relative, fraction of the side
OPERATIONS = ("colour", "shift", "cutout", "scale", "rotate", "mirror")


@dataclass(frozen=True)
class Augmentation:
    """Augmentation parameters of n images or classes.

    - table: [n, 11]. Columns: brightness (added), saturation and contrast (factors); the 2 × 3 matrix of the warp in
      the coordinates of `torch.nn.functional.affine_grid`; row and column of the centre of the cutout square in
      pixels, far outside the image for no cutout.
    """

    table: torch.Tensor

    def __getitem__(self, index: torch.Tensor | slice) -> Augmentation:
        """Return the parameters of a subset; for parameters of classes, the index is the labels of the images."""
        return Augmentation(self.table[index])

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return augmented images [n, C, H, W] for images in [-1, 1]; pixels from outside the image are black."""
        brightness, saturation, contrast = self.table[:, :3, None, None, None].unbind(1)
        images = images + brightness
        images = torch.lerp(images.mean(1, keepdim=True), images, saturation)
        images = torch.lerp(images.mean((1, 2, 3), keepdim=True), images, contrast)
        height, width = images.shape[2:]
        grid = self._coordinates(height, width) @ self.table[:, 3:9].view(-1, 2, 3).mT
        warped = functional.grid_sample(images + 1, grid.unflatten(1, (height, width)), align_corners=False)
        return warped * self._cutout_mask(height, width) - 1

    def _coordinates(self, height: int, width: int) -> torch.Tensor:
        """Return homogeneous pixel coordinates (x, y, 1) in [-1, 1], [pixels, 3]."""
        y, x = ((2 * torch.arange(size, device=self.table.device) + 1) / size - 1 for size in (height, width))
        y, x = y[:, None].expand(height, width), x.expand(height, width)
        return torch.stack([x, y, torch.ones_like(y)], 2).flatten(0, 1)

    def _cutout_mask(self, height: int, width: int) -> torch.Tensor:
        """Return 0 inside the cutout square, whose side is half of the image's, and 1 elsewhere: [n, 1, H, W]."""
        rows, columns = (
            (torch.arange(size, device=self.table.device) - self.table[:, column, None]).abs() > CUTOUT * size / 2
            for column, size in ((9, height), (10, width))
        )
        return rows[:, None, :, None] | columns[:, None, None, :]


def draw_augmentation(
    count: int, size: tuple[int, int], generator: torch.Generator, *, flip: bool = True, same_operation: bool = False
) -> Augmentation:
    """Draw augmentation parameters.

    - count: number of images or classes.
    - size: height and width of the images.
    - generator: draws the parameters, on its device.
    - flip: include mirroring, default True; False for digits and letters.
    - same_operation: use one operation for all, default False.
    """
    device = generator.device
    kinds = len(OPERATIONS) if flip else len(OPERATIONS) - 1
    choice = torch.randint(kinds, (1 if same_operation else count,), generator=generator, device=device)
    uniform = torch.rand(count, 5, generator=generator, device=device)
    height, width = size

    def if_chosen(operation: str, values: torch.Tensor, identity: float) -> torch.Tensor:
        return torch.where(choice == OPERATIONS.index(operation), values, identity)

    scale = if_chosen("scale", SCALE ** (2 * uniform[:, 0] - 1), 1.0)
    angle = if_chosen("rotate", (2 * uniform[:, 0] - 1) * math.radians(ROTATION), 0.0)
    mirror = if_chosen("mirror", torch.sign(uniform[:, 0] - 0.5), 1.0)
    shift_y, shift_x = (
        if_chosen("shift", ((2 * uniform[:, axis] - 1) * SHIFT * side).round() * 2 / side, 0.0)
        for axis, side in enumerate(size)
    )
    cos, sin = scale * angle.cos(), scale * angle.sin()
    columns = [
        if_chosen("colour", BRIGHTNESS * (uniform[:, 0] - 0.5), 0.0),
        if_chosen("colour", SATURATION * uniform[:, 1], 1.0),
        if_chosen("colour", uniform[:, 2] + CONTRAST, 1.0),
        *(cos * mirror, -sin * (height / width), shift_x),
        *(sin * mirror * (width / height), cos, shift_y),
        *(if_chosen("cutout", (uniform[:, 3 + axis] * side).floor(), -9.0 * side) for axis, side in enumerate(size)),
    ]
    return Augmentation(torch.stack(columns, 1))


def small_affine_warp(images: torch.Tensor, generator: torch.Generator, strength: float = 1.0) -> torch.Tensor:
    """Rotate, scale and shift each image [N, C, H, W] at random; border pixels are repeated outside.

    - generator: draws the parameters.
    - strength: factor of the maxima, which are 8 degrees, 6 % and 5 % of the side; default 1.
    """
    height, width = images.shape[2:]
    uniform = strength * (2 * torch.rand(5, len(images), generator=generator, device=generator.device) - 1)
    angle, (shift_x, shift_y) = math.radians(WARP_ANGLE) * uniform[0], 2 * WARP_SHIFT * uniform[3:]
    scale_x, scale_y = 1 + WARP_SCALE * uniform[1:3]
    rows = [
        torch.stack([scale_x * angle.cos(), -scale_y * angle.sin() * (height / width), shift_x], 1),
        torch.stack([scale_x * angle.sin() * (width / height), scale_y * angle.cos(), shift_y], 1),
    ]
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
