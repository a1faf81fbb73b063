"""What the feature networks share: folding of batch norms, and keeping activations on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Keep = Callable[[torch.Tensor], object]  # is handed every activation, in order


def forget(_: torch.Tensor) -> None:
    """Keeps nothing."""


def fold(owner: nn.Module, convolution: str, norm: str) -> None:
    """Put the batch norm into the convolution: the same function, one pass over memory fewer; for inference only."""
    found = getattr(owner, norm, None)
    if isinstance(found, nn.BatchNorm2d):
        setattr(owner, convolution, nn.utils.fuse_conv_bn_eval(getattr(owner, convolution), found))
        setattr(owner, norm, nn.Identity())
