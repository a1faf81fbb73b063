"""Classifiers of the evaluation protocol, for images of 8 pixels per side or more.

`mlp` and `small_cnn` are the classifiers of the DP papers; `convnet`, `lenet`, `alexnet` and `vgg11` those of the
dataset condensation papers; `resnet9` that of DP-MEPF; `resnet18` is the standard network with a stem for small images.
Logistic regression is in `evaluate/utility.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from sfumato.nets.norm_relu_pool import NormReluPool

Shape = tuple[int, int, int]
Builder = Callable[[Shape, int], nn.Module]


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Multilayer perceptron with two hidden layers of width 128."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def small_cnn(shape: Shape, classes: int) -> nn.Module:
    """CNN of two convolutions with max pooling and one hidden layer."""
    channels, height, width = shape
    return nn.Sequential(
        *_conv_pool(channels, 32),
        *_conv_pool(32, 64),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def convnet(shape: Shape, classes: int) -> nn.Module:
    """ConvNet (Gidaris and Komodakis 2018): three blocks of convolution, instance norm, ReLU and average pooling."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    for depth, inputs in enumerate((channels, 128, 128)):
        # 28 pixels are padded to 32, as in the condensation papers.
        padding = 3 if depth == 0 and height == width == 28 else 1
        layers += [nn.Conv2d(inputs, 128, 3, padding=padding), NormReluPool(128)]
    return _with_head(nn.Sequential(*layers, nn.Flatten()), shape, classes)


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeNet (LeCun et al. 1998) with ReLU and max pooling."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return _with_head(body, shape, classes)


def alexnet(shape: Shape, classes: int) -> nn.Module:
    """AlexNet (Krizhevsky et al. 2012) as in the condensation papers: five convolutions, no hidden dense layer."""
    channels = shape[0]
    body = nn.Sequential(
        nn.Conv2d(channels, 128, 5, padding=4 if channels == 1 else 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 192, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(192, 192, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return _with_head(body, shape, classes)


def vgg11(shape: Shape, classes: int) -> nn.Module:
    """VGG-11 (Simonyan and Zisserman 2015) with batch norm; no pooling below 4 pixels per side."""
    layers: list[nn.Module] = []
    inputs, side = shape[0], min(shape[1:])
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        elif side >= 4:
            layers.append(nn.MaxPool2d(2))
            side //= 2
    return _with_head(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), shape, classes)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) with a 3×3 stem of stride 1, for images of at most 64 pixels per side."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = 64
        for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(BasicBlock(inputs, width, stride))
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.blocks(self.stem(images))
        logits: torch.Tensor = self.head(maps.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Residual block of two 3×3 convolutions with batch norm."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(maps) + self.shortcut(maps))


def resnet9(shape: Shape, classes: int) -> nn.Module:
    """ResNet-9 of the CIFAR-10 example of FFCV (Leclerc et al. 2023), the classifier of the DP-MEPF paper."""
    padding = 0 if min(shape[1:]) >= 12 else 1  # without padding a 3×3 convolution needs maps of 3 pixels per side
    body = nn.Sequential(
        *_conv_norm(shape[0], 64, 3, 1, 1),
        *_conv_norm(64, 128, 5, 2, 2),
        SkipConnection(*_conv_norm(128, 128, 3, 1, 1), *_conv_norm(128, 128, 3, 1, 1)),
        *_conv_norm(128, 256, 3, 1, 1),
        nn.MaxPool2d(2),
        SkipConnection(*_conv_norm(256, 256, 3, 1, 1), *_conv_norm(256, 256, 3, 1, 1)),
        *_conv_norm(256, 128, 3, 1, padding),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    )
    return _with_head(body, shape, classes)


class SkipConnection(nn.Sequential):
    """Sequence of layers whose output is added to their input."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        output = maps
        for layer in self:
            output = layer(output)
        return maps + output


CLASSIFIER_NETWORKS: dict[str, Builder] = {
    "mlp": mlp,
    "small_cnn": small_cnn,
    "convnet": convnet,
    "resnet18": ResNet18,
    "resnet9": resnet9,
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg11": vgg11,
}


def _conv_pool(inputs: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


def _conv_norm(inputs: int, width: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, kernel, stride, padding, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def _with_head(body: nn.Sequential, shape: Shape, classes: int) -> nn.Module:
    """Return `body` with a linear head; the number of features is found by a forward pass on zeros."""
    with torch.no_grad():
        width = body(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(body, nn.Linear(width, classes))
