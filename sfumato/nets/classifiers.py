"""The classifiers of the evaluation protocol, for images of any size from 8 pixels on.

`mlp`, `small_cnn`: those of the DP papers. `convnet`: that of dataset condensation (three blocks, instance norm).
`resnet18`: He et al., with a stem for small images. `resnet9`: FFCV's, DP-MEPF's measure. `lenet`, `alexnet`, `vgg11`:
the condensation papers' other ones. (Logistic regression is fitted, not trained: see
`evaluate/classifiers.py`.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from sfumato.nets.fused import NormReluPool

Shape = tuple[int, int, int]
Builder = Callable[[Shape, int], nn.Module]


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Two hidden layers of 128."""
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
    """Two convolutions with pooling, one hidden layer."""
    channels, height, width = shape
    return nn.Sequential(
        *_block(channels, 32),
        *_block(32, 64),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def convnet(shape: Shape, classes: int) -> nn.Module:
    """Three blocks of convolution (128), instance norm, ReLU, average pooling (Gidaris and Komodakis)."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    for depth, entering in enumerate((channels, 128, 128)):
        # Images of 28 pixels are padded to 32 at the entry, as the condensation papers do.
        padding = 3 if depth == 0 and height == width == 28 else 1
        layers += [nn.Conv2d(entering, 128, 3, padding=padding), NormReluPool(128)]
    return _with_head(nn.Sequential(*layers, nn.Flatten()), shape, classes)


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeCun et al. with ReLU and max pooling."""
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
    """The condensation papers' small AlexNet: five convolutions, no dense hidden layer."""
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
    """Simonyan and Zisserman, with batch norm; pooling stops at two pixels across."""
    layers: list[nn.Module] = []
    entering, across = shape[0], min(shape[1:])
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(entering, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            entering = width
        elif across >= 4:
            layers.append(nn.MaxPool2d(2))
            across //= 2
    return _with_head(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), shape, classes)


class ResNet(nn.Module):
    """ResNet-18 (He et al.) with a 3×3 stem of stride 1, for images of up to 64 pixels."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks: list[nn.Module] = []
        entering = 64
        for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(Residual(entering, width, stride))
            entering = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.blocks(self.stem(images))
        logits: torch.Tensor = self.head(maps.mean((2, 3)))
        return logits


class Residual(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(entering, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or entering != width:
            self.around = nn.Sequential(nn.Conv2d(entering, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(maps) + self.around(maps))


def resnet9(shape: Shape, classes: int) -> nn.Module:
    """The fast residual network of FFCV's CIFAR-10 example, by which the paper of DP-MEPF measures."""
    narrowing = 0 if min(shape[1:]) >= 12 else 1  # a padding: three pixels across must be left
    body = nn.Sequential(
        *_normed(shape[0], 64, 3, 1, 1),
        *_normed(64, 128, 5, 2, 2),
        Added(*_normed(128, 128, 3, 1, 1), *_normed(128, 128, 3, 1, 1)),
        *_normed(128, 256, 3, 1, 1),
        nn.MaxPool2d(2),
        Added(*_normed(256, 256, 3, 1, 1), *_normed(256, 256, 3, 1, 1)),
        *_normed(256, 128, 3, 1, narrowing),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
    )
    return _with_head(body, shape, classes)


class Added(nn.Sequential):
    """What the layers make of maps is added to these."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        made = maps
        for layer in self:
            made = layer(made)
        return maps + made


NETWORKS: dict[str, Builder] = {
    "mlp": mlp,
    "small_cnn": small_cnn,
    "convnet": convnet,
    "resnet18": ResNet,
    "resnet9": resnet9,
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg11": vgg11,
}


def _block(entering: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(entering, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


def _normed(entering: int, width: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(entering, width, kernel, stride, padding, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def _with_head(body: nn.Sequential, shape: Shape, classes: int) -> nn.Module:
    """`body` and a linear head as wide as its output is for such images."""
    with torch.no_grad():
        width = body(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(body, nn.Linear(width, classes))
