"""Normalised moments of network activations: vectors of norm 1 (perceptual features of DP-MEPF, Harder et al. 2023).

The first moment is the vector of activations, the second the vector of their squares. Each is divided by its norm:
over all layers, or with `balanced` layer by layer. Entries are in channels-last order, which is the memory order on a
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

NORM_FLOOR = 1e-3  # far above rounding errors, far below the norm of the activations of an image


def moment(maps: Sequence[torch.Tensor], power: int, balanced: bool) -> torch.Tensor:
    """Return the normalised moment [N, features] of nonnegative activations [N, c, h, w].

    The norm has a floor, so rows that contain rounding errors only stay close to zero.
    """
    if balanced:
        return torch.cat([moment([layer], power, False) for layer in maps], 1) / math.sqrt(len(maps))
    flat = torch.cat([_channels_last(values).float() for values in maps], 1)
    flat = flat if power == 1 else flat.square()
    return flat / (flat.square().sum(1, keepdim=True) + NORM_FLOOR ** (2 * power)).sqrt()


def class_means(maps: Sequence[torch.Tensor], classes: int, moments: int, balanced: bool) -> list[torch.Tensor]:
    """Return the class means [classes, features] of each moment.

    `maps` hold equally many images of each class, class by class. The result is that of `moment`, averaged
    over each class. But the rows, which have hundreds of thousands of entries, are not stored, and activations in
    bfloat16 are not converted.
    """
    means = _ClassMeans.apply(classes, moments, balanced, *(_channels_last(values) for values in maps))  # type: ignore[no-untyped-call]
    return [torch.cat(means[index::moments], 1) for index in range(moments)]  # `means` is ordered by layer, then moment


class _ClassMeans(torch.autograd.Function):
    """Mean over a class of v / |v|, for each layer and moment, where v is f or f².

    The gradient of <g, v / |v|> with respect to v is (g - v <v, g> / |v|²) / |v|; the derivative of f² is 2 f.
    """

    @staticmethod
    def forward(ctx: Any, classes: int, moments: int, balanced: bool, *maps: torch.Tensor) -> tuple[torch.Tensor, ...]:
        per_class = len(maps[0]) // classes
        scale = 1 / (per_class * math.sqrt(len(maps) if balanced else 1))
        inverse_norms = []  # for each moment: [layers, N]
        for power in range(1, moments + 1):
            squares = torch.stack(
                [torch.linalg.vector_norm(f, 2 * power, 1, dtype=torch.float32) ** (2 * power) for f in maps]
            )
            squares = squares if balanced else squares.sum(0).expand_as(squares)
            inverse_norms.append((squares + NORM_FLOOR ** (2 * power)).rsqrt())
        ctx.save_for_backward(*maps, *inverse_norms)
        ctx.options = classes, moments, balanced, scale
        return tuple(
            _bmm(scale * inverse_norms[index][layer].view(classes, 1, per_class), v.view(classes, per_class, -1))[:, 0]
            for layer, f in enumerate(maps)
            for index, v in enumerate([f, f.square()][:moments])
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        classes, moments, balanced, scale = ctx.options
        maps, inverse_norms = ctx.saved_tensors[:-moments], ctx.saved_tensors[-moments:]
        products = []  # <v, g>, for each moment: [layers, N]
        for index in range(moments):
            per_layer = []
            for f, g in zip(maps, grads[index::moments], strict=True):
                v = (f if index == 0 else f.square()).view(classes, -1, f.shape[1])
                per_layer.append(_bmm(v, g[:, :, None]).flatten())
            stacked = torch.stack(per_layer)
            products.append(stacked if balanced else stacked.sum(0).expand_as(stacked))
        gradients = []
        for layer, f in enumerate(values.view(classes, -1, values.shape[1]) for values in maps):
            direct = [(scale * inverse_norms[index][layer]).view(classes, -1, 1).to(f) for index in range(moments)]
            radial = [
                (scale * products[index][layer] * inverse_norms[index][layer] ** 3).view(classes, -1, 1).to(f)
                for index in range(moments)
            ]
            upstream = [grad[:, None].to(f) for grad in grads[layer * moments : (layer + 1) * moments]]
            if moments == 1:
                factor = -radial[0]
            else:
                factor = (2 * upstream[1] * direct[1] - radial[0]).addcmul_(f.square(), -2 * radial[1])
            gradients.append(torch.addcmul(upstream[0] * direct[0], f, factor).flatten(0, 1))
        return None, None, None, *gradients


def _channels_last(values: torch.Tensor) -> torch.Tensor:
    return values.permute(0, 2, 3, 1).flatten(1)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the batched matrix product, accumulated in float32; inputs of lower precision are not converted."""
    low = b.dtype if a.dtype == torch.float32 else a.dtype
    if low == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a.to(low), b.to(low), out_dtype=torch.float32)
