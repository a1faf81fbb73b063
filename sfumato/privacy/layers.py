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
    """Gradients as they are: [lanes, n, *shape], or, by the rows of a kernel, [rows, lanes, n, ..., columns]."""

    def __init__(self, each: torch.Tensor, *, by_rows: bool = False) -> None:
        self.each = (each if by_rows else each[None]).float()

    def squares(self) -> torch.Tensor:
        each = self.each.reshape(*self.each.shape[:3], -1)
        norms: torch.Tensor = torch.linalg.vector_norm(each, dim=(0, 3), dtype=torch.float64)
        return norms.square()

    def clear(self, bad: torch.Tensor) -> None:
        self.each = self.each.masked_fill(_like(bad, self.each[0]), 0)

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        sums = factors[:, None] @ self.each.reshape(*self.each.shape[:3], -1)  # [rows, lanes, 1, numbers]
        return _whole(sums.view(*sums.shape[:2], *self.each.shape[3:])).reshape(len(factors), -1)

    def whole(self) -> torch.Tensor:
        return _whole(self.each)

    def plus(self, other: Part) -> Part:
        return Written(self.whole() + other.whole())


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
    entered = entered.to(slope.dtype)  # as the layer itself takes it where a network computes with less than float32
    if call.kind == "linear":
        left, right = slope.flatten(2, -2), entered.flatten(2, -2)
        yield call.weight, _products(left, right, torch.Size((left.shape[-1], right.shape[-1])))
        bias = left.sum(2, dtype=torch.float32)
    else:
        # A transposed convolution is a convolution from what comes out to what goes in.
        ends, begins = (slope, entered) if call.kind == "conv" else (entered, slope)
        yield call.weight, _convolved(ends, begins, *call.geometry)
        bias = slope.sum((2, 4, 5), dtype=torch.float32)
    if call.bias is not None:
        yield call.bias, Written(bias)


def _products(left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> Part:
    """sum_t l_t r_t^T, written down or not: [lanes, n, t, p] and [lanes, n, t, d]."""
    if _is_cheaper(left.shape[2], shape):
        return Products(left, right, shape)
    return Written(_multiplied(left, right, shape))


def _is_cheaper(places: int, shape: torch.Size) -> bool:
    """Whether it costs less to keep products of so many places than to write the gradients down."""
    p, d = shape[0], shape[1:].numel()
    return CHEAPER * places * (p + d) <= p * d


def _convolved(
    ends: torch.Tensor,
    begins: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Part:
    """Of a convolution that leads from `begins` to `ends`, [lanes, n, views, channels, H, W]."""
    lanes, n, views, outputs, height, width = ends.shape
    inputs = begins.shape[3]
    shape = torch.Size((outputs, inputs, *kernel))
    if stride != (1, 1) or kernel[0] == 1 or _is_cheaper(views * height * width, shape):
        return _products(_positions(ends), _patches(begins, kernel, stride, padding, dilation), shape)
    # Copies for each column of the kernel; its rows only begin later in them. At the ends of lines and maps, where one
    # would look into the next, slopes are zero. Lines are so long that a device likes where they begin.
    line = 16 // ends.element_size()
    across = -(-width // line) * line
    begins = functional.pad(begins, (padding[1], padding[1] + across - width, padding[0], padding[0])).transpose(2, 3)
    lines = begins.shape[4]
    columns = [begins[..., place * dilation[1] :][..., :across] for place in range(kernel[1])]
    right = torch.stack(columns, 3).view(lanes * n, inputs * kernel[1], views * lines * across)
    left = functional.pad(ends.transpose(2, 3), (0, across - width, 0, lines - height)).reshape(lanes * n, outputs, -1)
    later = [row * dilation[0] * across for row in range(kernel[0])]
    length = right.shape[2] - later[-1]
    made = ends.new_empty(kernel[0], lanes * n, outputs, inputs * kernel[1], dtype=torch.float32)
    for begin, row in zip(later, made, strict=True):
        _multiply(left[..., :length], right[..., begin : begin + length].mT, row)
    return Written(made.view(kernel[0], lanes, n, outputs, inputs, kernel[1]), by_rows=True)


def _multiplied(left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """sum_t l_t r_t^T, [lanes, n, *shape], in float32."""
    made = left.new_empty(left.shape[:2].numel(), left.shape[3], right.shape[3], dtype=torch.float32)
    _multiply(left.mT.flatten(0, 1), right.flatten(0, 1), made)
    return made.view(*left.shape[:2], *shape)


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Products of matrices; of bfloat16, as a GPU multiplies that: summed in float32."""
    if left.dtype == torch.bfloat16 and left.device.type == "cuda":
        torch.bmm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.bmm(left.float(), right.float(), out=out)


def _whole(parts: torch.Tensor) -> torch.Tensor:
    """[rows, ..., columns] to [..., rows, columns]."""
    return parts[0] if len(parts) == 1 else parts.movedim(0, -2)


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
