"""Differentiable siamese augmentation (Zhao and Bilen, ICML 2021).

One operation of six, drawn at random, with random strength: colour, shift, cutout, mirror, scale, rotation. It is drawn
first and applied afterwards, so that real and synthetic images can be treated alike. All six run as one: a change of
colour, a warp and a mask, each at rest unless it was drawn. So a batch may mix operations, no operation is a loop, and
nothing is asked of the host: it can be captured in a graph.

`moved` is another thing: each image a little turned, scaled and shifted, all at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
SHIFT, CUTOUT, SCALE, ROTATION = 0.125, 0.5, 1.2, 15.0
MOVED_ANGLE, MOVED_SCALE, MOVED_SHIFT = 8.0, 0.06, 0.05  # degrees, a part, sides
OPERATIONS = ("colour", "shift", "cutout", "scale", "rotate", "mirror")


@dataclass(frozen=True)
class Augmentation:
    """Strengths for [n] images or classes, a row of `table` for each.

    Columns: brightness (added), saturation and contrast (factors); the warp, 2 × 3, in the coordinates of PyTorch's
    `affine_grid`; the middle of the blackened square, down and right in pixels, far outside for none.
    """

    table: torch.Tensor

    def __getitem__(self, index: torch.Tensor | slice) -> Augmentation:
        """Those of some images; of classes, with the images' labels for an index."""
        return Augmentation(self.table[index])

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """`images` [n, C, H, W] in [-1, 1], changed; what enters from outside is black."""
        brightness, saturation, contrast = self.table[:, :3, None, None, None].unbind(1)
        images = images + brightness
        images = torch.lerp(images.mean(1, keepdim=True), images, saturation)
        images = torch.lerp(images.mean((1, 2, 3), keepdim=True), images, contrast)
        height, width = images.shape[2:]
        grid = self._places(height, width) @ self.table[:, 3:9].view(-1, 2, 3).mT
        warped = functional.grid_sample(images + 1, grid.unflatten(1, (height, width)), align_corners=False)
        return warped * self._kept(height, width) - 1

    def _places(self, height: int, width: int) -> torch.Tensor:
        """Where pixels are, as (right, down, 1) in [-1, 1]: [pixels, 3]."""
        down, right = ((2 * torch.arange(size, device=self.table.device) + 1) / size - 1 for size in (height, width))
        down, right = down[:, None].expand(height, width), right.expand(height, width)
        return torch.stack([right, down, torch.ones_like(down)], 2).flatten(0, 1)

    def _kept(self, height: int, width: int) -> torch.Tensor:
        """0 inside the square, of half the side, that is cut out; 1 elsewhere: [n, 1, H, W]."""
        down, right = (
            (torch.arange(size, device=self.table.device) - self.table[:, column, None]).abs() > CUTOUT * size / 2
            for column, size in ((9, height), (10, width))
        )
        return down[:, None, :, None] | right[:, None, None, :]


def draw_augmentation(
    count: int, size: tuple[int, int], generator: torch.Generator, *, flip: bool = True, together: bool = False
) -> Augmentation:
    """Random strengths for `count` images or classes of this height and width; `together`: all the same operation.

    Digits and letters should not be flipped.
    """
    device = generator.device
    kinds = len(OPERATIONS) if flip else len(OPERATIONS) - 1
    choice = torch.randint(kinds, (1 if together else count,), generator=generator, device=device)
    chance = torch.rand(count, 5, generator=generator, device=device)
    height, width = size

    def strength(name: str, values: torch.Tensor, rest: float) -> torch.Tensor:
        return torch.where(choice == OPERATIONS.index(name), values, rest)

    factor = strength("scale", SCALE ** (2 * chance[:, 0] - 1), 1.0)
    angle = strength("rotate", (2 * chance[:, 0] - 1) * math.radians(ROTATION), 0.0)
    mirrored = strength("mirror", torch.sign(chance[:, 0] - 0.5), 1.0)
    down, right = (
        strength("shift", ((2 * chance[:, axis] - 1) * SHIFT * side).round() * 2 / side, 0.0)
        for axis, side in enumerate(size)
    )
    cos, sin = factor * angle.cos(), factor * angle.sin()
    columns = [
        strength("colour", BRIGHTNESS * (chance[:, 0] - 0.5), 0.0),
        strength("colour", SATURATION * chance[:, 1], 1.0),
        strength("colour", chance[:, 2] + CONTRAST, 1.0),
        *(cos * mirrored, -sin * (height / width), right),
        *(sin * mirrored * (width / height), cos, down),
        *(strength("cutout", (chance[:, 3 + axis] * side).floor(), -9.0 * side) for axis, side in enumerate(size)),
    ]
    return Augmentation(torch.stack(columns, 1))


def moved(images: torch.Tensor, generator: torch.Generator, strength: float = 1.0) -> torch.Tensor:
    """Each image [N, C, H, W] turned by up to 8 degrees, scaled by 6 % and shifted by 5 % of its sides, times strength.

    Pixels of the border go on outside.
    """
    height, width = images.shape[2:]
    chance = strength * (2 * torch.rand(5, len(images), generator=generator, device=generator.device) - 1)
    angle, (right, down) = math.radians(MOVED_ANGLE) * chance[0], 2 * MOVED_SHIFT * chance[3:]
    across, along = 1 + MOVED_SCALE * chance[1:3]
    rows = [
        torch.stack([across * angle.cos(), -along * angle.sin() * (height / width), right], 1),
        torch.stack([across * angle.sin() * (width / height), along * angle.cos(), down], 1),
    ]
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
