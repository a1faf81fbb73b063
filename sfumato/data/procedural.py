"""Draw procedural images, smooth random shapes and lines, to pre-train networks.

They come from a random process and contain no data, so a network trained on them is as public as its initial weights.
"""

from __future__ import annotations

import math

import torch

Shape = tuple[int, int, int]


def random_pictures(count: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Draw images [count, C, H, W] in [-1, 1]: level sets of a random field, or their outlines, on a plain background.

    Half are filled shapes, half are lines. Half are masked by a central window. Half of the backgrounds are black.
    Brightness varies smoothly within an image, independently for each colour channel.
    """
    device = generator.device

    def uniform(low: float, high: float, channels: int = 1) -> torch.Tensor:
        fraction = torch.rand(count, channels, 1, 1, generator=generator, device=device)
        return low + (high - low) * fraction

    channels, height, width = shape
    length = uniform(math.log(0.06), math.log(0.25)).exp()
    field = _field(count, 1, height, width, length, generator)
    level, edge = uniform(-0.3, 1.2), uniform(0.05, 0.5)
    shapes = torch.sigmoid((field - level) / edge)
    lines = torch.sigmoid((0.35 - (field - level / 2).abs()) / (0.15 * edge + 0.03))
    mask = torch.where(uniform(0, 1) < 0.5, shapes, lines)
    rows = torch.linspace(-1, 1, height, device=device)[:, None].abs()
    columns = torch.linspace(-1, 1, width, device=device).abs()
    window = torch.sigmoid((uniform(0.5, 1.0) - torch.maximum(rows, columns)) / 0.08)
    mask = mask * torch.where(uniform(0, 1) < 0.5, window, 1.0)
    shade = _field(count, channels, height, width, uniform(0.1, 0.4), generator) * uniform(0.0, 0.2)
    foreground = uniform(0.3, 1.2, channels) + shade
    background = torch.where(uniform(0, 1) < 0.5, 0.0, uniform(-0.2, 1.0, channels))
    return torch.lerp(background.expand_as(foreground), foreground, mask).clamp(0, 1) * 2 - 1


def _field(
    count: int, channels: int, height: int, width: int, length: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw random fields of unit variance: white noise smoothed by a Gaussian kernel.

    - length: standard deviation of the kernel, in units of the longer image side.
    """
    device = generator.device
    white = torch.randn(count, channels, height, width, generator=generator, device=device)
    down, across = torch.fft.fftfreq(height, device=device)[:, None], torch.fft.rfftfreq(width, device=device)
    reach = 2 * (math.pi * length * max(height, width)).square()
    smooth = torch.fft.irfft2(torch.fft.rfft2(white) * torch.exp(-reach * (down**2 + across**2)), s=(height, width))
    fields: torch.Tensor = smooth / smooth.std((2, 3), keepdim=True).clamp_min(1e-6)
    return fields
