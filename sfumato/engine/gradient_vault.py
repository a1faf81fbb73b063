"""The vault with DP-SGD's gradient query. The vault traces the gradient, runs it per record and clips it.

`Performance` makes queries faster. It does not affect the guarantee if CUDA graph replay is correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfumato.engine.cuda_graph import CapturedQuery
from sfumato.engine.gradients import RecordGradient, differentiate
from sfumato.privacy import Vault
from sfumato.privacy.tracing import probe_records


@dataclass(frozen=True)
class Performance:
    """How to compute the vault's queries.

    - batch_size: images (per class) in memory at a time, default None: 128 on a CPU, 512 on a GPU.
    - record: capture the computation of a batch as a CUDA graph and replay it, on a GPU only, default True.
    - precision: dtype of networks in `gradient`, default float32; bfloat16 on a GPU uses autocast. Clipping and sums
      use at least float32.
    - layer_rules: use closed-form per-example gradients of linear and convolution layers, default True.
    """

    batch_size: int | None = None
    record: bool = True
    precision: torch.dtype = torch.float32
    layer_rules: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    def differentiate(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        bound: float | Mapping[str, float],
        classes: int | None,
        views: int,
        probes: Sequence[torch.Tensor],
    ) -> RecordGradient:
        """Return the gradient of the loss as a function of one record, for `GradientVault.gradient`."""
        return differentiate(model, loss, bound, classes, views, probes, self.precision, self.layer_rules)

    def accelerate(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function of a batch with the same results, captured as a CUDA graph for inputs on a GPU."""
        return CapturedQuery(function) if self.record else function


class GradientVault(Vault):
    """`privacy.Vault` with `gradient`, the DP-SGD query on top of `vectors`."""

    def gradient(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        *,
        release: str,
        bound: float | Mapping[str, float],
        by_class: bool = False,
        with_labels: bool = False,
        views: int = 1,
        draws: int = 0,
        performance: Performance | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the noised sum of clipped per-example gradients, by parameter name.

        The caller divides by a public number and takes the optimiser step.

        - model: its parameters with `requires_grad` are differentiated.
        - loss: `loss(model, images, [labels], [normals])` returns one number per image. Traced once per model and loss;
          afterwards only the values of parameters and buffers may change.
        - release: name in the plan.
        - bound: L2 clipping norm of the gradient, or one norm per group of parameters, by name prefix
          (`{"encoder": 1.0, "flow": 0.1}`).
        - by_class: parameters are stacked, [classes, ...] (`nets/stacked.py`). An image is evaluated by, and adds to,
          the network of its class; the loss receives that network. Default False.
        - with_labels: whether the loss takes labels, default False.
        - views: number of evaluations per image, default 1; the gradient of their mean is clipped.
        - draws: standard normal numbers per evaluation, passed as `normals` [images, draws], default 0.
        - performance: how to compute this query, default: the vault's.
        """
        if views < 1 or draws < 0 or (views > 1 and not draws):
            raise ValueError(f"{views} views with {draws} draws: several views need draws, or they would be equal")
        chosen: Performance = performance or self._performance or Performance()
        classes, normals = len(self.classes) if by_class else None, (views, draws) if draws else ()

        def differentiate() -> Any:
            probes = self._probes(with_labels) + ([probe_records(normals, self.device)] if normals else [])
            return chosen.differentiate(model, loss, bound, classes, views, probes)

        parameters = [(name, value.shape, value.requires_grad) for name, value in model.named_parameters()]
        key = [chosen, str(bound), classes, with_labels, normals, parameters]
        record_gradient = self._cached(f"{release}, differentiated", (model, loss), key, differentiate)
        noised = self.vectors(
            record_gradient.function,
            {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())},
            release=release,
            groups=record_gradient.groups,
            by_class=by_class,
            with_labels=with_labels,
            normals=normals,
            performance=chosen,
        )
        gradients: dict[str, torch.Tensor] = record_gradient.assemble(noised)
        return gradients
