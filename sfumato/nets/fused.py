"""Instance norm, ReLU and 2×2 average pooling in one pass: the memory-bound half of a ConvNet.

On a GPU with Triton each map is read once and a quarter of it written; elsewhere PyTorch's own operations do it. Both
give the same numbers up to rounding.
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
MAPS = 4  # in one program
LARGEST = 64 * 64  # pixels of a map

# Triton compiles its launchers with the host's compiler.
kernels: Any = None
if importlib.util.find_spec("triton") and any(shutil.which(name) for name in ("cc", "gcc", "clang")):
    kernels = importlib.import_module("sfumato.nets.kernels")


class NormReluPool(nn.Module):
    """A layer of it, with a scale and a shift per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return norm_relu_pool(maps, self.weight, self.bias)


def norm_relu_pool(maps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`avg_pool2d(relu(instance_norm(maps) * weight + bias), 2)` for [N, C, H, W]."""
    height, width = maps.shape[2:]
    traced = isinstance(maps, FakeTensor)  # a private feature is made of PyTorch's own operators
    fits = maps.is_cuda and height % 2 == 0 and width % 2 == 0 and height * width <= LARGEST
    if kernels is not None and fits and not traced:
        pooled: torch.Tensor = _Fused.apply(maps, weight, bias)  # type: ignore[no-untyped-call]
        return pooled
    normal = functional.group_norm(maps, maps.shape[1], weight, bias, EPS)
    return functional.avg_pool2d(functional.relu(normal), 2)


class _Fused(torch.autograd.Function):
    """The kernels, differentiable once and for one image at a time."""

    @staticmethod
    def forward(maps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        maps = maps.contiguous()
        n, c, height, width = maps.shape
        pooled = maps.new_empty(n, c, height // 2, width // 2)
        kernels.forward[(-(-n * c // MAPS),)](maps, weight, bias, pooled, n * c, c, *_sizes(height, width))
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
        out = torch.empty_like(maps)
        by_map = maps.new_empty(2, n, c, dtype=torch.float32)
        kernels.backward[(-(-n * c // MAPS),)](
            maps, weight, bias, gradient.contiguous(), out, by_map[0], by_map[1], n * c, c, *_sizes(height, width)
        )
        of_weight, of_bias = by_map.sum(1).to(weight.dtype)
        return out, of_weight, of_bias

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[int | None, ...],
        maps: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:
        """Under `torch.vmap` over images: one batch of them all."""
        if in_dims[0] is None or in_dims[1:] != (None, None):
            raise RuntimeError("maps may be mapped over, scales and shifts may not")
        maps = maps.movedim(in_dims[0], 0)
        pooled: torch.Tensor = _Fused.apply(maps.flatten(0, 1), weight, bias)  # type: ignore[no-untyped-call]
        return pooled.unflatten(0, maps.shape[:2]), 0


def _sizes(height: int, width: int) -> tuple[Any, ...]:
    """Constants of the kernels: image, the power of two that holds a quarter of it, maps per program, epsilon."""
    return height, width, 1 << (height * width // 4 - 1).bit_length(), MAPS, EPS
