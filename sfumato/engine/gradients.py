"""Turn a loss into a function of one record that returns its gradient in pieces, which the vault traces and clips.

Probe records decide which layers use a closed-form rule (`layers.py`): those for which the rule agrees with autograd
and is faster. Autograd differentiates all other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vjp

from sfumato.engine.layers import (
    Call,
    LayerGradient,
    LayerHooks,
    add_gradients,
    closed_form_gradients,
    flatten_gradient,
    to_parameter_order,
)
from sfumato.privacy.clipping import Groups
from sfumato.privacy.tracing import BATCH_NORM, check_same_rows

Loss = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]

MIN_BOUND, MAX_BOUND = 1e-9, 1e9  # within, squared norms of the order of the bound are float32 numbers
PERTURBATION = 0.02  # of the weights, where rules are compared with autograd
RULE_TOLERANCE = 1e-2  # relative, between a layer's gradient by its rule and by autograd, possibly in TF32
ZERO_TOLERANCE = 1e-6  # of the whole gradient: rounding error of a parameter's gradient that should be zero


@dataclass(frozen=True)
class RecordGradient:
    """The gradient of a loss as a function of one record. The vault traces and clips whatever it returns.

    - function: maps parameters and buffers by name, and a record's image, [label], [normals], to pieces.
    - groups: clipping norms and the pieces that they apply to.
    - assemble: maps the noised sum, [lanes, entries], to gradients by name.
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
    probes: Sequence[torch.Tensor],
    precision: torch.dtype,
    layer_rules: bool,
) -> RecordGradient:
    """Return the gradient of `loss` for one record.

    - classes: number of stacked networks, None for a plain network.
    - probes: public images, [labels], [normals] of a few records.
    - model, loss, bound, views, precision, layer_rules: see `GradientVault.gradient` and `Performance`.
    """
    weights, fixed = _state(model, classes)
    if precision != torch.float32 and probes[0].device.type == "cpu":
        raise ValueError("networks compute in float32 on a CPU; use a lower precision on a GPU only")
    single = {name: value[0] if classes else value for name, value in {**fixed, **weights}.items()}
    record_loss = _RecordLoss(model, loss, list(weights), views, precision, probes[0].device)
    _check_row_wise(record_loss, single, probes)
    if layer_rules:
        record_loss.calls = _choose_rules(record_loss, single, [part[0] for part in probes])
    gradients = record_loss.gradients(single, *(part[0] for part in probes))
    sizes = {name: [_size(piece) for piece in gradient.pieces] for name, gradient in gradients.items()}
    owners = [name for name, gradient in gradients.items() for _ in gradient.pieces]
    groups = [
        (value, [index for index, owner in enumerate(owners) if owner in names])
        for value, names in _groups(weights, bound)
    ]

    def pieces(state: Tensors, *record: torch.Tensor) -> list[Any]:
        return [piece for gradient in record_loss.gradients(state, *record).values() for piece in gradient.pieces]

    def assemble(flat: torch.Tensor) -> Tensors:
        sums = flat.split([sum(some) for some in sizes.values()], 1)
        named = zip(gradients.items(), sums, strict=True)
        return {
            name: to_parameter_order(own, sizes[name], gradient.columns).reshape(weights[name].shape)
            for (name, gradient), own in named
        }

    return RecordGradient(pieces, groups, assemble)


