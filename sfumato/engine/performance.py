"""Options that make queries faster. They do not affect the guarantee if CUDA graph replay is correct."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sfumato.engine.cuda_graph import CapturedQuery
from sfumato.engine.gradients import RecordGradient, differentiate


@dataclass(frozen=True)
class Performance:
    """How to compute the vault's queries.

    - batch_size: images (per class) in memory at a time, default None: 128 on a CPU, 512 on a GPU.
    - record: capture the computation of a batch as a CUDA graph and replay it, on a GPU only, default True.
    - precision: of networks in gradients, default float32; bfloat16 on a GPU uses autocast. Clipping and sums use at
      least float32.
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
