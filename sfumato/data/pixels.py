"""Pixel scaling between stored bytes (0 to 255) and the range [-1, 1] that networks use."""

from __future__ import annotations

import torch


def to_unit_range(images: torch.Tensor) -> torch.Tensor:
    """Scale uint8 pixels to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def to_bytes(images: torch.Tensor) -> torch.Tensor:
    """Clamp pixels to [-1, 1] and round them to uint8; the inverse of `to_unit_range`."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().byte()
