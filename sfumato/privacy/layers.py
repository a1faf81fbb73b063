"""Layers whose gradients are had by a rule: what `gradients.py` adds up for a linear layer or a convolution.

Guarantee: rows of what comes in give rows of what goes out; `squares` bounds the squared norm of what `total` adds up,
record by record, up to the rounding of float32, whatever the numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

CANCELLED = 1e-8  # of (sum_t |l_t| |r_t|)^2: added to squared norms, for what rounding leaves of terms that cancel
MOST_FACTOR = 1e12
CHEAPER = 4  # times fewer operations: then a gradient is not written down


@dataclass(frozen=True)
class Call:
    """One use of a layer by a loss: public, since it does not depend on pixels."""

    kind: str
    weight: str
    bias: str | None
    geometry: tuple[tuple[int, ...], ...]  # of a convolution: kernel, stride, padding, dilation
    shape: tuple[int, ...]  # of what comes out for one record, its views first
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class Taps(TorchFunctionMode):
    """Watches layers: notes what goes in, and adds zeros to what comes out, so that its slope can be asked for."""

    def __init__(
        self, weights: dict[str, torch.Tensor], expected: Sequence[Call] | None, zeros: Sequence[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self._expected, self._zeros = expected, zeros
        self.calls: list[Call] = []
        self.inputs: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        described = _LAYERS[func](*args, **(kwargs or {})) if func in _LAYERS else None
        if described is None:
            return out
        kind, given, weight, bias, geometry = described
        name = self._names.get(id(weight))
        if name is None or given.ndim < 2:
            return out
        call = Call(kind, name, self._names.get(id(bias)), geometry, tuple(out.shape), out.dtype)
        if self._expected is None:
            self.calls.append(call)
            return out
        if call not in self._expected:
            return out
        self.calls.append(call)
        self.inputs.append(given)
        return out + self._zeros[len(self.calls) - 1]


# -- a parameter's gradients, one for each record -------------------------------------------------------------


class Written:
    """Gradients as they are, [lanes, n, *shape]."""

    def __init__(self, each: torch.Tensor) -> None:
        self.each = each.float()

    def squares(self) -> torch.Tensor:
        each = self.each.reshape(*self.each.shape[:2], -1)
        norms: torch.Tensor = torch.linalg.vector_norm(each, dim=2, dtype=torch.float64)
        return norms.square()

    def clear(self, bad: torch.Tensor) -> None:
        self.each = self.each.masked_fill(_like(bad, self.each), 0)

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        return (factors[:, None] @ self.each.reshape(*self.each.shape[:2], -1))[:, 0]

    def whole(self) -> torch.Tensor:
        return self.each

    def plus(self, other: Part) -> Part:
        return Written(self.each + other.whole())


class Products:
    """Gradients sum_t l_t r_t^T that are not written down: [lanes, n, t, p] and [lanes, n, t, d]."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left.float(), right.float(), shape

    def squares(self) -> torch.Tensor:
        """Infinite where a factor is so large that the other could be too small for float32."""
        most = torch.maximum(*(side.abs().amax((2, 3)) for side in (self.left, self.right)))
        return torch.where(most <= MOST_FACTOR, self._squares(), math.inf)

    def _squares(self) -> torch.Tensor:
        if self.left.shape[2] == 1:
            norms: list[torch.Tensor] = [
                torch.linalg.vector_norm(side, dim=(2, 3), dtype=torch.float64) for side in (self.left, self.right)
            ]
            return (norms[0] * norms[1]).square() * (1 + CANCELLED)
        left, right = self.left.double(), self.right.double()
        pairs = (left @ left.mT) * (right @ right.mT)
        spread = pairs.diagonal(dim1=2, dim2=3).sqrt().sum(2).square()
        return pairs.sum((2, 3)).clamp_min(0) + CANCELLED * spread

    def clear(self, bad: torch.Tensor) -> None:
        self.left, self.right = (side.masked_fill(_like(bad, side), 0) for side in (self.left, self.right))

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        left = (self.left * _like(factors, self.left)).flatten(1, 2)
        return (left.mT @ self.right.flatten(1, 2)).flatten(1)

    def whole(self) -> torch.Tensor:
        return _multiplied(self.left, self.right, self.shape)

    def plus(self, other: Part) -> Part:
        if isinstance(other, Products):
            left, right = torch.cat([self.left, other.left], 2), torch.cat([self.right, other.right], 2)
            return Products(left, right, self.shape)
        return Written(self.whole() + other.whole())


