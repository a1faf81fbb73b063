"""A loss as a function of one record that gives its gradient in pieces: what `Vault.gradient` traces and clips.

Which layers go by a closed-form rule (`layers.py`) is found out on public images: those where the rule gives what
differentiation gives, and is faster. All other parameters are differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vjp

from sfumato.engine.layers import Call, Part, Taps, added, assembled, by_rule, whole
from sfumato.privacy.clipping import Groups
from sfumato.privacy.tracing import same_rows

Loss = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]

LEAST_BOUND, MOST_BOUND = 1e-9, 1e9  # squares of what matters then fit into float32
STIR = 0.02
RULE_MARGIN = 1e-2  # relative, between a layer's gradient by its rule and by differentiation (in TF32, maybe)
ROUNDING = 1e-6  # of the whole gradient: a parameter's may be zero but for that


@dataclass(frozen=True)
class Differentiated:
    """A loss as a function of one record: whatever it gives, the vault traces and clips it.

    - function: of parameters and buffers by name, and a record's image, label, normals, to pieces.
    - groups: bounds, and the pieces that are clipped to each.
    - assemble: from the noised sum, [lanes, numbers], to gradients by name.
    """

    function: Callable[..., Any]
    groups: Groups
    assemble: Callable[[torch.Tensor], Tensors]


def differentiate(
    model: nn.Module,
    loss: Loss,
    bound: float | Mapping[str, float],
    classes: int | None,
    views: int,
    tried: Sequence[torch.Tensor],
    precision: torch.dtype,
    layer_rules: bool,
) -> Differentiated:
    """Return the gradient of `loss` for one record. `classes`: how many networks are stacked, None for a plain one."""
    weights, fixed = _state(model, classes)
    if precision != torch.float32 and tried[0].device.type == "cpu":
        raise ValueError("networks compute in float32 on a CPU; lower precision is for a GPU")
    single = {name: value[0] if classes else value for name, value in {**fixed, **weights}.items()}
    one = _OneRecord(model, loss, list(weights), views, precision, tried[0].device)
    _check_row_wise(one, single, tried)
    if layer_rules:
        one.calls = _rules(one, single, [part[0] for part in tried])
    parts = one.parts(single, *(part[0] for part in tried))
    sizes = {name: [_size(piece) for piece in part.pieces] for name, part in parts.items()}
    owners = [name for name, part in parts.items() for _ in part.pieces]
    groups = [
        (value, [place for place, owner in enumerate(owners) if owner in names])
        for value, names in _groups(weights, bound)
    ]

    def pieces(state: Tensors, *record: torch.Tensor) -> list[Any]:
        return [piece for part in one.parts(state, *record).values() for piece in part.pieces]

    def assemble(flat: torch.Tensor) -> Tensors:
        each = flat.split([sum(some) for some in sizes.values()], 1)
        named = zip(parts.items(), each, strict=True)
        return {
            name: assembled(own, sizes[name], part.columns).reshape(weights[name].shape) for (name, part), own in named
        }

    return Differentiated(pieces, groups, assemble)


class _OneRecord:
    """The loss of one record and its gradient, for given parameters."""

    def __init__(
        self, model: nn.Module, loss: Loss, names: list[str], views: int, precision: torch.dtype, device: torch.device
    ) -> None:
        self._whole, self._names, self._views = _Whole(model, loss), names, views
        self._precision, self._device = precision, device
        self.calls: tuple[Call, ...] = ()  # to layers whose gradients go by rule

    def losses(self, state: Tensors, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the losses of a batch."""
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        losses: torch.Tensor = functional_call(self._whole, named, inputs)
        return losses

    def views(self, record: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a loss is given of a record: image and label as often as there are views, and normals."""
        image, *rest = record
        seen = [image.expand(self._views, *image.shape)]
        return seen + [part.expand(self._views) if part.ndim == 0 else part for part in rest]

    def parts(self, state: Tensors, *record: torch.Tensor, seen: list[Call] | None = None) -> dict[str, Part]:
        """Return the gradient of each parameter. With `seen`, that becomes the list of all layers that are used."""
        ruled = {name for call in self.calls for name in call.names}
        direct = {name: state[name] for name in self._names if name not in ruled}
        zero = {kind: torch.zeros((), dtype=kind, device=self._device) for kind in {c.dtype for c in self.calls}}
        zeros = [zero[call.dtype].expand(call.shape) for call in self.calls]

        def value(direct: Tensors, zeros: Sequence[torch.Tensor]) -> Any:
            now = {**state, **direct}
            expected = self.calls if seen is None else None
            with Taps({name: now[name] for name in self._names}, expected, zeros) as taps, self._cast():
                losses = self.losses(now, *self.views(record))
            if losses.shape != (self._views,):
                raise ValueError(f"a loss must give one number per image, got {tuple(losses.shape)}")
            if seen is not None:
                seen[:] = taps.calls
            elif tuple(taps.calls) != self.calls:
                raise RuntimeError("a loss must use its layers in the same way each time")
            return losses.float().mean(), taps.inputs

        mean, back, entered = vjp(value, direct, zeros, has_aux=True)  # type: ignore[misc]
        # Fused operators: nobody differentiates this again.
        slopes, tapped = back(torch.ones_like(mean), retain_graph=False, create_graph=False)
        found = {name: Part([slope.detach()]) for name, slope in slopes.items()}
        for call, slope, given in zip(self.calls, tapped, entered, strict=True):
            for name, part in by_rule(call, given.detach(), slope.detach()):
                found[name] = added(found[name], part) if name in found else part
        return {name: found[name] for name in self._names}

    def _cast(self) -> AbstractContextManager[Any]:
        lower = self._precision != torch.float32
        return torch.autocast(self._device.type, self._precision if lower else None, enabled=lower, cache_enabled=False)


class _Whole(nn.Module):
    """A network with its loss, so that both see the parameters of the moment."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *inputs)


def _check_row_wise(one: _OneRecord, state: Tensors, tried: Sequence[torch.Tensor]) -> None:
    """Tell an author whose loss mixes the images of a batch; gradients are taken one by one anyway."""
    with torch.no_grad(), torch.random.fork_rng():  # a loss that draws is refused when it is traced
        seen = [
            torch.cat(parts) for parts in zip(*(one.views(record) for record in zip(*tried, strict=True)), strict=True)
        ]
        together = one.losses(state, *(part.clone() for part in seen))
        alone = [one.losses(state, *one.views(record)) for record in zip(*tried, strict=True)]
    if together.shape != seen[0].shape[:1]:
        raise ValueError(
            f"a loss must give one number per image, got {tuple(together.shape)} for {len(seen[0])} images"
        )
    message = "this loss mixes the images of a batch: alone, an image has another loss"
    same_rows(torch.cat(alone), together, message)


def _rules(one: _OneRecord, state: Tensors, record: Sequence[torch.Tensor]) -> tuple[Call, ...]:
    """Return the layers whose gradients go by rule: those where it gives what differentiation gives, and pays.

    Weights are moved a little for that: many networks begin with zeros that hide what they do.
    """
    with torch.no_grad():
        calls: list[Call] = []
        one.parts(state, *record, seen=calls)
        moved = {name: value + STIR * _stir(value) if name in one._names else value for name, value in state.items()}
        plain = {name: whole(part) for name, part in one.parts(moved, *record, seen=[]).items()}
        one.calls = tuple(calls)
        try:
            ruled = {name: whole(part) for name, part in one.parts(moved, *record).items()}
        except RuntimeError:  # a loss that differentiates its network keeps what goes into layers to itself
            ruled = {}
    nothing = ROUNDING * math.sqrt(sum(float(each.square().sum()) for each in plain.values()))
    left = {
        name
        for name, each in plain.items()
        if name not in ruled or not float((each - ruled[name]).norm()) <= RULE_MARGIN * float(each.norm()) + nothing
    }
    left |= {name for call in calls if not call.pays(one._device) for name in call.names}
    while more := {name for call in calls if left.intersection(call.names) for name in call.names} - left:
        left |= more
    return tuple(call for call in calls if not left.intersection(call.names))


def _stir(weight: torch.Tensor) -> torch.Tensor:
    """Return fixed numbers without a pattern that a weight could have."""
    return torch.arange(weight.numel(), dtype=torch.float64).square().sin().to(weight).view(weight.shape)


def _size(piece: Any) -> int:
    return piece[0].shape[1] * piece[1].shape[1] if isinstance(piece, tuple) else int(piece.numel())


def _state(model: nn.Module, classes: int | None) -> tuple[Tensors, Tensors]:
    """Return trainable parameters, and all else that a model holds, by name and without derivatives."""
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
    """Return (bound, its parameters): each parameter is in exactly one group, each bound a plain number."""
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
