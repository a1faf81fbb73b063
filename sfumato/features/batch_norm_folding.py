"""Fold batch norm into convolutions; hooks that collect activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

ActivationHook = Callable[[torch.Tensor], object]  # called with every activation, in order


def no_hook(_: torch.Tensor) -> None:
    """Ignore the activation."""


def fold_batch_norm(owner: nn.Module, convolution: str, norm: str) -> None:
    """Fold `owner.norm` into `owner.convolution`, if it is a batch norm. The result is valid for inference only."""
    module = getattr(owner, norm, None)
    if isinstance(module, nn.BatchNorm2d):
        setattr(owner, convolution, nn.utils.fuse_conv_bn_eval(getattr(owner, convolution), module))
        setattr(owner, norm, nn.Identity())
