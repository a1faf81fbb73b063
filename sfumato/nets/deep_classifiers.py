"""The deep classifiers that DPImageBench trains on synthetic images (Gong et al. 2025), for images of 8 pixels or more.

ResNet of He et al. 2016 for CIFAR (16, 32, 64 channels, basic blocks), WideResNet (Zagoruyko and Komodakis 2016) with
dropout, and ResNeXt (Xie et al. 2017) with 8 groups. The benchmark takes deeper and wider ones for CIFAR.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from sfumato.nets.classifiers import BasicBlock, Builder, Shape

DROPOUT, GROUPS = 0.3, 8


class WideBlock(nn.Module):
    """Residual block of a WideResNet: batch norm and ReLU before each convolution, dropout between them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.BatchNorm2d(inputs), nn.BatchNorm2d(width)
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        normed = functional.relu(self.first_norm(maps))
        inner = functional.relu(self.second_norm(self.first(normed)))
        inner = self.second(functional.dropout(inner, DROPOUT, self.training))
        residual: torch.Tensor = inner + (maps if self.shortcut is None else self.shortcut(normed))
        return residual


class GroupedBlock(nn.Module):
    """Residual block of a ResNeXt: a 3×3 convolution in groups between two 1×1 convolutions.

    - inner: channels of the 3×3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int, *, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=GROUPS, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(maps) + self.shortcut(maps))


class GlobalMean(nn.Module):
    """Average each map over its pixels."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps.mean((2, 3))


def residual_network(shape: Shape, classes: int, *, depth: int) -> nn.Module:
    """ResNet of 6n + 2 layers, with 1×1 convolutions where the width changes."""
    stem = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return _stages(stem, BasicBlock, 16, (16, 32, 64), (depth - 2) // 6, classes)


def wide_network(shape: Shape, classes: int, *, depth: int, factor: int) -> nn.Module:
    """WideResNet of 6n + 4 layers, `factor` times as wide as a ResNet."""
    widths = (16 * factor, 32 * factor, 64 * factor)
    stem = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)]
    last = [nn.BatchNorm2d(widths[-1]), nn.ReLU()]
    return _stages(stem, WideBlock, 16, widths, (depth - 4) // 6, classes, last)


def grouped_network(shape: Shape, classes: int, *, depth: int, factor: int) -> nn.Module:
    """ResNeXt of 9n + 2 layers; its stages are 64, 128 and 256 times `factor` channels wide."""
    stem = [nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]

    def block(inputs: int, width: int, stride: int) -> nn.Module:
        return GroupedBlock(inputs, width, stride, inner=GROUPS * width // factor)

    return _stages(stem, block, 64, (64 * factor, 128 * factor, 256 * factor), (depth - 2) // 9, classes)


def _stages(
    stem: Sequence[nn.Module],
    block: Callable[[int, int, int], nn.Module],
    inputs: int,
    widths: tuple[int, int, int],
    blocks: int,
    classes: int,
    last: Sequence[nn.Module] = (),
) -> nn.Module:
    """Return stem, three stages of blocks, of which the second and third halve the maps, and a linear head."""
    layers: list[nn.Module] = list(stem)
    for width, stride in zip(widths, (1, 2, 2), strict=True):
        for number in range(blocks):
            layers.append(block(inputs, width, stride if number == 0 else 1))
            inputs = width
    network = nn.Sequential(*layers, *last, GlobalMean(), nn.Linear(inputs, classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


DEEP_NETWORKS: dict[str, Builder] = {
    "resnet110": partial(residual_network, depth=110),
    "wrn40_4": partial(wide_network, depth=40, factor=4),
    "resnext29": partial(grouped_network, depth=29, factor=4),
}
DEEP_CIFAR_NETWORKS: dict[str, Builder] = {
    "resnet164": partial(residual_network, depth=164),
    "wrn28_10": partial(wide_network, depth=28, factor=10),
    "resnext20_10": partial(grouped_network, depth=20, factor=10),  # "depth 28" there, of which 20 layers are built
}
