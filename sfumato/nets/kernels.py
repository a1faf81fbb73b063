"""The Triton kernels behind `fused.py`; imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(count, H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr):
    """The maps [M, 1]; the first pixel of every pool, the pools, and which of them exist [M, Q]."""
    row = (tl.program_id(0) * M + tl.arange(0, M)[:, None]).to(tl.int64)
    pool = tl.arange(0, Q)[None, :]
    there = (row < count) & (pool < H * W // 4)
    corner = row * (H * W) + (pool // (W // 2)) * (2 * W) + (pool % (W // 2)) * 2
    return row, corner, row * (H * W // 4) + pool, there


@triton.jit
def _normal(maps, corner, there, H: tl.constexpr, W: tl.constexpr, EPSILON: tl.constexpr):
    """The four pixels of every pool, normalised, and the scale that did it."""
    a = tl.load(maps + corner, there, 0.0).to(tl.float32)
    b = tl.load(maps + corner + 1, there, 0.0).to(tl.float32)
    c = tl.load(maps + corner + W, there, 0.0).to(tl.float32)
    d = tl.load(maps + corner + W + 1, there, 0.0).to(tl.float32)
    mean = tl.sum(a + b + c + d, 1)[:, None] / (H * W)
    a = tl.where(there, a - mean, 0.0)
    b = tl.where(there, b - mean, 0.0)
    c = tl.where(there, c - mean, 0.0)
    d = tl.where(there, d - mean, 0.0)
    variance = tl.sum(a * a + b * b + c * c + d * d, 1)[:, None] / (H * W)
    scale = 1.0 / tl.sqrt(variance + EPSILON)
    return a * scale, b * scale, c * scale, d * scale, scale


@triton.jit
def forward(
    maps, weight, bias, pooled, count, channels,
    H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    row, corner, place, there = _places(count, H, W, Q, M)
    a, b, c, d, _ = _normal(maps, corner, there, H, W, EPSILON)
    w = tl.load(weight + row % channels).to(tl.float32)
    s = tl.load(bias + row % channels).to(tl.float32)
    out = tl.maximum(a * w + s, 0.0) + tl.maximum(b * w + s, 0.0)
    out += tl.maximum(c * w + s, 0.0) + tl.maximum(d * w + s, 0.0)
    tl.store(pooled + place, (out / 4).to(pooled.dtype.element_ty), there)


@triton.jit
def backward(
    maps, weight, bias, gradient, out, of_weight, of_bias, count, channels,
    H: tl.constexpr, W: tl.constexpr, Q: tl.constexpr, M: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """With x normalised and g the gradient behind the ReLU: scale * weight * (g - mean(g) - x mean(g x))."""
    row, corner, place, there = _places(count, H, W, Q, M)
    a, b, c, d, scale = _normal(maps, corner, there, H, W, EPSILON)
    w = tl.load(weight + row % channels).to(tl.float32)
    s = tl.load(bias + row % channels).to(tl.float32)
    g = tl.load(gradient + place, there, 0.0).to(tl.float32) / 4
    ga, gb = tl.where(a * w + s > 0, g, 0.0), tl.where(b * w + s > 0, g, 0.0)
    gc, gd = tl.where(c * w + s > 0, g, 0.0), tl.where(d * w + s > 0, g, 0.0)
    total = tl.sum(ga + gb + gc + gd, 1)[:, None]
    along = tl.sum(ga * a + gb * b + gc * c + gd * d, 1)[:, None]
    tl.store(of_weight + row, along, row < count)
    tl.store(of_bias + row, total, row < count)
    mean, slope, scale = total / (H * W), along / (H * W), scale * w
    kind = out.dtype.element_ty
    tl.store(out + corner, (scale * (ga - mean - a * slope)).to(kind), there)
    tl.store(out + corner + 1, (scale * (gb - mean - b * slope)).to(kind), there)
    tl.store(out + corner + W, (scale * (gc - mean - c * slope)).to(kind), there)
    tl.store(out + corner + W + 1, (scale * (gd - mean - d * slope)).to(kind), there)
