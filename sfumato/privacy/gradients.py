"""Per-example clipped gradients: what `Vault.gradient` sums (DP-SGD).

The loss of each record is differentiated by itself, under `torch.vmap`; each record's gradient is clipped to its bound,
as a whole or by groups of parameters, and the clipped gradients are added up. The network may be one for each class
with stacked parameters; then a record goes through its class's slice and moves that slice only.

**How.** A linear layer or a convolution multiplies what goes into it by its weight, so its weight's gradient is
sum_t l_t r_t^T, with the slopes of what came out and (patches of) what went in. Both are had for less than the
gradient itself: a zero is added to what comes out, and the loss is differentiated by the zero. Where it is cheaper the
gradient is never written down: its squared norm is sum_{t,u} (l_t . l_u) (r_t . r_u), and the clipped sum is one matrix
product over all records. Weights that are used in any other way are differentiated themselves. Which way each goes is
found out on public images.

**Guarantee.** None of that matters to it. What is added up for a record is a vector that was computed from that
record alone, since the user's code runs under `torch.vmap`, times a factor that brings the norm of this very vector to
the bound. Were a rule wrong, or the loss not what its author thinks, the vector would not be the gradient, but it would
be as bounded. With one bound for each of several groups a record moves the whole by at most the root of the sum of
their squares, and that is what the noise is for.

**Random numbers of a record.** Views of an image may differ by standard normal numbers, which the vault draws afresh
and independently for each record in each release. Given all of them, the release is the plain one; so the outputs on
neighbouring sets are mixtures, with the same weights, of outputs that are as close as what is charged, and the
hockey-stick divergence is jointly convex.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sfumato.privacy.rows import PLACE_MARGIN

Loss = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]

COARSE = 5  # times larger margins for rounding where a network computes with less than float32
LEAST_BOUND, MOST_BOUND = 1e-9, 1e9  # squares of what matters then fit into float32
STIR = 0.02  # standard deviation
RULE_MARGIN = 1e-3  # relative, between a layer's gradient by its rule and by differentiation
CANCELLED = 1e-8  # of (sum_t |l_t| |r_t|)^2: added to squared norms, for what rounding leaves of terms that cancel
SPREAD = 4  # on a CPU, patches may take so many times the memory of the maps; else `vmap` has the faster way
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


class _Taps(TorchFunctionMode):
    """Watches layers: notes what goes in, and adds zeros to what comes out, so that its slope can be asked for."""

    def __init__(self, weights: Tensors, expected: Sequence[Call] | None, zeros: Sequence[torch.Tensor] = ()) -> None:
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


class Gradients:
    """The gradients of one loss: an engine that is given public or private images, and keeps none of them.

    `classes` is the number of stacked networks, or None for a plain one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        bound: float | Mapping[str, float],
        *,
        classes: int | None,
        views: int,
        precision: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weights, self._fixed = _state(model, classes)
        self.groups = _groups(self.weights, bound)
        self.classes, self._views = classes, views
        self._device, self._precision = device, precision
        self._whole = _Whole(model, loss)
        self.calls: tuple[Call, ...] = ()  # to layers whose gradients are had by rule

    @property
    def lanes(self) -> int:
        """How many networks there are side by side."""
        return self.classes or 1

    @property
    def parameters(self) -> int:
        """How many numbers each of them has."""
        return sum(weight.numel() for weight in self.weights.values()) // self.lanes

    @property
    def margin(self) -> float:
        """Of a bound: by which a gradient may come out otherwise at another place of a batch, by rounding."""
        return PLACE_MARGIN * self.coarseness

    @property
    def coarseness(self) -> int:
        return 1 if self._precision == torch.float32 else COARSE

    @property
    def radius(self) -> float:
        """By how much a record moves the clipped gradients of all groups together."""
        return math.sqrt(math.fsum(bound**2 for bound, _ in self.groups))

    @property
    def structure(self) -> tuple[Any, ...]:
        """All that rules depend on, but for values."""
        shapes = tuple((name, tuple(weight.shape)) for name, weight in self.weights.items())
        loss = getattr(self._whole.loss, "__func__", self._whole.loss)
        code = getattr(loss, "__code__", type(loss))  # the same for a lambda that is written in a loop
        return shapes, type(self._whole.model), code, self.classes, self._views, self._precision

    def clipped(
        self, inputs: Sequence[torch.Tensor], present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sum of clipped gradients [lanes, parameters], norms [lanes, n, names], losses [lanes, n]).

        `inputs` are [lanes, n, ...]; records that are not `present`, or whose gradient is not finite, count as zero.

        Guarantee: each lane's sum is one of rows, each computed from one record, of norm at most the bound of each
        group, up to the rounding of float32.
        """
        if self.lanes > 1 and self._device.type == "cpu":  # one by one: side by side they would only be moved about
            lanes = [(self._lane(lane), [part[lane : lane + 1] for part in inputs]) for lane in range(self.lanes)]
            made = [engine.clipped(some, present[lane : lane + 1]) for lane, (engine, some) in enumerate(lanes)]
            total, norms, losses = (torch.cat(pieces) for pieces in zip(*made, strict=True))
            return total, norms, losses
        parts, losses = self._parts(inputs)
        squares = {name: part.squares() for name, part in parts.items()}
        factors: Tensors = {}
        finite = torch.stack(list(squares.values())).sum(0).isfinite()
        for bound, names in self.groups:
            norms = torch.stack([squares[name] for name in names]).sum(0).sqrt()
            factor = torch.where(finite & present, bound / norms.clamp_min(bound), 0.0).float()
            factors |= dict.fromkeys(names, factor)
        if not bool(finite.all()):  # zero times NaN would be NaN
            for part in parts.values():
                part.clear(~finite)
        total = torch.cat([parts[name].total(factors[name]) for name in self.weights], 1)
        return total, torch.stack(list(squares.values()), -1).sqrt(), losses

    def _lane(self, lane: int) -> Gradients:
        """The engine of one of the networks side by side."""
        alone = copy.copy(self)
        alone.weights, alone._fixed = ({n: t[lane] for n, t in some.items()} for some in (self.weights, self._fixed))
        alone.classes = None
        return alone

    def named(self, flat: torch.Tensor) -> Tensors:
        """[lanes, parameters] by name, in the shapes of the parameters."""
        sizes = [weight[0].numel() if self.classes else weight.numel() for weight in self.weights.values()]
        pieces = flat.split(sizes, 1)
        return {
            name: piece.reshape(weight.shape)
            for (name, weight), piece in zip(self.weights.items(), pieces, strict=True)
        }

    def find_rules(self, inputs: Sequence[torch.Tensor]) -> None:
        """Which layers' gradients are had by rule: those where it gives what differentiation gives, and pays.

        Weights are moved a little for that: many networks begin with zeros that hide what they do.

        Guarantee: `inputs` are public.
        """
        trial = copy.copy(self)
        generator = torch.Generator().manual_seed(0)
        trial.weights = {
            name: weight + STIR * torch.randn(weight.shape, generator=generator).to(weight)
            for name, weight in self.weights.items()
        }
        calls: list[Call] = []
        self._parts(inputs, calls)
        seen: list[Call] = []
        trial._precision = torch.float32
        plain = {name: part.whole() for name, part in trial._parts(inputs, seen)[0].items()}
        trial.calls = tuple(seen)
        try:
            ruled = {name: part.whole() for name, part in trial._parts(inputs)[0].items()}
        except RuntimeError:  # a loss that differentiates its network keeps what goes into layers to itself
            ruled = {}
        left = {name for name in plain if name not in ruled or not _close(plain[name], ruled[name])}
        left |= {name for call in calls if not self._pays(call) for name in call.names}
        while more := {name for call in calls if left.intersection(call.names) for name in call.names} - left:
            left |= more
        self.calls = tuple(call for call in calls if not left.intersection(call.names))

    def losses(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """[lanes, n]: of each record, in the company of the others of its lane, which should make no difference."""

        def together(state: Tensors, *records: torch.Tensor) -> torch.Tensor:
            images, *rest = records
            seen = [part.repeat_interleave(self._views, 0) for part in (images, *(r for r in rest if r.ndim == 1))]
            losses = self._call(state, [*seen, *(part.flatten(0, 1) for part in rest if part.ndim > 1)])
            return losses.reshape(len(images), self._views).float().mean(1)

        with torch.no_grad():
            losses: torch.Tensor = self._over_lanes(together)(self._state(), *inputs).detach()
        return losses

    def _pays(self, call: Call) -> bool:
        """Whether a rule is faster than differentiation, as measured (`benchmarks/gradient_speed.py`)."""
        if call.kind == "linear" or self._device.type != "cpu":
            return True
        kernel, stride, *_ = call.geometry
        return math.prod(kernel) <= SPREAD * math.prod(stride)

    # -- one record ---------------------------------------------------------------------------------------

    def _parts(
        self, inputs: Sequence[torch.Tensor], seen: list[Call] | None = None
    ) -> tuple[dict[str, _Part], torch.Tensor]:
        """The gradient of each parameter for each record, in one form or the other, and losses [lanes, n].

        With `seen`, that will be the list of all layers that the loss uses.
        """
        by_rule = {name for call in self.calls for name in call.names}

        def one(state: Tensors, *record: torch.Tensor) -> Any:
            direct = {name: state[name] for name in self.weights if name not in by_rule}
            zeros = [torch.zeros(call.shape, dtype=call.dtype, device=self._device) for call in self.calls]

            def value(direct: Tensors, zeros: Sequence[torch.Tensor]) -> Any:
                now = {**state, **direct}
                expected = self.calls if seen is None else None
                with _Taps({name: now[name] for name in self.weights}, expected, zeros) as taps, self._cast():
                    losses = self._call(now, self._seen(record))
                if losses.shape != (self._views,):
                    raise ValueError(f"a loss must give one number per image, got {tuple(losses.shape)}")
                if seen is not None:
                    seen[:] = taps.calls
                elif tuple(taps.calls) != self.calls:
                    raise RuntimeError("a loss must use its layers in the same way each time")
                mean = losses.float().mean()
                return mean, (mean, taps.inputs)

            (slopes, tapped), (mean, given) = grad(value, (0, 1), has_aux=True)(direct, zeros)
            return slopes, tapped, given, mean

        with torch.no_grad():
            batched = torch.vmap(one, in_dims=(None, *(0 for _ in inputs)), randomness="error")
            slopes, tapped, given, losses = self._over_lanes(batched)(self._state(), *inputs)
        parts: dict[str, _Part] = {name: _Written(slope.detach()) for name, slope in slopes.items()}
        for call, slope, entered in zip(self.calls, tapped, given, strict=True):
            for name, part in _by_rule(call, entered.detach().float(), slope.detach().float()):
                parts[name] = parts[name].plus(part) if name in parts else part
        return {name: parts[name] for name in self.weights}, losses.detach()

    def _over_lanes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one network and its records, for all networks at once."""
        if self.classes is not None:
            return torch.vmap(function, randomness="error")

        def only(state: Tensors, *inputs: torch.Tensor) -> Any:
            return torch.utils._pytree.tree_map(lambda tensor: tensor[None], function(state, *(i[0] for i in inputs)))

        return only

    def _seen(self, record: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a loss is given of a record: as many times the image and its label as there are views, and normals."""
        image, *rest = record
        views = [image.expand(self._views, *image.shape)]
        return views + [part.expand(self._views) if part.ndim == 0 else part for part in rest]

    def _state(self) -> Tensors:
        return {**self._fixed, **self.weights}

    def _call(self, state: Tensors, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        losses: torch.Tensor = functional_call(self._whole, named, tuple(inputs))
        return losses

    def _cast(self) -> Any:
        if self._precision == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._precision, cache_enabled=False)


class _Whole(nn.Module):
    """A network with its loss, so that both see the parameters of the moment."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *inputs)


# -- a parameter's gradients, one for each record -------------------------------------------------------------


class _Written:
    """Gradients as they are, [lanes, n, *shape]."""

    def __init__(self, each: torch.Tensor) -> None:
        self.each = each.float()

    def squares(self) -> torch.Tensor:
        norms: torch.Tensor = torch.linalg.vector_norm(self.each.flatten(2), dim=2)
        return norms.double().square()

    def clear(self, bad: torch.Tensor) -> None:
        self.each = self.each.masked_fill(_like(bad, self.each), 0)

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        return (factors[:, None] @ self.each.flatten(2))[:, 0]

    def whole(self) -> torch.Tensor:
        return self.each

    def plus(self, other: _Part) -> _Part:
        return _Written(self.each + other.whole())


class _Products:
    """Gradients sum_t l_t r_t^T that are not written down: [lanes, n, t, p] and [lanes, n, t, d]."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> None:
        self.left, self.right, self.shape = left, right, shape

    def squares(self) -> torch.Tensor:
        left, right = self.left.double(), self.right.double()
        if left.shape[2] == 1:
            return left.square().sum((2, 3)) * right.square().sum((2, 3)) * (1 + CANCELLED)
        pairs = (left @ left.mT) * (right @ right.mT)
        spread = pairs.diagonal(dim1=2, dim2=3).sqrt().sum(2).square()
        return pairs.sum((2, 3)).clamp_min(0) + CANCELLED * spread

    def clear(self, bad: torch.Tensor) -> None:
        self.left, self.right = (side.masked_fill(_like(bad, side), 0) for side in (self.left, self.right))

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        left = (self.left * _like(factors, self.left)).flatten(1, 2)
        return (left.mT @ self.right.flatten(1, 2)).flatten(1)

    def whole(self) -> torch.Tensor:
        return (self.left.mT @ self.right).reshape(*self.left.shape[:2], *self.shape)

    def plus(self, other: _Part) -> _Part:
        if isinstance(other, _Products):
            left, right = torch.cat([self.left, other.left], 2), torch.cat([self.right, other.right], 2)
            return _Products(left, right, self.shape)
        return _Written(self.whole() + other.whole())


_Part = _Written | _Products


def _by_rule(call: Call, entered: torch.Tensor, slope: torch.Tensor) -> Iterator[tuple[str, _Part]]:
    """A layer's gradients, of its weight and its bias, from what entered it and the slope of what came out."""
    if call.kind == "linear":
        left, right = slope.flatten(2, -2), entered.flatten(2, -2)
        shape = torch.Size((left.shape[-1], right.shape[-1]))
        bias = left.sum(2)
    else:
        kernel = call.geometry[0]
        if call.kind == "conv":
            left, right = _positions(slope), _patches(entered, *call.geometry)
            shape = torch.Size((slope.shape[3], entered.shape[3], *kernel))
        else:  # a transposed convolution is a convolution from what comes out to what goes in
            left, right = _positions(entered), _patches(slope, *call.geometry)
            shape = torch.Size((entered.shape[3], slope.shape[3], *kernel))
        bias = slope.sum((2, 4, 5))
    places, p, d = left.shape[2], left.shape[3], right.shape[3]
    product = _Products(left, right, shape)
    yield call.weight, product if CHEAPER * places * (p + d) <= p * d else _Written(product.whole())
    if call.bias is not None:
        yield call.bias, _Written(bias)


def _positions(maps: torch.Tensor) -> torch.Tensor:
    """[lanes, n, views, channels, H, W] to [lanes, n, views H W, channels]."""
    return maps.flatten(4).mT.flatten(2, 3)


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
    strides = (*outer, row * dilation[0], column * dilation[1], row * stride[0], column * stride[1])
    patches = maps.as_strided((lanes, n, views, channels, *kernel, *across), strides)
    return patches.flatten(6).flatten(3, 5).mT.flatten(2, 3)


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


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and float((one - other).norm()) <= RULE_MARGIN * float(one.norm())


# -- what may be asked for ------------------------------------------------------------------------------------


def _state(model: nn.Module, classes: int | None) -> tuple[Tensors, Tensors]:
    """Trainable parameters, and all else that a model holds, by name and without derivatives."""
    parameters = dict(model.named_parameters())
    weights = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    fixed = {name: p.detach() for name, p in parameters.items() if not p.requires_grad}
    fixed |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    if not weights:
        raise ValueError("this model has no trainable parameters: there is nothing to take a gradient of")
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"parameter {name!r} is {tensor.dtype}; gradients are taken of float32 (see `precision`)")
    if classes is not None:
        for name, tensor in {**weights, **fixed}.items():
            if tensor.shape[:1] != (classes,):
                raise ValueError(
                    f"by class, all that a model holds must be stacked, one for each of {classes} classes; "
                    f"{name!r} is {tuple(tensor.shape)}"
                )
    return weights, fixed


def _groups(weights: Tensors, bound: float | Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """(bound, its parameters). Guarantee: each parameter is in exactly one group, each bound a plain number."""
    bounds = dict(bound) if isinstance(bound, Mapping) else {"": bound}
    for prefix, value in bounds.items():
        if not isinstance(value, int | float) or not LEAST_BOUND <= value <= MOST_BOUND:
            raise ValueError(f"a bound must be a number between 1e-9 and 1e9, got {value!r} for {prefix or 'all'}")
    members: dict[str, list[str]] = {prefix: [] for prefix in bounds}
    for name in weights:
        fitting = [prefix for prefix in bounds if not prefix or name == prefix or name.startswith(f"{prefix}.")]
        if len(fitting) != 1:
            raise ValueError(f"parameter {name!r} must be in one group, it is in {', '.join(fitting) or 'none'}")
        members[fitting[0]].append(name)
    if empty := [prefix for prefix, names in members.items() if not names]:
        raise ValueError(f"there are no trainable parameters whose names begin with {', '.join(empty)}")
    return [(float(bounds[prefix]), names) for prefix, names in members.items()]
