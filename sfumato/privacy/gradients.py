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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call, vjp

from sfumato.privacy.layers import Call, Part, Taps, Written, by_rule
from sfumato.privacy.rows import MARGIN, PLACE_MARGIN, REPEAT_MARGIN, Watched, failed, kind_of

if TYPE_CHECKING:
    from sfumato.privacy.recording import Recorded

Loss = Callable[..., torch.Tensor]
Tensors = dict[str, torch.Tensor]

COARSE = 5  # times larger margins for rounding where a network computes with less than float32
MOST_TIMES = 1e30  # a bound: a longer gradient counts as zero, since the factor that clips it is no plain float32
LEAST_BOUND, MOST_BOUND = 1e-9, 1e9  # squares of what matters then fit into float32
STIR = 0.02
RULE_MARGIN = 1e-2  # relative, between a layer's gradient by its rule and by differentiation (in TF32, maybe)
ROUNDING = 1e-6  # of the whole gradient: a parameter's may be zero but for that
SPREAD = 4  # on a CPU, patches may take so many times the memory of the maps; else `vmap` has the faster way


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
        self._apart = device.type == "cpu"  # lanes one by one: side by side they would only be moved about
        self.model, self.loss, self._whole = model, loss, _Whole(model, loss)
        self.calls: tuple[Call, ...] = ()  # to layers whose gradients are had by rule
        self.recorded: Recorded | None = None
        self.held: list[torch.Tensor] | None = None  # what a loss reads beside images and parameters, if asked for

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
        return PLACE_MARGIN * self._coarseness

    @property
    def _coarseness(self) -> int:
        return 1 if self._precision == torch.float32 else COARSE

    def rounding(self, records: int) -> float:
        """Of a bound: by which float32 sums over so many records may differ beyond what the records do.

        Batches are added up in float64. In a batch, errors of 2^-24 of sums of at most `records` bounds come
        `records` times, at random; a record more changes two batches, its own and that of the record it displaces.
        """
        return 2 * math.sqrt(records) * records * 2.0**-24

    @property
    def radius(self) -> float:
        """By how much a record moves the clipped gradients of all groups together."""
        return math.sqrt(math.fsum(bound**2 for bound, _ in self.groups))

    @property
    def structure(self) -> tuple[Any, ...]:
        """All that rules depend on, but for values."""
        shapes = tuple((name, tuple(weight.shape)) for name, weight in self.weights.items())
        loss = getattr(self.loss, "__func__", self.loss)
        code = getattr(loss, "__code__", type(loss))  # the same for a lambda that is written in a loop
        return shapes, type(self._whole.model), code, self.classes, self._views, self._precision

    @property
    def frozen(self) -> tuple[Any, ...]:
        """What a recording has taken for good: the loss, bounds, rules, and where in memory the network is."""
        loss = self.loss
        which = id(getattr(loss, "__func__", loss)), id(getattr(loss, "__self__", None)), id(self.model)
        bounds = tuple((bound, *names) for bound, names in self.groups)
        return which, bounds, self.calls, tuple((t.data_ptr(), t.stride()) for t in self.state().values())

    def try_out(self, inputs: Sequence[torch.Tensor]) -> None:
        """Finds rules for a loss that is new, and tells its author of mistakes: as `Rows._row_shape` does for features.

        Guarantee: `inputs` are public.
        """
        there = torch.ones(inputs[0].shape[:2], dtype=torch.bool, device=self._device)
        try:
            self._find_rules(inputs)
            (_, norms, alone), (_, same, _) = (self.clipped(inputs, there) for _ in range(2))
            moved = self.clipped([part.flip(1) for part in inputs], there)[1].flip(1)
            together = self._together(inputs)
        except RuntimeError as error:
            raise ValueError(
                "this loss cannot be taken of images one by one (batch norm in training mode, dropout or other "
                f"randomness, a decision that depends on pixels, a tensor kept from an earlier call?): {error}"
            ) from None
        if not (norms.isfinite().all() and alone.isfinite().all()):
            raise ValueError("this loss has a NaN or infinity on random images; it cannot be checked")
        largest, margin = float(norms.max()), MARGIN * self._coarseness
        if not torch.allclose(norms, same, 0.0, REPEAT_MARGIN * self._coarseness * largest):
            raise ValueError(
                "this loss gives another gradient when it is asked again: it counts its calls, or a network in it is "
                "in training mode. How often it is called depends on how many images there are, so that must not show"
            )
        if not torch.allclose(alone, together, margin, margin * float(alone.abs().max())):
            raise ValueError(
                "this loss mixes the images of a batch: alone, an image has another loss. Gradients are taken one by "
                "one here, so that one image's influence is bounded"
            )
        if float((norms - moved).abs().max()) > self.margin * largest:
            raise ValueError("this loss makes rounding large: an image's gradient depends on its place in a batch")

    def sum(self, batches: Iterable[tuple[Sequence[torch.Tensor], torch.Tensor, int]]) -> torch.Tensor:
        """The sum of clipped gradients, [lanes, parameters], float64. A batch: inputs, who is there, a public place.

        Guarantee: that of `clipped`. What a loss says when it fails is not passed on: it could hold pixels. The image
        at the public place shows a loss that changes from call to call.
        """
        total = torch.zeros(self.lanes, self.parameters, dtype=torch.float64, device=self._device)
        changed = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.recorded is not None and self.recorded.groups != self.groups:
            raise RuntimeError("a recording clips to other bounds than are asked for")
        first, failure = None, ""
        steady = False
        try:
            for inputs, present, place in batches:
                part, norms, losses = (self.recorded or self.clipped)(inputs, present)
                total += part
                witness = norms[:, place], losses[:, place].double()
                first = witness if first is None else first
                for now, then in zip(witness, first, strict=True):  # each by its own scale
                    changed = torch.maximum(changed, (now - then).abs().max() / then.abs().max().clamp_min(1e-30))
            steady = bool(changed <= self.margin)  # a device tells of what failed on it when it is waited for: here
        except Exception as error:
            failure = kind_of(error)
        if failure:  # raised here, where the error is forgotten: it would be kept as the context otherwise
            raise failed("the loss", failure)
        if not steady:  # and nothing has left yet
            raise RuntimeError(
                "the loss gave a public image another gradient in a later batch: it changes from call to call, and how "
                "often it is called depends on how many images there are. What was paid for this sum is spent"
            )
        return total

    def clipped(
        self, inputs: Sequence[torch.Tensor], present: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(sum of clipped gradients [lanes, parameters], norms [lanes, n, names], losses [lanes, n]).

        `inputs` are [lanes, n, ...]; records that are not `present`, or whose gradient is not finite or out of all
        proportion to its bound, count as zero.

        Guarantee: each lane's sum is one of rows, each computed from one record, of norm at most the bound of each
        group, up to the rounding of float32.
        """
        if self.lanes > 1 and self._apart:
            made = [
                self._lane(lane).clipped(_longer(inputs, lane), *_longer([present], lane)) for lane in range(self.lanes)
            ]
            kept = [
                (total, norms[:, : present.shape[1]], losses[:, : present.shape[1]]) for total, norms, losses in made
            ]
            total, norms, losses = (torch.cat(parts) for parts in zip(*kept, strict=True))
            return total, norms, losses
        parts, losses = self._parts(inputs)
        with _full_precision(self._device):
            total, squares = self._clipped(parts, present)
        return total, squares.sqrt(), losses

    def _clipped(self, parts: dict[str, Part], present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = {name: part.squares() for name, part in parts.items()}
        factors: Tensors = {}
        sizes = [torch.stack([squares[name] for name in names]).sum(0).sqrt() for _, names in self.groups]
        finite = torch.stack([size <= MOST_TIMES * bound for size, (bound, _) in zip(sizes, self.groups, strict=True)])
        finite = finite.all(0)  # what is NaN is not
        for size, (bound, names) in zip(sizes, self.groups, strict=True):
            factor = torch.where(finite & present, bound / size.clamp_min(bound), 0.0).float()
            factors |= dict.fromkeys(names, factor)
        recording = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if recording or not bool(finite.all()):  # zero times NaN would be NaN
            for part in parts.values():
                part.clear(~finite)
        total = torch.cat([parts[name].total(factors[name]) for name in self.weights], 1)
        return total, torch.stack(list(squares.values()), -1)

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

    def _find_rules(self, inputs: Sequence[torch.Tensor]) -> None:
        """Which layers' gradients are had by rule: those where it gives what differentiation gives, and pays.

        Weights are moved a little for that: many networks begin with zeros that hide what they do.

        Guarantee: `inputs` are public.
        """
        alone = self if self.classes is None else self._lane(0)
        inputs, trial = [part[:1] for part in inputs], copy.copy(alone)
        trial.weights = {name: weight + STIR * _stir(weight) for name, weight in alone.weights.items()}
        calls: list[Call] = []
        alone._parts(inputs, calls)
        seen: list[Call] = []
        trial._precision = torch.float32
        plain = {name: part.whole() for name, part in trial._parts(inputs, seen)[0].items()}
        trial.calls = tuple(seen)
        try:
            ruled = {name: part.whole() for name, part in trial._parts(inputs)[0].items()}
        except RuntimeError:  # a loss that differentiates its network keeps what goes into layers to itself
            ruled = {}
        nothing = ROUNDING * math.sqrt(sum(float(each.square().sum()) for each in plain.values()))
        left = {
            name
            for name, each in plain.items()
            if name not in ruled or not float((each - ruled[name]).norm()) <= RULE_MARGIN * float(each.norm()) + nothing
        }
        left |= {name for call in calls if not self._pays(call) for name in call.names}
        while more := {name for call in calls if left.intersection(call.names) for name in call.names} - left:
            left |= more
        self.calls = tuple(call for call in calls if not left.intersection(call.names))

    def _together(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """[lanes, n]: of each record, in the company of the others of its lane, which should make no difference."""

        def together(state: Tensors, *records: torch.Tensor) -> torch.Tensor:
            images, *rest = records
            seen = [part.repeat_interleave(self._views, 0) for part in (images, *(r for r in rest if r.ndim == 1))]
            losses = self._call(state, [*seen, *(part.flatten(0, 1) for part in rest if part.ndim > 1)])
            if losses.shape != (self._views * len(images),):
                raise ValueError(f"a loss must give one number per image, got {tuple(losses.shape)}")
            return losses.unflatten(0, (len(images), self._views)).float().mean(1)  # type: ignore[no-any-return]

        with torch.no_grad(), self._cast():
            losses: torch.Tensor = self._over_lanes(together)(self.state(), *inputs).detach()
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
    ) -> tuple[dict[str, Part], torch.Tensor]:
        """The gradient of each parameter for each record, in one form or the other, and losses [lanes, n].

        With `seen`, that will be the list of all layers that the loss uses.
        """
        ruled = {name for call in self.calls for name in call.names}

        def one(state: Tensors, *record: torch.Tensor) -> Any:
            direct = {name: state[name] for name in self.weights if name not in ruled}
            zero = {kind: torch.zeros((), dtype=kind, device=self._device) for kind in {c.dtype for c in self.calls}}
            zeros = [zero[call.dtype].expand(call.shape) for call in self.calls]

            def value(direct: Tensors, zeros: Sequence[torch.Tensor]) -> Any:
                now = {**state, **direct}
                expected = self.calls if seen is None else None
                with Taps({name: now[name] for name in self.weights}, expected, zeros) as taps, self._cast():
                    losses = self._call(now, self._seen(record))
                if losses.shape != (self._views,):
                    raise ValueError(f"a loss must give one number per image, got {tuple(losses.shape)}")
                if seen is not None:
                    seen[:] = taps.calls
                elif tuple(taps.calls) != self.calls:
                    raise RuntimeError("a loss must use its layers in the same way each time")
                return losses.float().mean(), taps.inputs

            mean, back, given = vjp(value, direct, zeros, has_aux=True)  # type: ignore[misc]
            # Fused operations, for nobody differentiates this again; a CPU has none for mixed precision.
            unfused = self._precision != torch.float32 and self._device.type == "cpu"
            slopes, tapped = back(torch.ones_like(mean), retain_graph=unfused, create_graph=unfused)
            return slopes, tapped, given, mean

        with torch.no_grad(), Watched(self.held), _repeatable(self._device):
            batched = torch.vmap(one, in_dims=(None, *(0 for _ in inputs)), randomness="error")
            slopes, tapped, given, losses = self._over_lanes(batched)(self.state(), *inputs)
        parts: dict[str, Part] = {name: Written(slope.detach()) for name, slope in slopes.items()}
        with _precision(self._device, "high" if torch.backends.cudnn.allow_tf32 else "highest"):
            for call, slope, entered in zip(self.calls, tapped, given, strict=True):
                for name, part in by_rule(call, entered.detach(), slope.detach()):
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

    def state(self) -> Tensors:
        """All that the network holds, by name."""
        return {**self._fixed, **self.weights}

    def _call(self, state: Tensors, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        losses: torch.Tensor = functional_call(self._whole, named, tuple(inputs))
        return losses

    def _cast(self) -> Any:
        lower = self._precision != torch.float32
        return torch.autocast(self._device.type, self._precision if lower else None, enabled=lower, cache_enabled=False)


class _Whole(nn.Module):
    """A network with its loss, so that both see the parameters of the moment."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model, *inputs)


def _stir(weight: torch.Tensor) -> torch.Tensor:
    """Fixed numbers without a pattern that a weight could have."""
    return torch.arange(weight.numel(), dtype=torch.float64).square().sin().to(weight).view(weight.shape)


def _full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Matrix products of float32 as such, whatever the user has chosen for networks, or runs this under."""
    return _precision(device, "highest")


@contextmanager
def _precision(device: torch.device, precision: str) -> Iterator[None]:
    """Matrix products of float32 as such ("highest") or, on a GPU, as convolutions are by default ("high": TF32)."""
    with torch.autocast(device.type, enabled=False):
        try:
            chosen = torch.get_float32_matmul_precision()
        except RuntimeError:  # it was chosen by the newer way, which does not go with this one
            with _newer("ieee" if precision == "highest" else "tf32"):
                yield
            return
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(chosen)


@contextmanager
def _newer(precision: str) -> Iterator[None]:
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            backend.fp32_precision = was


def _repeatable(device: torch.device) -> AbstractContextManager[None]:
    """Convolutions whose derivatives come out the same each time."""
    if device.type != "cuda":
        return nullcontext()
    kept = torch.backends.cudnn
    return kept.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=kept.allow_tf32)


def _longer(tensors: Sequence[torch.Tensor], lane: int) -> list[torch.Tensor]:
    """What is a lane's, with some zeros after it: lanes have other sizes, so that no tensor fits two in a row."""
    chosen = [tensor[lane : lane + 1] for tensor in tensors]
    return [torch.cat([part, part.new_zeros(1, lane % 3 + 1, *part.shape[2:])], 1) for part in chosen]


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
