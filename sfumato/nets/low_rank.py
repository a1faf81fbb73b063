"""Low-rank adapters of convolutions (LoRA, Hu et al. 2022): few parameters to train, merged into the weights after."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

N = TypeVar("N", bound=nn.Module)


class LowRankConv(nn.Module):
    """A frozen convolution plus a trainable one of low rank, which starts at zero.

    - base: the convolution.
    - rank: channels between the two factors.
    """

    def __init__(self, base: nn.Conv2d, rank: int) -> None:
        super().__init__()
        size, stride, padding = base.kernel_size, base.stride, base.padding
        self.base = base.requires_grad_(False)
        options = {"device": base.weight.device, "bias": False}
        self.narrow = nn.Conv2d(base.in_channels, rank, size, stride, padding, **options)  # type: ignore[arg-type]
        self.widen = nn.Conv2d(rank, base.out_channels, 1, **options)  # type: ignore[arg-type]
        nn.init.zeros_(self.widen.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.widen(self.narrow(x))
        return adapted

    def merged(self) -> nn.Conv2d:
        """Return one convolution that computes the same."""
        with torch.no_grad():
            self.base.weight += torch.einsum("or,rihw->oihw", self.widen.weight[:, :, 0, 0], self.narrow.weight)
        return self.base


def add_low_rank(network: nn.Module, rank: int, seed: int) -> None:
    """Replace each convolution inside a network by a `LowRankConv`; only the adapters can be trained."""
    network.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Conv2d) and not isinstance(parent, LowRankConv):
                    setattr(parent, name, LowRankConv(child, rank))


def merge_low_rank(network: N) -> N:
    """Replace each `LowRankConv` by the convolution that it amounts to. Return the network."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRankConv):
                setattr(parent, name, child.merged())
    return network
