"""Conditional generators: latent vectors and labels to images in [-1, 1].

Labels are class indices [N], or class weights [N, classes] for images between classes. The architectures: `small`, fast
on a CPU; `residual`, larger and better; `mmd-gan`, of the MMD-GAN papers, and `mepf`, of DP-MEPF, for comparisons.
`PerClass` holds one network per class with stacked weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from sfumato.nets.stacked import named_tensors, stacked

MAX_BASE_SIDE = 8  # pixels per side of the first map, at most
REFRESH_BATCHES = 20  # batches for the statistics of batch norms
Shape = tuple[int, int, int]


class SmallGenerator(nn.Module):
    """Transposed convolutions with one linear input layer per class.

    A shared linear layer gives a small map, transposed convolutions double its size until it covers the image, and a
    binomial blur removes high frequencies, which come from noise in the target rather than from images; then tanh.

    - shape: channels, height and width of the images.
    - classes: number of classes.
    - latent: dimension of the latent vectors, default 64.
    - hidden: width of the hidden layer, default 256.
    - width: channels of the first map, default 32.
    """

    def __init__(self, shape: Shape, classes: int, *, latent: int = 64, hidden: int = 256, width: int = 32) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent = latent
        self.entry = nn.Parameter(torch.randn(classes, latent, hidden) / math.sqrt(latent))
        self.bias = nn.Parameter(torch.randn(classes, hidden) / 2)
        doublings, base = _base_map(shape)
        self.trunk = nn.Sequential(*self._layers(channels, hidden, width, doublings, base))
        self.register_buffer("blur_rows", _blur_matrix(self.height), persistent=False)
        self.register_buffer("blur_columns", _blur_matrix(self.width), persistent=False)

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map `latent` [N, latent] and `labels` [N], or class weights [N, classes], to images [N, C, H, W]."""
        weights = class_weights(labels, len(self.entry)).to(latent.dtype)
        # One matrix product for all classes: the latent vector is in the block of its class.
        blocks = (weights[:, :, None] * latent[:, None, :]).flatten(1)
        images = self.trunk(blocks @ self.entry.flatten(0, 1) + weights @ self.bias)
        images = images[:, :, : self.height, : self.width]
        return torch.tanh(self.get_buffer("blur_rows") @ images @ self.get_buffer("blur_columns").T)

    def _layers(self, channels: int, hidden: int, width: int, doublings: int, base: tuple[int, int]) -> list[nn.Module]:
        layers: list[nn.Module] = [
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width * base[0] * base[1]),
            nn.BatchNorm1d(width * base[0] * base[1]),
            nn.ReLU(),
            nn.Unflatten(1, (width, *base)),
        ]
        for doubling in range(doublings):
            last = doubling == doublings - 1
            outputs = channels if last else max(8, width // 2)
            layers.append(nn.ConvTranspose2d(width, outputs, 4, 2, 1))
            layers += [] if last else [nn.BatchNorm2d(outputs), nn.ReLU()]
            width = outputs
        return layers


class ResidualGenerator(SmallGenerator):
    """Generator with the input and output layers of `SmallGenerator` and residual upsampling blocks between them."""

    def _layers(self, channels: int, hidden: int, width: int, doublings: int, base: tuple[int, int]) -> list[nn.Module]:
        layers: list[nn.Module] = [
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * width * base[0] * base[1]),
            nn.Unflatten(1, (2 * width, *base)),
        ]
        inputs = 2 * width
        for _ in range(doublings):
            layers.append(UpsamplingBlock(inputs, width))
            inputs, width = width, max(16, width // 2)
        return [*layers, nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, channels, 3, padding=1)]


