"""Conditional generators: latent vectors and labels to images in [-1, 1]; a label may be parts of several classes.

`small` is quick on two cores; `residual` is the better one; `mmd-gan` is that of the MMD-GAN papers and `mepf` that of
DP-MEPF, for comparisons.
`PerClass` makes one of them for each class, all of which run at once.
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

from sfumato.nets.stacked import stacked, state

ACROSS = 8  # the first map is at most this many pixels across
REFRESHES = 20  # batches over which batch norms' statistics are taken
Shape = tuple[int, int, int]


class Generator(nn.Module):
    """A linear entry for each class, a shared linear layer to a small map, transposed convolutions that double it until
    it covers the image, a binomial blur (pixels of images are smooth; noise in a target is not), tanh.
    """

    def __init__(self, shape: Shape, classes: int, *, latent: int = 64, hidden: int = 256, width: int = 32) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent = latent
        self.entry = nn.Parameter(torch.randn(classes, latent, hidden) / math.sqrt(latent))
        self.bias = nn.Parameter(torch.randn(classes, hidden) / 2)
        doublings, base = _first_map(shape)
        self.trunk = nn.Sequential(*self._layers(channels, hidden, width, doublings, base))
        self.register_buffer("blur_rows", _blur(self.height), persistent=False)
        self.register_buffer("blur_columns", _blur(self.width), persistent=False)

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`latent` [N, latent] and `labels` [N], or parts [N, classes], to images [N, C, H, W]."""
        member = parts(labels, len(self.entry)).to(latent.dtype)
        # One product for all classes: the latent vector stands in the block of its class.
        blocks = (member[:, :, None] * latent[:, None, :]).flatten(1)
        images = self.trunk(blocks @ self.entry.flatten(0, 1) + member @ self.bias)
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
            narrower = channels if last else max(8, width // 2)
            layers.append(nn.ConvTranspose2d(width, narrower, 4, 2, 1))
            layers += [] if last else [nn.BatchNorm2d(narrower), nn.ReLU()]
            width = narrower
        return layers


class ResidualGenerator(Generator):
    """The same entry and end; between them residual blocks that double the map by repeating its pixels."""

    def _layers(self, channels: int, hidden: int, width: int, doublings: int, base: tuple[int, int]) -> list[nn.Module]:
        layers: list[nn.Module] = [
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * width * base[0] * base[1]),
            nn.Unflatten(1, (2 * width, *base)),
        ]
        wide = 2 * width
        for _ in range(doublings):
            layers.append(Doubling(wide, width))
            wide, width = width, max(16, width // 2)
        return [*layers, nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, channels, 3, padding=1)]


class Doubling(nn.Module):
    """Two convolutions around a doubling, added to the doubled input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.first(_doubled(functional.relu(self.norms[0](x))))
        maps = self.second(functional.relu(self.norms[1](maps)))
        whole: torch.Tensor = maps + _doubled(self.short(x))
        return whole


class MMDGenerator(nn.Module):
    """The generator of MMD-GAN as "Functional Rényi DP" takes it: latent and one-hot label to ten numbers, then
    transposed convolutions of width 256, 128, 64; cut to the image's size."""

    def __init__(self, shape: Shape, classes: int, *, latent: int = 10, hidden: int = 10, width: int = 64) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        doublings = max(1, math.ceil(math.log2(max(self.height, self.width) / 4)))
        wide = width * 2 ** (doublings - 1)
        layers: list[nn.Module] = [
            nn.Linear(latent + classes, hidden),
            nn.Unflatten(1, (hidden, 1, 1)),
            nn.ConvTranspose2d(hidden, wide, 4, 1, 0, bias=False),
        ]
        for doubling in range(doublings):
            narrower = channels if doubling == doublings - 1 else wide // 2
            layers += [nn.BatchNorm2d(wide), nn.ReLU(), nn.ConvTranspose2d(wide, narrower, 4, 2, 1, bias=False)]
            wide = narrower
        self.trunk = nn.Sequential(*layers)

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trunk(_labelled(latent, labels, self.classes))[:, :, : self.height, : self.width])


class GreyMEPFGenerator(nn.Module):
    """DP-MEPF's generator of digits and clothes: two linear layers to a map of a quarter of the image (16 × 7 × 7 with
    `width` 16), two doublings with a convolution of 5 × 5 after each. Doubled pixels are repeated, not interpolated."""

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
        return torch.tanh(self.trunk(_labelled(latent, labels, self.classes))[:, :, : self.height, : self.width])


