"""Fused instance norm, ReLU and pooling: agreement with separate operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sfumato.nets.norm_relu_pool import NormReluPool, kernels, norm_relu_pool


@pytest.mark.parametrize("shape", [(3, 5, 8, 8), (2, 3, 6, 10), (2, 3, 7, 9)])
def test_equals_separate_operations(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(shape, generator=generator)
    weight, bias = torch.randn(2, shape[1], generator=generator)
    normalised = functional.instance_norm(maps) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
    expected = functional.avg_pool2d(functional.relu(normalised), 2)
    assert torch.allclose(norm_relu_pool(maps, weight, bias), expected, atol=1e-5)
    layer = NormReluPool(shape[1])
    assert torch.allclose(
        layer(maps), functional.avg_pool2d(functional.relu(functional.instance_norm(maps)), 2), atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.skipif(kernels is None, reason="needs Triton")
@pytest.mark.parametrize("shape", [(3, 5, 8, 8), (2, 3, 6, 10), (50, 128, 32, 32)])
def test_kernels_equal_separate_operations(shape: tuple[int, ...]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    maps = torch.randn(shape, generator=generator, device="cuda", requires_grad=True)
    weight, bias = torch.randn(2, shape[1], generator=generator, device="cuda").unbind()
    inputs = (maps, weight.requires_grad_(True), bias.requires_grad_(True))
    plain = functional.avg_pool2d(functional.relu(functional.group_norm(maps, shape[1], weight, bias)), 2)
    pooled = norm_relu_pool(*inputs)
    assert torch.allclose(pooled, plain, atol=1e-5)
    weights = torch.randn(plain.shape, generator=generator, device="cuda")
    for ours, theirs in zip(
        torch.autograd.grad(pooled, inputs, weights), torch.autograd.grad(plain, inputs, weights), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3)