class UpsamplingBlock(nn.Module):
    """Residual block of two convolutions that doubles height and width by nearest-neighbour upsampling."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.first(_upsample(functional.relu(self.norms[0](x))))
        maps = self.second(functional.relu(self.norms[1](maps)))
        total: torch.Tensor = maps + _upsample(self.shortcut(x))
        return total


class MMDGANGenerator(nn.Module):
    """Generator of MMD-GAN (Li et al. 2017) as in "Functional Rényi Differential Privacy".

    Latent vector and one-hot label enter a linear layer with ten outputs; transposed convolutions of width 256, 128 and
    64 follow, and the output is cropped.

    - shape: channels, height and width of the images.
    - classes: number of classes.
    - latent: dimension of the latent vectors, default 10.
    - hidden: outputs of the linear layer, default 10.
    - width: channels before the last layer, default 64.
    """

    def __init__(self, shape: Shape, classes: int, *, latent: int = 10, hidden: int = 10, width: int = 64) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        doublings = max(1, math.ceil(math.log2(max(self.height, self.width) / 4)))
        inputs = width * 2 ** (doublings - 1)
        layers: list[nn.Module] = [
            nn.Linear(latent + classes, hidden),
            nn.Unflatten(1, (hidden, 1, 1)),
            nn.ConvTranspose2d(hidden, inputs, 4, 1, 0, bias=False),
        ]
        for doubling in range(doublings):
            outputs = channels if doubling == doublings - 1 else inputs // 2
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)]
            inputs = outputs
        self.trunk = nn.Sequential(*layers)

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trunk(_with_labels(latent, labels, self.classes))[:, :, : self.height, : self.width])


class GreyMEPFGenerator(nn.Module):
    """Generator of DP-MEPF (Harder et al. 2023) for grey images.

    Two linear layers give a map of a quarter of the image size (16 × 7 × 7 by default); two nearest-neighbour
    upsamplings follow, each with a 5 × 5 convolution.

    - shape: channels, height and width of the images.
    - classes: number of classes.
    - latent: dimension of the latent vectors, default 90.
    - hidden: width of the hidden layer, default 500.
    - width: channels of the first map, default 16.
    """

    def __init__(self, shape: Shape, classes: int, *, latent: int = 90, hidden: int = 500, width: int = 16) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        base = (math.ceil(self.height / 4), math.ceil(self.width / 4))
        self.trunk = nn.Sequential(
            nn.Linear(latent + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width * base[0] * base[1]),
            nn.BatchNorm1d(width * base[0] * base[1]),
            nn.ReLU(),
            nn.Unflatten(1, (width, *base)),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width // 2, 5, padding=2),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width // 2, channels, 5, padding=2),
        )

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trunk(_with_labels(latent, labels, self.classes))[:, :, : self.height, : self.width])


class ColourMEPFGenerator(nn.Module):
    """Generator of DP-MEPF for colour images, from GFMN (dos Santos et al. 2019).

    A transposed convolution gives a 4 × 4 map (512 channels by default); upsampling blocks halve the channels down to
    `width`.

    - shape: channels, height and width of the images.
    - classes: number of classes.
    - latent: dimension of the latent vectors, default 90.
    - hidden: not used; the signature is that of the other generators.
    - width: channels of the last map, default 64.
    """

    def __init__(self, shape: Shape, classes: int, *, latent: int = 90, hidden: int = 0, width: int = 64) -> None:  # noqa: ARG002
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        doublings = max(1, math.ceil(math.log2(max(self.height, self.width) / 4)))
        widths = [max(width, 8 * width >> doubling) for doubling in range(doublings + 1)]
        self.entry = nn.ConvTranspose2d(latent + classes, widths[0], 4)
        self.trunk = nn.Sequential(
            *(UpsamplingBlock(inputs, outputs) for inputs, outputs in pairwise(widths)),
            nn.BatchNorm2d(widths[-1]),
            nn.ReLU(),
            nn.Conv2d(widths[-1], channels, 3, padding=1),
        )

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        maps = self.trunk(self.entry(_with_labels(latent, labels, self.classes)[:, :, None, None]))
        return torch.tanh(maps[:, :, : self.height, : self.width])


def mepf_generator(shape: Shape, classes: int, **sizes: int) -> nn.Module:
    """Return the generator of DP-MEPF for grey or colour images."""
    return (GreyMEPFGenerator if shape[0] == 1 else ColourMEPFGenerator)(shape, classes, **sizes)


class PerClass(nn.Module):
    """One generator per class with stacked weights; all generators run in one call.

    - build: returns a new generator for one class.
    - classes: number of classes.
    """

    def __init__(self, build: Callable[[], nn.Module], classes: int) -> None:
        super().__init__()
        self.network = stacked([build() for _ in range(classes)])

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map `latent` [N, latent] and `labels` [N] to images [N, C, H, W]; batches are padded to the largest class."""
        classes = len(next(self.parameters()))
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=classes)
        position = torch.empty_like(labels)  # of an image within its class
        position[order] = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
        padded = latent.new_zeros(classes, int(counts.max()), latent.shape[1])
        padded[labels, position] = latent
        return self.forward_stacked(padded)[labels, position]

    def forward_stacked(self, latent: torch.Tensor) -> torch.Tensor:
        """Map equally many latent vectors of each class, [classes, n, latent], to images [classes, n, C, H, W]."""

        def single(weights: dict[str, torch.Tensor], latent: torch.Tensor) -> torch.Tensor:
            labels = torch.zeros(len(latent), dtype=torch.int64, device=latent.device)
            images: torch.Tensor = functional_call(self.network, weights, (latent, labels))
            return images

        images: torch.Tensor = torch.vmap(single)(named_tensors(self.network), latent)
        return images


GENERATORS: dict[str, Callable[..., nn.Module]] = {
    "small": SmallGenerator,
    "residual": ResidualGenerator,
    "mmd-gan": MMDGANGenerator,
    "mepf": mepf_generator,
}


def refresh_batch_norm(network: nn.Module, forward: Callable[[], Any]) -> None:
    """Recompute the statistics of batch norms as the mean over some batches; `forward` runs one batch."""
    network.train()
    with torch.no_grad():
        for number in range(REFRESH_BATCHES):
            for module in network.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.momentum = 1 / (number + 1)
            forward()
    network.eval()


def class_weights(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return class weights [N, classes]: one-hot for labels [N]; class weights are returned unchanged."""
    return labels if labels.dim() == 2 else functional.one_hot(labels, classes)


def _base_map(shape: Shape) -> tuple[int, tuple[int, int]]:
    """Return the number of doublings and the size of the first map."""
    _, height, width = shape
    doublings = max(1, math.ceil(math.log2(max(height, width) / MAX_BASE_SIDE)))
    return doublings, (math.ceil(height / 2**doublings), math.ceil(width / 2**doublings))


def _with_labels(latent: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return latent vectors with class weights appended."""
    return torch.cat([latent, class_weights(labels, classes).to(latent.dtype)], 1)


def _upsample(maps: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(maps, scale_factor=2.0, mode="nearest")


def _blur_matrix(size: int) -> torch.Tensor:
    """Return the binomial filter (1, 2, 1) / 4 as a matrix; rows at the border are renormalised to sum 1."""
    neighbours = torch.ones(size - 1) / 2
    matrix = torch.eye(size) + torch.diag(neighbours, 1) + torch.diag(neighbours, -1)
    return matrix / matrix.sum(1, keepdim=True)