class _RecordLoss:
    """The loss of one record and its gradient, for given parameters."""

    def __init__(
        self, model: nn.Module, loss: Loss, names: list[str], views: int, precision: torch.dtype, device: torch.device
    ) -> None:
        self._module, self._names, self._views = _LossModule(model, loss), names, views
        self._precision, self._device = precision, device
        self.calls: tuple[Call, ...] = ()  # of layers that use a closed-form rule

    def losses(self, state: Tensors, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the losses of a batch."""
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        losses: torch.Tensor = functional_call(self._module, named, inputs)
        return losses

    def layers(self) -> Iterator[nn.Module]:
        """Yield the network and all its parts."""
        return self._module.modules()

    def views(self, record: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the arguments of the loss for a record: image and label repeated for each view, and normals."""
        image, *rest = record
        inputs = [image.expand(self._views, *image.shape)]
        return inputs + [part.expand(self._views) if part.ndim == 0 else part for part in rest]

    def gradients(
        self, state: Tensors, *record: torch.Tensor, seen: list[Call] | None = None
    ) -> dict[str, LayerGradient]:
        """Return the gradient of each parameter. `seen`, if given, is set to the calls of all layers."""
        ruled = {name for call in self.calls for name in call.names}
        direct = {name: state[name] for name in self._names if name not in ruled}
        zero = {kind: torch.zeros((), dtype=kind, device=self._device) for kind in {c.dtype for c in self.calls}}
        zeros = [zero[call.dtype].expand(call.shape) for call in self.calls]

        def value(direct: Tensors, zeros: Sequence[torch.Tensor]) -> Any:
            current = {**state, **direct}
            expected = self.calls if seen is None else None
            with LayerHooks({name: current[name] for name in self._names}, expected, zeros) as hooks, self._autocast():
                losses = self.losses(current, *self.views(record))
            if losses.shape != (self._views,):
                raise ValueError(f"a loss must return one number per image, got shape {tuple(losses.shape)}")
            if seen is not None:
                seen[:] = hooks.calls
            elif tuple(hooks.calls) != self.calls:
                raise RuntimeError("a loss must call its layers in the same way each time")
            return losses.float().mean(), hooks.inputs

        mean, backward, layer_inputs = vjp(value, direct, zeros, has_aux=True)  # type: ignore[misc]
        # Without create_graph, PyTorch uses fused operators; there are no second derivatives of this.
        direct_gradients, output_gradients = backward(torch.ones_like(mean), retain_graph=False, create_graph=False)
        found = {name: LayerGradient([gradient.detach()]) for name, gradient in direct_gradients.items()}
        for call, output_gradient, layer_input in zip(self.calls, output_gradients, layer_inputs, strict=True):
            for name, gradient in closed_form_gradients(call, layer_input.detach(), output_gradient.detach()):
                found[name] = add_gradients(found[name], gradient) if name in found else gradient
        return {name: found[name] for name in self._names}

    def _autocast(self) -> AbstractContextManager[Any]:
        lower = self._precision != torch.float32
        return torch.autocast(self._device.type, self._precision if lower else None, enabled=lower, cache_enabled=False)


class _LossModule(nn.Module):
    """A network and its loss in one module, so that `functional_call` replaces the parameters that both use."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *inputs)


def _check_row_wise(record_loss: _RecordLoss, state: Tensors, probes: Sequence[torch.Tensor]) -> None:
    """Raise if the loss mixes the images of a batch. For the author only: gradients are computed per record anyway."""
    with torch.no_grad(), torch.random.fork_rng():  # tracing refuses a loss that draws random numbers
        inputs = [
            torch.cat(parts)
            for parts in zip(*(record_loss.views(record) for record in zip(*probes, strict=True)), strict=True)
        ]
        together = record_loss.losses(state, *(part.clone() for part in inputs))
        alone = [record_loss.losses(state, *record_loss.views(record)) for record in zip(*probes, strict=True)]
    if together.shape != inputs[0].shape[:1]:
        raise ValueError(
            f"a loss must return one number per image, got shape {tuple(together.shape)} for {len(inputs[0])} images"
        )
    message = "this loss mixes the images of a batch: alone, an image has another loss"
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in record_loss.layers()):
        message += f". The network has {BATCH_NORM}"
    check_same_rows(torch.cat(alone), together, message)


def _choose_rules(record_loss: _RecordLoss, state: Tensors, record: Sequence[torch.Tensor]) -> tuple[Call, ...]:
    """Return the calls of layers that use a rule: those for which it agrees with autograd and is faster.

    The comparison perturbs the weights: many networks start with zeros, which would hide differences.
    """
    with torch.no_grad():
        calls: list[Call] = []
        record_loss.gradients(state, *record, seen=calls)
        perturbed = {
            name: value + PERTURBATION * _perturbation(value) if name in record_loss._names else value
            for name, value in state.items()
        }
        plain = {
            name: flatten_gradient(gradient)
            for name, gradient in record_loss.gradients(perturbed, *record, seen=[]).items()
        }
        record_loss.calls = tuple(calls)
        try:
            ruled = {
                name: flatten_gradient(gradient) for name, gradient in record_loss.gradients(perturbed, *record).items()
            }
        except RuntimeError:  # a loss that differentiates its network hides the inputs of the layers
            ruled = {}
    rounding = ZERO_TOLERANCE * math.sqrt(sum(float(each.square().sum()) for each in plain.values()))
    rejected = {
        name
        for name, each in plain.items()
        if name not in ruled or not float((each - ruled[name]).norm()) <= RULE_TOLERANCE * float(each.norm()) + rounding
    }
    rejected |= {name for call in calls if not call.is_faster(record_loss._device) for name in call.names}
    while more := {name for call in calls if rejected.intersection(call.names) for name in call.names} - rejected:
        rejected |= more
    return tuple(call for call in calls if not rejected.intersection(call.names))


def _perturbation(weight: torch.Tensor) -> torch.Tensor:
    """Return fixed numbers in [-1, 1] without a regular pattern, in the shape of the weight."""
    return torch.arange(weight.numel(), dtype=torch.float64).square().sin().to(weight).view(weight.shape)


def _size(piece: Any) -> int:
    return piece[0].shape[1] * piece[1].shape[1] if isinstance(piece, tuple) else int(piece.numel())


def _state(model: nn.Module, classes: int | None) -> tuple[Tensors, Tensors]:
    """Return detached trainable parameters, and detached other parameters and buffers, by name."""
    parameters = dict(model.named_parameters())
    weights = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    fixed = {name: p.detach() for name, p in parameters.items() if not p.requires_grad}
    fixed |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    if not weights:
        raise ValueError("this model has no trainable parameters to differentiate; set requires_grad")
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"parameter {name!r} is {tensor.dtype}; use float32 parameters, and `precision` to cast")
    if classes is not None:
        for name, tensor in {**weights, **fixed}.items():
            if tensor.shape[:1] != (classes,):
                raise ValueError(
                    f"with by_class, all parameters and buffers must be stacked, one for each of {classes} classes; "
                    f"{name!r} has shape {tuple(tensor.shape)}"
                )
    return weights, fixed


def _groups(weights: Tensors, bound: float | Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """Return (clipping norm, names of its parameters); each parameter is in exactly one group."""
    bounds = dict(bound) if isinstance(bound, Mapping) else {"": bound}
    for prefix, value in bounds.items():
        if not isinstance(value, int | float) or not MIN_BOUND <= value <= MAX_BOUND:
            raise ValueError(f"a bound must be a number between 1e-9 and 1e9, got {value!r} for {prefix or 'all'}")
    members: dict[str, list[str]] = {prefix: [] for prefix in bounds}
    for name in weights:
        fitting = [prefix for prefix in bounds if not prefix or name == prefix or name.startswith(f"{prefix}.")]
        if len(fitting) != 1:
            found = ", ".join(prefix or "all" for prefix in fitting) or "none"
            raise ValueError(f"parameter {name!r} must be in one group, it is in {found}")
        members[fitting[0]].append(name)
    if empty := [prefix for prefix, names in members.items() if not names]:
        raise ValueError(f"there are no trainable parameters whose names begin with {', '.join(empty)}")
    return [(float(bounds[prefix]), names) for prefix, names in members.items()]
