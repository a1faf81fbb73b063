"""Random pictures that nobody took: smooth shapes and lines with shades, for networks to begin with.

They come from a random process and hold no data, so that a network taught on them is as public as its initial weights.
"""

from __future__ import annotations

import math

import torch

Shape = tuple[int, int, int]


def random_pictures(count: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """[count, C, H, W] in [-1, 1]: a random field's level set, or a line along it, shaded, on a plain ground.

    Half are shapes and half lines; half stand in a window in the middle, half of the grounds are black. Shades vary
    within the picture; in colour, each channel has its own.
    """
    device = generator.device

    def uniform(low: float, high: float, channels: int = 1) -> torch.Tensor:
        spread = torch.rand(count, channels, 1, 1, generator=generator, device=device)
        return low + (high - low) * spread

    channels, height, width = shape
    length = uniform(math.log(0.06), math.log(0.25)).exp()
    form = _field(count, 1, height, width, length, generator)
    level, edge = uniform(-0.3, 1.2), uniform(0.05, 0.5)
    shapes = torch.sigmoid((form - level) / edge)
    lines = torch.sigmoid((0.35 - (form - level / 2).abs()) / (0.15 * edge + 0.03))
    mask = torch.where(uniform(0, 1) < 0.5, shapes, lines)
    rows = torch.linspace(-1, 1, height, device=device)[:, None].abs()
    columns = torch.linspace(-1, 1, width, device=device).abs()
    window = torch.sigmoid((uniform(0.5, 1.0) - torch.maximum(rows, columns)) / 0.08)
    mask = mask * torch.where(uniform(0, 1) < 0.5, window, 1.0)
    shade = _field(count, channels, height, width, uniform(0.1, 0.4), generator) * uniform(0.0, 0.2)
    inside = uniform(0.3, 1.2, channels) + shade
    ground = torch.where(uniform(0, 1) < 0.5, 0.0, uniform(-0.2, 1.0, channels))
    return torch.lerp(ground.expand_as(inside), inside, mask).clamp(0, 1) * 2 - 1


def _field(
    count: int, channels: int, height: int, width: int, length: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gaussian random fields of unit variance whose values hang together over `length`, in image sides."""
    device = generator.device
    white = torch.randn(count, channels, height, width, generator=generator, device=device)
    down, across = torch.fft.fftfreq(height, device=device)[:, None], torch.fft.rfftfreq(width, device=device)
    reach = 2 * (math.pi * length * max(height, width)).square()
    smooth = torch.fft.irfft2(torch.fft.rfft2(white) * torch.exp(-reach * (down**2 + across**2)), s=(height, width))
    fields: torch.Tensor = smooth / smooth.std((2, 3), keepdim=True).clamp_min(1e-6)
    return fields
