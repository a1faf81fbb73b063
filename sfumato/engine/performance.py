"""One object with all that makes queries faster and nothing that could change the guarantee."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sfumato.engine.gradients import Differentiated, differentiate
from sfumato.engine.recording import Recorded


@dataclass(frozen=True)
class Performance:
    """How to compute what the vault asks for.

    - batch_size: images (of each class) in memory at a time; default: 128 on a CPU, 512 on a GPU.
    - record: on a GPU, capture the work on a batch as a CUDA graph and replay it.
    - precision: of networks in gradients; bfloat16 on a GPU by autocast. Clipping and sums have float32 at least.
    - layer_rules: closed-form per-example gradients of linear and convolution layers.
    """

    batch_size: int | None = None
    record: bool = True
    precision: torch.dtype = torch.float32
    layer_rules: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be a number of images, got {self.batch_size}")

    def differentiate(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        bound: float | Mapping[str, float],
        classes: int | None,
        views: int,
        tried: Sequence[torch.Tensor],
    ) -> Differentiated:
        """Return the loss's gradient as a function of one record (`Vault.gradient`)."""
        return differentiate(model, loss, bound, classes, views, tried, self.precision, self.layer_rules)

    def accelerate(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the same function of a batch, captured as a CUDA graph where its inputs are on a GPU."""
        return Recorded(function) if self.record else function
