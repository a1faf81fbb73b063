"""Closed-form per-example gradients of linear and convolution layers.

A linear layer or a convolution multiplies its input by its weight, so the weight's gradient is sum_t l_t r_t^T, with
the output's gradients l_t and (patches of) the input r_t. Both cost less than the gradient itself: a zero is added to
the layer's output, and the loss is differentiated by the zero. `privacy/clipping.py` takes the factors as they are.

All functions here are of one record; the vault maps them over a batch. A wrong rule would give a wrong gradient, and
the vault would clip it all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sfumato.privacy.clipping import CHEAPER, Piece

SPREAD = 4  # on a CPU, patches may take so many times the memory of the maps; else plain differentiation is faster


@dataclass(frozen=True)
class Call:
    """One use of a layer by a loss."""

    kind: str
    weight: str
    bias: str | None
    geometry: tuple[tuple[int, ...], ...]  # of a convolution: kernel, stride, padding, dilation
    shape: tuple[int, ...]  # of the output for one record, its views first
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def pays(self, device: torch.device) -> bool:
        """Return whether the rule is faster than differentiation, as measured (`benchmarks/gradient_speed.py`)."""
        if self.kind == "linear" or device.type != "cpu":
            return True
        kernel, stride, *_ = self.geometry
        return math.prod(kernel) <= SPREAD * math.prod(stride)


class Taps(TorchFunctionMode):
    """Watch layers: note their inputs, and add zeros to their outputs, so that these can be differentiated by."""

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


@dataclass(frozen=True)
class Part:
    """The gradient of a parameter in pieces; `columns`: of a kernel, whose rows are a piece each."""

    pieces: list[Piece]
    columns: int | None = None


def by_rule(call: Call, entered: torch.Tensor, slope: torch.Tensor) -> Iterator[tuple[str, Part]]:
    """Yield a layer's gradients, of its weight and its bias, from its input and the gradient of its output."""
    entered = entered.to(slope.dtype)  # as the layer itself takes it where a network computes with less than float32
    if call.kind == "linear":
        yield call.weight, Part([(slope.flatten(0, -2), entered.flatten(0, -2))])
        bias = slope.flatten(0, -2).sum(0, dtype=torch.float32)
    else:
        # A transposed convolution is a convolution from its output to its input.
        ends, begins = (slope, entered) if call.kind == "conv" else (entered, slope)
        yield call.weight, _convolved(ends, begins, *call.geometry)
        bias = slope.sum((0, 2, 3), dtype=torch.float32)
    if call.bias is not None:
        yield call.bias, Part([bias])


def added(one: Part, other: Part) -> Part:
    """Return the sum of two gradients of one parameter: of a layer that is used twice."""
    if one.columns == other.columns and all(isinstance(p, tuple) for p in (*one.pieces, *other.pieces)):
        pairs = zip(one.pieces, other.pieces, strict=True)
        return Part([(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs], one.columns)
    return Part([whole(one) + whole(other)])


def whole(part: Part) -> torch.Tensor:
    """Return a gradient as one flat tensor, in the order of the parameter."""
    flat = [p[0].float().mT @ p[1].float() if isinstance(p, tuple) else p.float() for p in part.pieces]
    return assembled(torch.cat([each.flatten() for each in flat])[None], [each.numel() for each in flat], part.columns)[
        0
    ]


def assembled(flat: torch.Tensor, sizes: Sequence[int], columns: int | None) -> torch.Tensor:
    """Return sums [lanes, entries], piece after piece, in the order of the parameter."""
    if columns is None:
        return flat
    rows = [piece.unflatten(1, (-1, columns)) for piece in flat.split(list(sizes), 1)]
    return torch.stack(rows, 2).flatten(1)  # [lanes, outputs and inputs, kernel rows, kernel columns]


def _convolved(
    ends: torch.Tensor,
    begins: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Part:
    """Return the gradient of a convolution that leads from `begins` to `ends`, [views, channels, H, W]."""
    views, outputs, height, width = ends.shape
    inputs = begins.shape[1]
    p, d = outputs, inputs * math.prod(kernel)
    cheap = CHEAPER * views * height * width * (p + d) <= p * d  # then the product is never written down
    if stride != (1, 1) or kernel[0] == 1 or cheap:
        return Part([(_positions(ends), _patches(begins, kernel, stride, padding, dilation, (height, width)))])
    # One copy for each column of the kernel; its rows begin later in the copy. At the ends of lines and maps, where one
    # would look into the next, output gradients are zero. Lines are padded to 16 bytes for aligned loads.
    line = 16 // ends.element_size()
    across = -(-width // line) * line
    begins = functional.pad(begins, (padding[1], padding[1] + across - width, padding[0], padding[0])).transpose(0, 1)
    lines = begins.shape[2]
    columns = [begins[..., place * dilation[1] :][..., :across] for place in range(kernel[1])]
    right = torch.stack(columns, 1).reshape(inputs * kernel[1], views * lines * across)
    left = functional.pad(ends.transpose(0, 1), (0, across - width, 0, lines - height)).reshape(outputs, -1)
    later = [row * dilation[0] * across for row in range(kernel[0])]
    length = right.shape[1] - later[-1]
    return Part([(left[:, :length].mT, right[:, begin : begin + length].mT) for begin in later], kernel[1])


def _positions(maps: torch.Tensor) -> torch.Tensor:
    """[views, channels, H, W] to [views H W, channels]."""
    return maps.transpose(0, 1).flatten(1).mT


def _patches(
    maps: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    size: tuple[int, int],
) -> torch.Tensor:
    """Return the patches that a convolution looks at: [views, C, H, W] to [views H' W', C kernel]."""
    maps = functional.pad(maps, (padding[1], padding[1], padding[0], padding[0]))
    spans = [gap * (side - 1) + 1 for side, gap in zip(kernel, dilation, strict=True)]
    patches = maps.unfold(2, spans[0], stride[0]).unfold(3, spans[1], stride[1])[:, :, : size[0], : size[1]]
    patches = patches[..., :: dilation[0], :: dilation[1]]  # [views, C, H', W', *kernel]
    return patches.permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2).mT


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
