"""Triton kernels of `norm_relu_pool`; imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _indices(count, H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr):
    """Return map indices [M, 1]; and [M, Q]: first pixel of each pool, index of each pool, mask of valid pools."""
    row = (tl.program_id(0) * M + tl.arange(0, M)[:, None]).to(tl.int64)
    pool = tl.arange(0, Q)[None, :]
    valid = (row < count) & (pool < H * W // 4)
    corner = row * (H * W) + (pool // (W // 2)) * (2 * W) + (pool % (W // 2)) * 2
    return row, corner, row * (H * W // 4) + pool, valid


@triton.jit
def _normalise(maps, corner, valid, H: tl.constexpr, W: tl.constexpr, EPSILON: tl.constexpr):
    """Return the four normalised pixels of each pool, and the normalising factor."""
    a = tl.load(maps + corner, valid, 0.0).to(tl.float32)
    b = tl.load(maps + corner + 1, valid, 0.0).to(tl.float32)
    c = tl.load(maps + corner + W, valid, 0.0).to(tl.float32)
    d = tl.load(maps + corner + W + 1, valid, 0.0).to(tl.float32)
    mean = tl.sum(a + b + c + d, 1)[:, None] / (H * W)
    a = tl.where(valid, a - mean, 0.0)
    b = tl.where(valid, b - mean, 0.0)
    c = tl.where(valid, c - mean, 0.0)
    d = tl.where(valid, d - mean, 0.0)
    variance = tl.sum(a * a + b * b + c * c + d * d, 1)[:, None] / (H * W)
    scale = 1.0 / tl.sqrt(variance + EPSILON)
    return a * scale, b * scale, c * scale, d * scale, scale


@triton.jit
def forward(
    maps, weight, bias, pooled, count, channels,
    H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    row, corner, pool, valid = _indices(count, H, W, Q, M)
    a, b, c, d, _ = _normalise(maps, corner, valid, H, W, EPSILON)
    w = tl.load(weight + row % channels).to(tl.float32)
    s = tl.load(bias + row % channels).to(tl.float32)
    out = tl.maximum(a * w + s, 0.0) + tl.maximum(b * w + s, 0.0)
    out += tl.maximum(c * w + s, 0.0) + tl.maximum(d * w + s, 0.0)
    tl.store(pooled + pool, (out / 4).to(pooled.dtype.element_ty), valid)


@triton.jit
def backward(
    maps, weight, bias, gradient, maps_grad, weight_grad, bias_grad, count, channels,
    H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """Compute the gradient scale * weight * (g - mean(g) - x mean(g x)) for normalised x and g at the ReLU input."""
    row, corner, pool, valid = _indices(count, H, W, Q, M)
    a, b, c, d, scale = _normalise(maps, corner, valid, H, W, EPSILON)
    w = tl.load(weight + row % channels).to(tl.float32)
    s = tl.load(bias + row % channels).to(tl.float32)
    g = tl.load(gradient + pool, valid, 0.0).to(tl.float32) / 4
    ga, gb = tl.where(a * w + s > 0, g, 0.0), tl.where(b * w + s > 0, g, 0.0)
    gc, gd = tl.where(c * w + s > 0, g, 0.0), tl.where(d * w + s > 0, g, 0.0)
    total = tl.sum(ga + gb + gc + gd, 1)[:, None]
    along = tl.sum(ga * a + gb * b + gc * c + gd * d, 1)[:, None]
    tl.store(weight_grad + row, along, row < count)
    tl.store(bias_grad + row, total, row < count)
    mean, slope, scale = total / (H * W), along / (H * W), scale * w
    dtype = maps_grad.dtype.element_ty
    tl.store(maps_grad + corner, (scale * (ga - mean - a * slope)).to(dtype), valid)
    tl.store(maps_grad + corner + 1, (scale * (gb - mean - b * slope)).to(dtype), valid)
    tl.store(maps_grad + corner + W, (scale * (gc - mean - c * slope)).to(dtype), valid)
    tl.store(maps_grad + corner + W + 1, (scale * (gd - mean - d * slope)).to(dtype), valid)
