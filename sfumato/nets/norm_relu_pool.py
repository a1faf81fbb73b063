"""Fused instance norm, ReLU and 2×2 average pooling: the memory-bound operations of a ConvNet.

On a GPU with Triton one kernel reads each map once and writes a quarter of it. Elsewhere PyTorch operations give the
same result up to rounding.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

EPS = 1e-5
MAPS_PER_PROGRAM = 4
MAX_PIXELS = 64 * 64  # of a map

# Triton needs a C compiler on the host.
kernels: Any = None
if importlib.util.find_spec("triton") and any(shutil.which(name) for name in ("cc", "gcc", "clang")):
    kernels = importlib.import_module("sfumato.nets.triton_kernels")


class NormReluPool(nn.Module):
    """Layer with a scale and a shift per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return norm_relu_pool(maps, self.weight, self.bias)


def norm_relu_pool(maps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `avg_pool2d(relu(instance_norm(maps) * weight + bias), 2)` for maps [N, C, H, W]."""
    height, width = maps.shape[2:]
    traced = isinstance(maps, FakeTensor)  # the vault traces features, which must consist of PyTorch operators
    fits = maps.is_cuda and height % 2 == 0 and width % 2 == 0 and height * width <= MAX_PIXELS
    if kernels is not None and fits and not traced:
        pooled: torch.Tensor = _Fused.apply(maps, weight, bias)  # type: ignore[no-untyped-call]
        return pooled
    normalised = functional.group_norm(maps, maps.shape[1], weight, bias, EPS)
    return functional.avg_pool2d(functional.relu(normalised), 2)


class _Fused(torch.autograd.Function):
    """The Triton kernels with first derivatives and a rule for `torch.vmap` over images."""

    @staticmethod
    def forward(maps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        maps = maps.contiguous()
        n, c, height, width = maps.shape
        pooled = maps.new_empty(n, c, height // 2, width // 2)
        kernels.forward[(-(-n * c // MAPS_PER_PROGRAM),)](maps, weight, bias, pooled, n * c, c, *_sizes(height, width))
        return pooled

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maps, weight, bias = ctx.saved_tensors
        maps = maps.contiguous()
        n, c, height, width = maps.shape
        maps_grad = torch.empty_like(maps)
        per_map = maps.new_empty(2, n, c, dtype=torch.float32)
        kernels.backward[(-(-n * c // MAPS_PER_PROGRAM),)](
            maps, weight, bias, gradient.contiguous(), maps_grad, *per_map, n * c, c, *_sizes(height, width)
        )
        weight_grad, bias_grad = per_map.sum(1).to(weight.dtype)
        return maps_grad, weight_grad, bias_grad

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[int | None, ...],
        maps: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:
        """Flatten the mapped dimension into the batch."""
        if in_dims[0] is None or in_dims[1:] != (None, None):
            raise RuntimeError("norm_relu_pool supports vmap over maps only, not over weight and bias")
        maps = maps.movedim(in_dims[0], 0)
        pooled: torch.Tensor = _Fused.apply(maps.flatten(0, 1), weight, bias)  # type: ignore[no-untyped-call]
        return pooled.unflatten(0, maps.shape[:2]), 0


def _sizes(height: int, width: int) -> tuple[Any, ...]:
    """Return the kernel constants: height, width, pools per map rounded up to a power of two, maps per program, eps."""
    return height, width, 1 << (height * width // 4 - 1).bit_length(), MAPS_PER_PROGRAM, EPS