Part = Written | Products


def by_rule(call: Call, entered: torch.Tensor, slope: torch.Tensor) -> Iterator[tuple[str, Part]]:
    """A layer's gradients, of its weight and its bias, from what entered it and the slope of what came out."""
    if call.kind == "linear":
        left, right = slope.flatten(2, -2), entered.flatten(2, -2)
        shape = torch.Size((left.shape[-1], right.shape[-1]))
        bias = left.sum(2, dtype=torch.float32)
    else:
        kernel = call.geometry[0]
        if call.kind == "conv":
            left, right = _positions(slope), _patches(entered, *call.geometry)
            shape = torch.Size((slope.shape[3], entered.shape[3], *kernel))
        else:  # a transposed convolution is a convolution from what comes out to what goes in
            left, right = _positions(entered), _patches(slope, *call.geometry)
            shape = torch.Size((entered.shape[3], slope.shape[3], *kernel))
        bias = slope.sum((2, 4, 5), dtype=torch.float32)
    places, p, d = left.shape[2], left.shape[3], right.shape[3]
    if CHEAPER * places * (p + d) <= p * d:
        yield call.weight, Products(left, right, shape)
    else:
        yield call.weight, Written(_multiplied(left, right, shape))
    if call.bias is not None:
        yield call.bias, Written(bias)


def _multiplied(left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """sum_t l_t r_t^T, [lanes, n, *shape], in float32; of bfloat16, as a device multiplies that: summed in float32."""
    if left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cuda":
        made = torch.bmm(left.mT.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
    else:
        made = left.float().mT @ right.float()
    return made.reshape(*left.shape[:2], *shape)


def _positions(maps: torch.Tensor) -> torch.Tensor:
    """[lanes, n, views, channels, H, W] to [lanes, n, views H W, channels]."""
    return maps.transpose(2, 3).flatten(3).mT


def _patches(
    maps: torch.Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...], dilation: Any
) -> torch.Tensor:
    """The patches that a convolution looks at: [..., C, H, W] to [lanes, n, views H' W', C kernel].

    By strides rather than `unfold`, which on a GPU is one launch for each image.
    """
    maps = functional.pad(maps, (padding[1], padding[1], padding[0], padding[0]))
    lanes, n, views, channels, height, width = maps.shape
    across = [
        (size - gap * (side - 1) - 1) // step + 1
        for size, side, step, gap in zip((height, width), kernel, stride, dilation, strict=True)
    ]
    maps = maps.contiguous()
    *outer, row, column = maps.stride()
    steps = (row * dilation[0], column * dilation[1]), (row * stride[0], column * stride[1])
    strides = (outer[0], outer[1], outer[3], *steps[0], outer[2], *steps[1])
    patches = maps.as_strided((lanes, n, channels, *kernel, views, *across), strides)
    return patches.flatten(5).flatten(2, 4).mT


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return "linear", input, weight, bias, ()


def _conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if groups != 1 or isinstance(padding, str) or input.ndim != 4:
        return None
    return "conv", input, weight, bias, (tuple(weight.shape[2:]), _pair(stride), _pair(padding), _pair(dilation))


def _conv_transpose2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    del output_padding  # it shows in the shape
    if groups != 1 or input.ndim != 4:
        return None
    return "transposed", input, weight, bias, (tuple(weight.shape[2:]), _pair(stride), _pair(padding), _pair(dilation))


_LAYERS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.conv2d: _conv2d,
    functional.conv_transpose2d: _conv_transpose2d,
}


def _pair(value: Any) -> tuple[int, int]:
    one, other = (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))
    return int(one), int(other)


def _like(each: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[lanes, n], with as many axes as `other`."""
    return each.reshape(*each.shape, *(1 for _ in other.shape[2:]))
