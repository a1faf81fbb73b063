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
    """Return the class means [classes, features] of each moment; `maps` are sorted by class, equally many per class.

    Equals `moment` and then the mean, but does not store the rows, which have hundreds of thousands of entries, and
    reads activations in bfloat16 without conversion.
    """
    means = _ClassMeans.apply(classes, moments, balanced, *(_channels_last(values) for values in maps))  # type: ignore[no-untyped-call]
    return [torch.cat(means[power::moments], 1) for power in range(moments)]


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
            _bmm(scale * inverse_norms[power][layer].view(classes, 1, per_class), v.view(classes, per_class, -1))[:, 0]
            for layer, f in enumerate(maps)
            for power, v in enumerate([f, f.square()][:moments])
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        classes, moments, balanced, scale = ctx.options
        maps, inverse_norms = ctx.saved_tensors[:-moments], ctx.saved_tensors[-moments:]
        products = []  # <v, g>, for each moment: [layers, N]
        for power in range(moments):
            per_layer = []
            for f, g in zip(maps, grads[power::moments], strict=True):
                v = (f if power == 0 else f.square()).view(classes, -1, f.shape[1])
                per_layer.append(_bmm(v, g[:, :, None]).flatten())
            stacked = torch.stack(per_layer)
            products.append(stacked if balanced else stacked.sum(0).expand_as(stacked))
        gradients = []
        for layer, f in enumerate(values.view(classes, -1, values.shape[1]) for values in maps):
            direct = [(scale * inverse_norms[power][layer]).view(classes, -1, 1).to(f) for power in range(moments)]
            radial = [
                (scale * products[power][layer] * inverse_norms[power][layer] ** 3).view(classes, -1, 1).to(f)
                for power in range(moments)
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