class ColourMEPFGenerator(nn.Module):
    """DP-MEPF's generator of photographs, GFMN's: a transposed convolution to 4 × 4 (512 channels with `width` 64),
    residual doublings that halve the channels down to `width`."""

    def __init__(self, shape: Shape, classes: int, *, latent: int = 90, hidden: int = 0, width: int = 64) -> None:  # noqa: ARG002
        super().__init__()
        channels, self.height, self.width = shape
        self.latent, self.classes = latent, classes
        doublings = max(1, math.ceil(math.log2(max(self.height, self.width) / 4)))
        widths = [max(width, 8 * width >> doubling) for doubling in range(doublings + 1)]
        self.entry = nn.ConvTranspose2d(latent + classes, widths[0], 4)
        self.trunk = nn.Sequential(
            *(Doubling(wide, narrow) for wide, narrow in pairwise(widths)),
            nn.BatchNorm2d(widths[-1]),
            nn.ReLU(),
            nn.Conv2d(widths[-1], channels, 3, padding=1),
        )

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        maps = self.trunk(self.entry(_labelled(latent, labels, self.classes)[:, :, None, None]))
        return torch.tanh(maps[:, :, : self.height, : self.width])


def mepf_generator(shape: Shape, classes: int, **sizes: int) -> nn.Module:
    """The generator of DP-MEPF for grey images, or for colour."""
    return (GreyMEPFGenerator if shape[0] == 1 else ColourMEPFGenerator)(shape, classes, **sizes)


class PerClass(nn.Module):
    """One network for each class: their weights stacked, their batches side by side in one call."""

    def __init__(self, build: Callable[[], nn.Module], classes: int) -> None:
        super().__init__()
        self.network = stacked([build() for _ in range(classes)])

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        classes = len(next(self.parameters()))
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=classes)
        place = torch.empty_like(labels)
        place[order] = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
        side_by_side = latent.new_zeros(classes, int(counts.max()), latent.shape[1])
        side_by_side[labels, place] = latent
        return self.together(side_by_side)[labels, place]

    def together(self, latent: torch.Tensor) -> torch.Tensor:
        """As many images of each class: [classes, n, latent] to [classes, n, C, H, W]."""

        def one(weights: dict[str, torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
            alone = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
            made: torch.Tensor = functional_call(self.network, weights, (codes, alone))
            return made

        images: torch.Tensor = torch.vmap(one)(state(self.network), latent)
        return images


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "small": Generator,
    "residual": ResidualGenerator,
    "mmd-gan": MMDGenerator,
    "mepf": mepf_generator,
}


def refresh_batch_norm(network: nn.Module, draw: Callable[[], Any]) -> None:
    """Takes batch norms' statistics afresh, as the plain mean over some batches that `draw` puts through `network`."""
    network.train()
    with torch.no_grad():
        for number in range(REFRESHES):
            for module in network.modules():
                if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                    module.momentum = 1 / (number + 1)
            draw()
    network.eval()


def parts(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """How much of each class, [N, classes]: all of one, for labels [N]; parts of several stay what they are."""
    return labels if labels.dim() == 2 else functional.one_hot(labels, classes)


def _first_map(shape: Shape) -> tuple[int, tuple[int, int]]:
    """How often a map is doubled, and its first size."""
    _, height, width = shape
    doublings = max(1, math.ceil(math.log2(max(height, width) / ACROSS)))
    return doublings, (math.ceil(height / 2**doublings), math.ceil(width / 2**doublings))


def _labelled(latent: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Latent vectors with one-hot labels behind them."""
    return torch.cat([latent, parts(labels, classes).to(latent.dtype)], 1)


def _doubled(maps: torch.Tensor) -> torch.Tensor:
    """Each pixel four times."""
    return functional.interpolate(maps, scale_factor=2.0, mode="nearest")


def _blur(size: int) -> torch.Tensor:
    """The binomial filter (1, 2, 1) / 4 as a matrix whose rows sum to one at the border too."""
    side = torch.ones(size - 1) / 2
    matrix = torch.eye(size) + torch.diag(side, 1) + torch.diag(side, -1)
    return matrix / matrix.sum(1, keepdim=True)
