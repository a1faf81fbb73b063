"""Contrastive learning: an encoder is taught without labels that two views of one image are one thing.

Alignment and uniformity (Wang and Isola, ICML 2020), as DP-RandP (Tang et al., NeurIPS 2023) uses them on procedural
images: embeddings of two views are close, embeddings of different images are spread over the sphere. A view is a random
part of the image, enlarged, mirrored and recoloured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

EMBEDDING = 128  # outputs of the projection, which is not part of the encoder
SPREAD = 2.0  # of the Gaussian kernel of uniformity, the paper's t
MIN_AREA, MAX_ASPECT_RATIO = 0.15, 4 / 3  # of the part, relative to the image; width to height
COLOUR_CHANGE = 0.4  # relative, of brightness, contrast, saturation and of each channel
COLOUR_CHANGE_PROB, GREY_PROB = 0.8, 0.2


def alignment_and_uniformity(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return E|f(x) - f(x')|² + log E exp(-t |f(x) - f(y)|²) of embeddings [B, d], which are made unit vectors."""
    first, second = functional.normalize(first.float()), functional.normalize(second.float())
    alignment = (first - second).square().sum(1).mean()
    return alignment + (_uniformity(first) + _uniformity(second)) / 2


def _uniformity(rows: torch.Tensor) -> torch.Tensor:
    squares = 2 - 2 * rows @ rows.T  # distances of unit vectors
    others = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    kept = (-SPREAD * squares).masked_fill(~others, -torch.inf)
    return kept.logsumexp((0, 1)) - torch.log(others.sum().float())


class ViewBatches:
    """Pairs of views of all images in random order, each [B, 3, H, W] in [0, 1]; an incomplete last batch is dropped.

    - images: uint8 [N, 3, H, W], on the device.
    """

    def __init__(self, images: torch.Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.batch_size, self.steps = batch_size, len(images) // batch_size
        self._images, self._generator = images, generator

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        count = len(self._images)
        order = torch.randperm(count, generator=self._generator, device=self._images.device)
        for index in order[: self.steps * self.batch_size].split(self.batch_size):
            pixels = self._images[index].float() / 255
            yield view(pixels, self._generator), view(pixels, self._generator)


def view(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random view of each image [B, 3, H, W] in [0, 1]."""
    count, device = len(pixels), pixels.device

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *(shape or (1,)), generator=generator, device=device)

    area, ratio = uniform(MIN_AREA, 1), MAX_ASPECT_RATIO ** uniform(-1, 1)
    width, height = ((area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1))
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(area)
    across = torch.stack([mirror * width, zero, uniform(-1, 1) * (1 - width)], 2)
    down = torch.stack([zero, height, uniform(-1, 1) * (1 - height)], 2)
    places = functional.affine_grid(torch.cat([across, down], 1), list(pixels.shape), align_corners=False)
    part = functional.grid_sample(pixels, places, padding_mode="reflection", align_corners=False)

    def factor(*shape: int) -> torch.Tensor:
        changed = uniform(0, 1, *(1 for _ in shape)) < COLOUR_CHANGE_PROB
        return torch.where(changed, uniform(1 - COLOUR_CHANGE, 1 + COLOUR_CHANGE, *shape), torch.ones(()).to(device))

    coloured = part * factor(1, 1, 1) * factor(3, 1, 1)
    coloured = torch.lerp(coloured.mean((1, 2, 3), keepdim=True), coloured, factor(1, 1, 1))
    grey = coloured.mean(1, keepdim=True)
    saturation = torch.where(uniform(0, 1, 1, 1, 1) < GREY_PROB, torch.zeros(()).to(device), factor(1, 1, 1))
    return torch.lerp(grey, coloured, saturation).clamp(0, 1)
