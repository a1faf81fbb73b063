"""Closed-form per-example gradients of linear and convolution layers.

The weight of a linear or convolution layer has the gradient sum_t l_t r_t^T, where l_t is the gradient of the layer's
output at position t, and r_t its input (for convolutions: a patch of it). The factors l and r are cheaper than the
gradient: l is the derivative by a zero that is added to the layer's output. `privacy/clipping.py` clips in this
factored form.

All functions here process one record; the vault maps them over a batch. A wrong rule gives a wrong gradient, but the
vault clips it to the same norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sfumato.privacy.clipping import MIN_SAVING, Piece

MAX_PATCH_OVERLAP = 4  # on a CPU, patches may take this many times the memory of the maps; beyond, autograd is faster


@dataclass(frozen=True)
class Call:
    """One call of a layer within a loss."""

    kind: str
    weight: str
    bias: str | None
    geometry: tuple[tuple[int, ...], ...]  # of a convolution: kernel, stride, padding, dilation
    shape: tuple[int, ...]  # of the output for one record: views first
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def is_faster(self, device: torch.device) -> bool:
        """Return whether the rule is faster than autograd, as measured by `python -m benchmarks speed-gradients`."""
        if self.kind == "linear" or device.type != "cpu":
            return True
        kernel, stride, *_ = self.geometry
        return math.prod(kernel) <= MAX_PATCH_OVERLAP * math.prod(stride)


class LayerHooks(TorchFunctionMode):
    """Record the inputs of layers and add zeros to their outputs, by which the loss can be differentiated.

    - weights: trainable parameters by name; calls with other weights are ignored.
    - expected: calls to process, default None: record all calls and change nothing.
    - zeros: one tensor per expected call, added to its output.
    """

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
        layer = _LAYERS[func](*args, **(kwargs or {})) if func in _LAYERS else None
        if layer is None:
            return out
        kind, given, weight, bias, geometry = layer
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
class LayerGradient:
    """The gradient of a parameter in pieces. `columns`: number of kernel columns if each kernel row is a piece."""

    pieces: list[Piece]
    columns: int | None = None


def closed_form_gradients(
    call: Call, layer_input: torch.Tensor, output_gradient: torch.Tensor
) -> Iterator[tuple[str, LayerGradient]]:
    """Yield the gradients of a layer's weight and bias from its input and the gradient of its output."""
    layer_input = layer_input.to(output_gradient.dtype)  # under autocast the layer casts its input, too
    if call.kind == "linear":
        yield call.weight, LayerGradient([(output_gradient.flatten(0, -2), layer_input.flatten(0, -2))])
        bias = output_gradient.flatten(0, -2).sum(0, dtype=torch.float32)
    else:
        # A transposed convolution is a convolution from its output to its input.
        outputs, inputs = (output_gradient, layer_input) if call.kind == "conv" else (layer_input, output_gradient)
        yield call.weight, _convolution_gradient(outputs, inputs, *call.geometry)
        bias = output_gradient.sum((0, 2, 3), dtype=torch.float32)
    if call.bias is not None:
        yield call.bias, LayerGradient([bias])


def add_gradients(one: LayerGradient, other: LayerGradient) -> LayerGradient:
    """Return the sum of two gradients of one parameter, for a layer that is called twice."""
    if one.columns == other.columns and all(isinstance(p, tuple) for p in (*one.pieces, *other.pieces)):
        pairs = zip(one.pieces, other.pieces, strict=True)
        return LayerGradient([(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs], one.columns)
    return LayerGradient([flatten_gradient(one) + flatten_gradient(other)])


def flatten_gradient(gradient: LayerGradient) -> torch.Tensor:
    """Return a gradient as one flat tensor, in the order of the parameter's entries."""
    flat = [p[0].float().mT @ p[1].float() if isinstance(p, tuple) else p.float() for p in gradient.pieces]
    return to_parameter_order(
        torch.cat([each.flatten() for each in flat])[None], [each.numel() for each in flat], gradient.columns
    )[0]


def to_parameter_order(flat: torch.Tensor, sizes: Sequence[int], columns: int | None) -> torch.Tensor:
    """Reorder sums [lanes, entries] from the order of the pieces to the order of the parameter's entries."""
    if columns is None:
        return flat
    rows = [piece.unflatten(1, (-1, columns)) for piece in flat.split(list(sizes), 1)]
    return torch.stack(rows, 2).flatten(1)  # [lanes, output and input channels, kernel rows, kernel columns]


def _convolution_gradient(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> LayerGradient:
    """Return the weight gradient of a convolution from its inputs and output gradients, [views, channels, H, W]."""
    views, out_channels, height, width = outputs.shape
    in_channels = inputs.shape[1]
    p, d = out_channels, in_channels * math.prod(kernel)
    cheap = MIN_SAVING * views * height * width * (p + d) <= p * d  # then `clipping` keeps the product factored
    if stride != (1, 1) or kernel[0] == 1 or cheap:
        return LayerGradient(
            [(_positions(outputs), _patches(inputs, kernel, stride, padding, dilation, (height, width)))]
        )
    # One shifted copy per kernel column; a kernel row is an offset into the copies. Output gradients are zero at the
    # ends of lines and maps, where an offset would reach into the next one. Lines are padded to 16 bytes for alignment.
    alignment = 16 // outputs.element_size()
    padded = -(-width // alignment) * alignment
    inputs = functional.pad(inputs, (padding[1], padding[1] + padded - width, padding[0], padding[0])).transpose(0, 1)
    lines = inputs.shape[2]
    columns = [inputs[..., column * dilation[1] :][..., :padded] for column in range(kernel[1])]
    right = torch.stack(columns, 1).reshape(in_channels * kernel[1], views * lines * padded)
    left = functional.pad(outputs.transpose(0, 1), (0, padded - width, 0, lines - height)).reshape(out_channels, -1)
    offsets = [row * dilation[0] * padded for row in range(kernel[0])]
    length = right.shape[1] - offsets[-1]
    return LayerGradient([(left[:, :length].mT, right[:, begin : begin + length].mT) for begin in offsets], kernel[1])


def _positions(maps: torch.Tensor) -> torch.Tensor:
    """Reshape [views, channels, H, W] to [views H W, channels]."""
    return maps.transpose(0, 1).flatten(1).mT


def _patches(
    maps: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    size: tuple[int, int],
) -> torch.Tensor:
    """Return the input patches of a convolution: [views, C, H, W] to [views H' W', C kernel]."""
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
    del output_padding  # it only affects the shape
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
