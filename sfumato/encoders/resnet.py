"""ResNet-18, 34 and 50 (He et al. 2016), the CIFAR form of ResNet-18, and a small one of this package.

Names and shapes are torchvision's, so that its weight files load as they are; the stride of a bottleneck is in its 3×3
convolution, as there. The stem is a 7×7 convolution of stride 2 and a pool, which leave 8×8 of an image of 32 pixels;
for small images it is a 3×3 convolution of stride 1 and no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from .layers import Keep, fold, forget

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # of a bottleneck's last convolution


class Block(nn.Module):
    """Convolutions (two of 3×3; or a bottleneck of 1×1, 3×3, 1×1) and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.depth = 3 if bottleneck else 2
        self.outputs = EXPANSION * width if bottleneck else width
        kernels, strides = ((1, 3, 1), (1, stride, 1)) if bottleneck else ((3, 3), (stride, 1))
        widths = pairwise([inputs, *[width] * (self.depth - 1), self.outputs])
        for place, (kernel, step, (entering, leaving)) in enumerate(zip(kernels, strides, widths, strict=True), 1):
            self.add_module(f"conv{place}", nn.Conv2d(entering, leaving, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{place}", nn.BatchNorm2d(leaving))
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != self.outputs:
            around = nn.Conv2d(inputs, self.outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(around, nn.BatchNorm2d(self.outputs))

    def forward(self, x: torch.Tensor, keep: Keep = forget) -> torch.Tensor:
        y = x
        for place in range(1, self.depth):
            y = functional.relu(self._filtered(y, place))
            keep(y)
        y = functional.relu(self._filtered(y, self.depth) + self.downsample(x))
        keep(y)
        return y

    def _filtered(self, x: torch.Tensor, place: int) -> torch.Tensor:
        y: torch.Tensor = getattr(self, f"bn{place}")(getattr(self, f"conv{place}")(x))
        return y

    def fold(self) -> None:
        for place in range(1, self.depth + 1):
            fold(self, f"conv{place}", f"bn{place}")
        fold(self.downsample, "0", "1")


class ResNet(nn.Module):
    """Stem, stages of residual blocks, and a linear classifier if there are `classes`."""

    def __init__(
        self,
        blocks: Sequence[int],
        widths: Sequence[int] = WIDTHS,
        *,
        bottleneck: bool = False,
        small_images: bool = False,
        classes: int = 0,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = nn.Conv2d(3, widths[0], kernel, stride, kernel // 2, bias=False)
        self.bn1: nn.Module = nn.BatchNorm2d(widths[0])
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, padding=1)
        self.stages: list[str] = []
        inputs = widths[0]
        for stage, (repeats, width) in enumerate(zip(blocks, widths, strict=True), 1):
            made = []
            for repeat in range(repeats):
                made.append(Block(inputs, width, 2 if stage > 1 and repeat == 0 else 1, bottleneck))
                inputs = made[-1].outputs
            self.stages.append(f"layer{stage}")
            self.add_module(self.stages[-1], nn.Sequential(*made))
        self.fc = nn.Linear(inputs, classes) if classes else nn.Identity()

    def trunk(self, x: torch.Tensor, keep: Keep = forget) -> torch.Tensor:
        """The last activation; `keep` is handed the outcome of every ReLU."""
        x = functional.relu(self.bn1(self.conv1(x)))
        keep(x)
        x = self.maxpool(x)
        for stage in self.stages:
            for block in getattr(self, stage):
                x = block(x, keep)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.trunk(x).mean((2, 3)))
        return logits

    def fold(self) -> None:
        """Put every batch norm into its convolution; afterwards the network is for inference only."""
        fold(self, "conv1", "bn1")
        for module in self.modules():
            if isinstance(module, Block):
                module.fold()


def resnet18(classes: int = 0) -> ResNet:
    return ResNet((2, 2, 2, 2), classes=classes)


def resnet34(classes: int = 0) -> ResNet:
    return ResNet((3, 4, 6, 3), classes=classes)


def resnet50(classes: int = 0) -> ResNet:
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes)


def resnet18_cifar(classes: int = 0) -> ResNet:
    """ResNet-18 with the stem for small images; 11.2 million parameters."""
    return ResNet((2, 2, 2, 2), small_images=True, classes=classes)


def small(classes: int = 0) -> ResNet:
    """Fifteen convolutions on the main way and 1.3 million parameters: 2.5 MB in half precision."""
    return ResNet((2, 2, 2, 1), (32, 64, 128, 192), small_images=True, classes=classes)
