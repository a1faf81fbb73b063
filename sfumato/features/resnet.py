"""ResNet-18, 34 and 50 (He et al. 2016), ResNet-18 for CIFAR, and the small ResNet of the package's own encoders.

Names and shapes match torchvision's, so its weight files load without conversion; as in torchvision, the 3×3
convolution of a bottleneck has the stride. The standard stem (7×7 convolution of stride 2, max pooling) reduces 32
pixels to 8. With `small_images` the stem is a 3×3 convolution of stride 1 without pooling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.batch_norm_folding import ActivationHook, fold_batch_norm, no_hook

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # output channels of a bottleneck over its width


class Block(nn.Module):
    """Residual block: two 3×3 convolutions, or a bottleneck of 1×1, 3×3 and 1×1."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.depth = 3 if bottleneck else 2
        self.outputs = EXPANSION * width if bottleneck else width
        kernels, strides = ((1, 3, 1), (1, stride, 1)) if bottleneck else ((3, 3), (stride, 1))
        widths = pairwise([inputs, *[width] * (self.depth - 1), self.outputs])
        layers = zip(kernels, strides, widths, strict=True)
        for index, (kernel, step, (in_channels, out_channels)) in enumerate(layers, 1):
            self.add_module(f"conv{index}", nn.Conv2d(in_channels, out_channels, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{index}", nn.BatchNorm2d(out_channels))
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != self.outputs:
            projection = nn.Conv2d(inputs, self.outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(self.outputs))

    def forward(self, x: torch.Tensor, hook: ActivationHook = no_hook) -> torch.Tensor:
        y = x
        for index in range(1, self.depth):
            y = functional.relu(self._conv_norm(y, index))
            hook(y)
        y = functional.relu(self._conv_norm(y, self.depth) + self.downsample(x))
        hook(y)
        return y

    def _conv_norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y: torch.Tensor = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(x))
        return y

    def fold(self) -> None:
        """Fold every batch norm into its convolution, for inference."""
        for index in range(1, self.depth + 1):
            fold_batch_norm(self, f"conv{index}", f"bn{index}")
        fold_batch_norm(self.downsample, "0", "1")


class ResNet(nn.Module):
    """Residual network.

    - blocks: number of residual blocks of each stage.
    - widths: channels of each stage.
    - bottleneck: use bottleneck blocks (default: two 3×3 convolutions).
    - small_images: use the stem for small images.
    - classes: outputs of the linear classifier; 0 (default): no classifier.
    """

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
            layers = []
            for repeat in range(repeats):
                layers.append(Block(inputs, width, 2 if stage > 1 and repeat == 0 else 1, bottleneck))
                inputs = layers[-1].outputs
            self.stages.append(f"layer{stage}")
            self.add_module(self.stages[-1], nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes) if classes else nn.Identity()

    def trunk(self, x: torch.Tensor, hook: ActivationHook = no_hook) -> torch.Tensor:
        """Return the last activation; call `hook` with the output of every ReLU."""
        x = functional.relu(self.bn1(self.conv1(x)))
        hook(x)
        x = self.maxpool(x)
        for stage in self.stages:
            for block in getattr(self, stage):
                x = block(x, hook)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.trunk(x).mean((2, 3)))
        return logits

    def fold(self) -> None:
        """Fold every batch norm into its convolution, for inference."""
        fold_batch_norm(self, "conv1", "bn1")
        for module in self.modules():
            if isinstance(module, Block):
                module.fold()


def resnet18(classes: int = 0) -> ResNet:
    """ResNet-18; 11.7 million parameters with 1,000 classes."""
    return ResNet((2, 2, 2, 2), classes=classes)


def resnet34(classes: int = 0) -> ResNet:
    """ResNet-34; 21.8 million parameters with 1,000 classes."""
    return ResNet((3, 4, 6, 3), classes=classes)


def resnet50(classes: int = 0) -> ResNet:
    """ResNet-50; 25.6 million parameters with 1,000 classes."""
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes)


def resnet18_cifar(classes: int = 0) -> ResNet:
    """ResNet-18 with the stem for small images; 11.2 million parameters."""
    return ResNet((2, 2, 2, 2), small_images=True, classes=classes)


def small_resnet(classes: int = 0) -> ResNet:
    """Small ResNet for small images: 15 convolutions, 1.3 million parameters, 2.5 MB in half precision."""
    return ResNet((2, 2, 2, 1), (32, 64, 128, 192), small_images=True, classes=classes)
