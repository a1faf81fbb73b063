"""Small U-Net (Ronneberger et al. 2015; Ho et al. 2020), conditioned on noise level, class and an embedding.

It has group norm, no batch norm and no dropout: rows are independent, so per-example gradients are defined.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn import functional

GROUPS = 8
HEAD_WIDTH = 64  # minimum channels per attention head


class UNet(nn.Module):
    """Map images [N, C, H, W], noise levels [N] and labels [N] (-1: no class) to images [N, C, H, W].

    Each resolution has one residual block on the way down and one on the way up, with a skip connection between them.

    - channels: of the images.
    - classes: number of classes.
    - widths: channels at each resolution; the first is the full resolution, each further one halves it.
    - context: width of the embedding of noise level and class (and condition), default 64.
    - attention: number of lowest resolutions whose blocks are followed by self-attention, default 0.
    - code: channels of codes of size `middle_size`, which are added to the features at the lowest resolution; 0
      (default): no codes.
    - condition: width of an embedding of the image to generate, in addition to its class; 0 (default): none.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        widths: tuple[int, ...] = (32, 64, 64),
        context: int = 64,
        attention: int = 0,
        code: int = 0,
        condition: int = 0,
    ) -> None:
        super().__init__()
        self.classes, self.widths, self.context_width, self.attention = classes, widths, context, attention
        self.condition_width, self._frequencies = condition, context // 2
        self.context = nn.Sequential(
            nn.Linear(context + condition + classes, context), nn.SiLU(), nn.Linear(context, context)
        )
        self.entry = nn.Conv2d(channels, widths[0], 3, padding=1)
        block_context = context + condition  # width of the context of a block
        attended = [depth >= len(widths) - attention for depth in range(len(widths))]
        self.down = nn.ModuleList(
            _block(width, width, block_context, attend) for width, attend in zip(widths[:-1], attended, strict=False)
        )
        self.downsample = nn.ModuleList(nn.Conv2d(fine, coarse, 3, 2, 1) for fine, coarse in pairwise(widths))
        self.code_projection = nn.Conv2d(code, widths[-1], 1) if code else None
        self.middle = _block(widths[-1], widths[-1], block_context, attended[-1])
        upward = list(pairwise(reversed(widths)))
        self.upsample = nn.ModuleList(nn.Conv2d(coarse, fine, 3, padding=1) for coarse, fine in upward)
        self.up = nn.ModuleList(
            _block(2 * fine, fine, block_context, attend)
            for (_, fine), attend in zip(upward, reversed(attended[:-1]), strict=True)
        )
        self.last = nn.Sequential(
            nn.GroupNorm(GROUPS, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], channels, 3, padding=1)
        )

    def forward(
        self,
        images: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Sinusoidal embedding of the noise level.
        exponents = torch.arange(self._frequencies, device=images.device) / self._frequencies
        angles = levels[:, None] * torch.exp(exponents * math.log(1000.0))
        one_hot = labels[:, None] == torch.arange(self.classes, device=labels.device)  # label -1: no class
        label = math.sqrt(self._frequencies) * one_hot  # the norm of the embedding of the noise level
        if condition is None:  # zeros: no condition
            condition = images.new_zeros(len(images), self.condition_width)
        scaled_condition = (math.sqrt(self.condition_width) * condition).to(images.dtype)
        embedding = self.context(torch.cat([angles.sin(), angles.cos(), scaled_condition, label], 1).to(images.dtype))
        block_context = torch.cat([embedding, scaled_condition], 1)
        maps, skips = self.entry(images), []
        for block, downsample in zip(self.down, self.downsample, strict=True):
            skips.append(block(maps, block_context))
            maps = downsample(skips[-1])
        if self.code_projection is not None:
            assert code is not None
            maps = maps + self.code_projection(code.to(images.dtype))
        maps = self.middle(maps, block_context)
        for upsample, block in zip(self.upsample, self.up, strict=True):
            skip = skips.pop()
            maps = upsample(functional.interpolate(maps, size=skip.shape[2:], mode="nearest"))
            maps = block(torch.cat([maps, skip], 1), block_context)
        return cast(torch.Tensor, self.last(maps))


def middle_size(size: tuple[int, int], widths: tuple[int, ...]) -> tuple[int, int]:
    """Return height and width of the maps at the lowest resolution of a U-Net with these widths."""
    factor = 2 ** (len(widths) - 1)
    return -(-size[0] // factor), -(-size[1] // factor)


class ResidualBlock(nn.Module):
    """Pre-activation residual block of two convolutions; the context scales and shifts the second norm.

    - inputs: channels of the input.
    - outputs: channels of the output.
    - context: width of the context vector.
    """

    def __init__(self, inputs: int, outputs: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(GROUPS, inputs), nn.GroupNorm(GROUPS, outputs, affine=False)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.scale_shift = nn.Linear(context, 2 * outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scale, shift = self.scale_shift(context)[:, :, None, None].chunk(2, 1)
        maps = self.norms[1](self.first(functional.silu(self.norms[0](x))))
        maps = self.second(functional.silu(torch.addcmul(shift, maps, 1 + scale)))
        return cast(torch.Tensor, maps + self.shortcut(x))


class AttentionBlock(ResidualBlock):
    """A residual block followed by multi-head self-attention over the pixels of its output.

    The attention is written out as matrix products, so that it can be traced and mapped over records.
    """

    def __init__(self, inputs: int, outputs: int, context: int) -> None:
        super().__init__(inputs, outputs, context)
        self.heads = next(heads for heads in range(max(1, outputs // HEAD_WIDTH), 0, -1) if outputs % heads == 0)
        self.attention_norm = nn.GroupNorm(GROUPS, outputs)
        self.queries_keys_values = nn.Conv2d(outputs, 3 * outputs, 1)
        self.projection = nn.Conv2d(outputs, outputs, 1)
        nn.init.zeros_(self.projection.weight)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        maps = super().forward(x, context)
        parts = self.queries_keys_values(self.attention_norm(maps)).flatten(2).unflatten(1, (3, self.heads, -1))
        queries, keys, values = parts.unbind(1)  # [N, heads, width, pixels]
        weights = (queries.transpose(2, 3) @ keys / math.sqrt(queries.shape[2])).softmax(3)
        mixed = (values @ weights.transpose(2, 3)).flatten(1, 2).unflatten(2, maps.shape[2:])
        return cast(torch.Tensor, maps + self.projection(mixed))


def _block(inputs: int, outputs: int, context: int, attend: bool) -> ResidualBlock:
    return (AttentionBlock if attend else ResidualBlock)(inputs, outputs, context)
