"""Moments of a network's activations: what all of its maps say of an image, as one vector of norm one.

The first moment is the activations, the second their squares; each is divided by its norm, of all maps together or, if
`balanced`, of each map by itself. Numbers stand in the order of memory on a GPU: places first, then channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

FLOOR = 1e-3  # a norm far above rounding, and far below that of what a network sees in an image


def moment(maps: Sequence[torch.Tensor], power: int, balanced: bool) -> torch.Tensor:
    """Maps [N, c, h, w] without negative entries to their moment [N, numbers]; of nothing but rounding, near zero."""
    if balanced:
        return torch.cat([moment([layer], power, False) for layer in maps], 1) / math.sqrt(len(maps))
    flat = torch.cat([_flat(values).float() for values in maps], 1)
    flat = flat if power == 1 else flat.square()
    return flat / (flat.square().sum(1, keepdim=True) + FLOOR ** (2 * power)).sqrt()


def class_means(maps: Sequence[torch.Tensor], classes: int, moments: int, balanced: bool) -> list[torch.Tensor]:
    """Means of the moments over the images of each class, [classes, numbers], class by class in `maps`.

    The same as `moment`, then the mean; but rows, of hundreds of thousands of numbers each, are never written down, and
    maps in bfloat16 are read as they are.
    """
    parts = _ClassMeans.apply(classes, moments, balanced, *(_flat(values) for values in maps))  # type: ignore[no-untyped-call]
    return [torch.cat(parts[power::moments], 1) for power in range(moments)]


class _ClassMeans(torch.autograd.Function):
    """Of each map, for each moment: sum over a class's images of v / |v|, over their number; v is f or f².

    The slope of <g, v / |v|> by v is (g - v <v, g> / |v|²) / |v|, and that of f² by f is 2 f.
    """

    @staticmethod
    def forward(ctx: Any, classes: int, moments: int, balanced: bool, *maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        each = len(maps[0]) // classes
        scale = 1 / (each * math.sqrt(len(maps) if balanced else 1))
        inverse = []  # 1 / norm, for each map and moment
        for power in range(1, moments + 1):
            squares = torch.stack(
                [torch.linalg.vector_norm(f, 2 * power, 1, dtype=torch.float32) ** (2 * power) for f in maps]
            )
            squares = squares if balanced else squares.sum(0).expand_as(squares)
            inverse.append((squares + FLOOR ** (2 * power)).rsqrt())
        ctx.save_for_backward(*maps, *inverse)
        ctx.options = classes, moments, balanced, scale
        return tuple(
            _product(scale * inverse[power][place].view(classes, 1, each), values.view(classes, each, -1))[:, 0]
            for place, f in enumerate(maps)
            for power, values in enumerate([f, f.square()][:moments])
        )

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        classes, moments, balanced, scale = ctx.options
        maps, inverse = ctx.saved_tensors[:-moments], ctx.saved_tensors[-moments:]
        dots = []  # <v, g>, for each moment and map
        for power in range(moments):
            found = []
            for f, g in zip(maps, slopes[power::moments], strict=True):
                v = (f if power == 0 else f.square()).view(classes, -1, f.shape[1])
                found.append(_product(v, g[:, :, None]).flatten())
            together = torch.stack(found)
            dots.append(together if balanced else together.sum(0).expand_as(together))
        gradients = []
        for place, f in enumerate(values.view(classes, -1, values.shape[1]) for values in maps):
            one = [(scale * inverse[power][place]).view(classes, -1, 1).to(f) for power in range(moments)]
            back = [
                (scale * dots[power][place] * inverse[power][place] ** 3).view(classes, -1, 1).to(f)
                for power in range(moments)
            ]
            here = [slope[:, None].to(f) for slope in slopes[place * moments : (place + 1) * moments]]
            inner = -back[0] if moments == 1 else (2 * here[1] * one[1] - back[0]).addcmul_(f.square(), -2 * back[1])
            gradients.append(torch.addcmul(here[0] * one[0], f, inner).flatten(0, 1))
        return None, None, None, *gradients


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.permute(0, 2, 3, 1).flatten(1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched products, summed and given in float32; one of them may be in less."""
    less = b.dtype if a.dtype == torch.float32 else a.dtype
    if less == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a.to(less), b.to(less), out_dtype=torch.float32)
