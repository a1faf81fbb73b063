"""A small U-Net for images with noise on them, told the noise level and the class.

Group norms, no batch norm and no dropout: everything is row-wise, so that it can be trained on one image's gradient at
a time.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn import functional

GROUPS = 8


class UNet(nn.Module):
    """Images [N, C, H, W], levels [N] and labels [N] to images [N, C, H, W].

    `widths` are the channels at each resolution, the first at the image's own; each further one halves it. Each has a
    residual block on the way down and one on the way up, which also sees what the way down had there. With `code`, maps
    of so many channels, of the size that `middle_size` says, are added to the features in the middle.
    """

    def __init__(
        self, channels: int, classes: int, *, widths: tuple[int, ...] = (32, 64, 64), context: int = 64, code: int = 0
    ) -> None:
        super().__init__()
        self.classes, self._frequencies = classes, context // 2
        self.context = nn.Sequential(nn.Linear(context + classes, context), nn.SiLU(), nn.Linear(context, context))
        self.entry = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down = nn.ModuleList(Block(wide, wide, context) for wide in widths[:-1])
        self.narrow = nn.ModuleList(nn.Conv2d(wide, wider, 3, 2, 1) for wide, wider in pairwise(widths))
        self.coded = nn.Conv2d(code, widths[-1], 1) if code else None
        self.middle = Block(widths[-1], widths[-1], context)
        upward = list(pairwise(reversed(widths)))
        self.widen = nn.ModuleList(nn.Conv2d(wide, narrow, 3, padding=1) for wide, narrow in upward)
        self.up = nn.ModuleList(Block(2 * narrow, narrow, context) for _, narrow in upward)
        self.last = nn.Sequential(
            nn.GroupNorm(GROUPS, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], channels, 3, padding=1)
        )

    def forward(
        self, images: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor, code: torch.Tensor | None = None
    ) -> torch.Tensor:
        steps = torch.arange(self._frequencies, device=images.device) / self._frequencies
        angles = levels[:, None] * torch.exp(steps * math.log(1000.0))
        member = labels[:, None] == torch.arange(self.classes, device=labels.device)
        named = math.sqrt(self._frequencies) * member  # as long as what says the level: it matters as much
        context = self.context(torch.cat([angles.sin(), angles.cos(), named], 1).to(images.dtype))
        maps, kept = self.entry(images), []
        for block, narrow in zip(self.down, self.narrow, strict=True):
            kept.append(block(maps, context))
            maps = narrow(kept[-1])
        if self.coded is not None:
            assert code is not None
            maps = maps + self.coded(code.to(images.dtype))
        maps = self.middle(maps, context)
        for widen, block in zip(self.widen, self.up, strict=True):
            beside = kept.pop()
            maps = widen(functional.interpolate(maps, size=beside.shape[2:], mode="nearest"))
            maps = block(torch.cat([maps, beside], 1), context)
        return cast(torch.Tensor, self.last(maps))


def middle_size(size: tuple[int, int], widths: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of the maps in the middle of a network with these widths."""
    halvings = 2 ** (len(widths) - 1)
    return -(-size[0] // halvings), -(-size[1] // halvings)


class Block(nn.Module):
    """Two convolutions with norms before them, added to the input; the context scales and shifts the second norm."""

    def __init__(self, inputs: int, outputs: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, inputs), nn.GroupNorm(GROUPS, outputs, affine=False)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.told = nn.Linear(context, 2 * outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scale, shift = self.told(context)[:, :, None, None].chunk(2, 1)
        maps = self.norms[1](self.first(functional.silu(self.norms[0](x))))
        maps = self.second(functional.silu(torch.addcmul(shift, maps, 1 + scale)))
        return cast(torch.Tensor, maps + self.short(x))
