"""Perceptual features: every activation of a public network, for images as they are.

A `Perceptual` is a network with its card: what it was trained on, and the colours that it expects. It takes images at
their own resolution and gives what comes out of each of its ReLUs, in one pass. Batch norms are folded and weights do
not move, so an image's activations are its own; gradients flow to the images, through which a generator can learn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.data import DataError

from . import efficientnet, resnet
from .efficientnet import EfficientNetLite0
from .encoder import EFFNET_LITE0
from .resnet import ResNet
from .vgg import STAGES, VGG
from .weights import (
    SAFETENSORS,
    SHIPPED,
    Weights,
    check_fit,
    find_checksum,
    find_encoder,
    find_weights,
    load_weights,
    read_about,
    save_encoder,
    sha256_of,
)

Colour = tuple[float, float, float]
Network = VGG | ResNet | EfficientNetLite0

NETWORKS: dict[str, Callable[[], Network]] = {
    **{f"vgg{depth}": partial(VGG, depth) for depth in STAGES},
    **{f"vgg{depth}_bn": partial(VGG, depth, norms=True) for depth in STAGES},
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
    "resnet18_cifar": resnet.resnet18_cifar,
    "small": resnet.small,
    "effnet_lite0": EfficientNetLite0,
}
CLASSIFIERS = ("classifier.", "fc.")  # what weight files hold behind the last activation
SHIPPED_NAMES = ("small_cifar10", "small_tinyimagenet")


@dataclass(frozen=True)
class PerceptualCard:
    """What a network is and how it sees an image: pixels of [0, 1], less `mean`, over `std`, for each colour."""

    name: str
    network: str
    trained_on: str
    licence: str
    mean: Colour
    std: Colour
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise DataError(f"unknown network {self.network!r}; there are {', '.join(NETWORKS)}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise DataError("mean and std must have three numbers each, and std positive ones")

    def shapes(self, shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
        """Channels, height and width of each activation for images of `shape`; needs neither weights nor images."""
        with torch.device("meta"), torch.no_grad():
            found = activations(NETWORKS[self.network]().eval(), torch.empty(1, 3, *shape[1:]))
        return [tuple(values.shape[1:]) for values in found]

    def dimension(self, shape: tuple[int, int, int]) -> int:
        """The number of all activations for an image of `shape`."""
        return sum(channels * height * width for channels, height, width in self.shapes(shape))


def _torchvision(name: str, sha256: str) -> tuple[PerceptualCard, Weights]:
    file = f"{name}-{sha256[:8]}.pth"
    card = PerceptualCard(
        name=name,
        network=name,
        trained_on="ImageNet-1k (ILSVRC 2012), by torchvision",
        licence="BSD-3-Clause",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    return card, Weights(file, sha256, address=f"https://download.pytorch.org/models/{file}")


def _effnet_lite0() -> tuple[PerceptualCard, Weights]:
    of = EFFNET_LITE0
    mean, std = of.mean / 255, of.scale / 255
    card = PerceptualCard(of.name, of.name, of.trained_on, of.licence, (mean, mean, mean), (std, std, std))
    return card, efficientnet.WEIGHTS


# torchvision publishes the first eight digits; the whole checksum where it is well known.
PUBLISHED = {
    card.name: (card, weights)
    for card, weights in (
        _torchvision("vgg11", "8a719046"),
        _torchvision("vgg13", "19584684"),
        _torchvision("vgg16", "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0"),
        _torchvision("vgg19", "dcbb9e9dad569fff7a846263a77324fc34978fea2bfb039c012d710e1776ae44"),
        _torchvision("vgg11_bn", "6002323d"),
        _torchvision("vgg13_bn", "abd245e5"),
        _torchvision("vgg16_bn", "6c64b313"),
        _torchvision("vgg19_bn", "c79401a0"),
        _torchvision("resnet18", "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec"),
        _torchvision("resnet34", "b627a593bcbe140c234610266fe4f8ae95ea42fc881d091c9b6052e6b1d0590f"),
        _torchvision("resnet50", "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a"),
        _effnet_lite0(),
    )
}
PERCEPTUAL = (*SHIPPED_NAMES, *PUBLISHED)


class Perceptual(nn.Module):
    """Images [B, C, H, W] in [-1, 1] to a list of activations [B, c, h, w], in the network's precision.

    Grey images are repeated to three channels. `sha256` is that of the weight file.
    """

    gain: torch.Tensor
    shift: torch.Tensor

    def __init__(self, card: PerceptualCard, network: Network, sha256: str = "") -> None:
        super().__init__()
        self.card, self.sha256 = card, sha256
        network.eval().requires_grad_(False).fold()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        mean, std = (torch.tensor(colour).view(1, 3, 1, 1) for colour in (card.mean, card.std))
        self.register_buffer("gain", 0.5 / std, persistent=False)
        self.register_buffer("shift", (0.5 - mean) / std, persistent=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What a certificate says of it: whoever trusts in a guarantee has to know what was taken as public."""
        card = self.card
        about = {"name": card.name, "network": card.network, "sha256": self.sha256}
        return {**about, "trained_on": card.trained_on, "licence": card.licence}

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        pixels = images * self.gain + self.shift
        return activations(self.network, pixels.to(next(self.network.parameters()).dtype))

    def shapes(self, shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
        """Channels, height and width of each activation for images of `shape`."""
        return self.card.shapes(shape)

    def dimension(self, shape: tuple[int, int, int]) -> int:
        """The number of all activations for an image of `shape`."""
        return self.card.dimension(shape)


def activations(network: Network, pixels: torch.Tensor) -> list[torch.Tensor]:
    """What comes out of each ReLU of the network, in order."""
    kept: list[torch.Tensor] = []
    network.trunk(pixels, kept.append)
    return kept


def load_perceptual(
    source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Perceptual:
    """A public network with its weights, ready for inference.

    source: a name of `PERCEPTUAL`, or of a file NAME.safetensors in a folder of `find_weights`; the path of a published
        weight file, known by its SHA-256, or of one that `save_perceptual` wrote; or `sha256:` and 8 digits or more.
    """
    card, path = _resolve(source)
    network = NETWORKS[card.network]()
    load_weights(network, path, leave_out=CLASSIFIERS)
    perceptual = Perceptual(card, network, sha256_of(path))
    perceptual.network.to(dtype)
    return perceptual.to(device)


def save_perceptual(path: str | Path, card: PerceptualCard, state: Mapping[str, torch.Tensor]) -> None:
    """Write a network's weights (names as in its state dict) to a safetensors file that carries its card."""
    with torch.device("meta"):
        check_fit(NETWORKS[card.network](), state, f"the state dict for {path}", CLASSIFIERS)
    save_encoder(Path(path), state, asdict(card))


def _resolve(source: str | Path) -> tuple[PerceptualCard, Path]:
    name = str(source)
    if name in PUBLISHED:
        card, weights = PUBLISHED[name]
        return card, find_weights(weights)
    if name.startswith("sha256:"):
        return _by_checksum(name.removeprefix("sha256:").lower())
    if Path(source).suffix in (SAFETENSORS, ".pth", ".pt"):
        return _card_of(Path(source)), Path(source)
    if path := find_encoder(name):
        return _card_of(path), path
    if name in SHIPPED_NAMES:
        raise DataError(
            f"the encoder {name} is missing from this installation: there is no {SHIPPED / name}{SAFETENSORS}; "
            "benchmarks/train_encoder.py makes it"
        )
    near = get_close_matches(name.lower(), PERCEPTUAL, n=1, cutoff=0.0)
    raise DataError(f"unknown encoder {name!r}; the nearest is {near[0]!r} (all: {', '.join(PERCEPTUAL)}; or a path)")


def _by_checksum(digits: str) -> tuple[PerceptualCard, Path]:
    if not re.fullmatch(r"[0-9a-f]{8,64}", digits):
        raise DataError(f"sha256:{digits} is no SHA-256: expected 8 to 64 hexadecimal digits")
    for card, weights in PUBLISHED.values():
        if weights.sha256[:8] == digits[:8]:
            path = find_weights(weights)
            if sha256_of(path).startswith(digits):
                return card, path
    path = find_checksum(digits)
    return _card_of(path), path


def _card_of(path: Path) -> PerceptualCard:
    """From a file's metadata, or from its checksum."""
    if path.suffix == SAFETENSORS:
        about = read_about(path)
        try:
            return PerceptualCard(**{**about, "mean": tuple(about["mean"]), "std": tuple(about["std"])})
        except (KeyError, TypeError, DataError) as error:
            raise DataError(f"{path} carries no whole card: {error}") from error
    if not path.is_file():
        raise DataError(f"there is no weight file {path}")
    digest = sha256_of(path)
    for card, weights in PUBLISHED.values():
        if digest.startswith(weights.sha256):
            return card
    raise DataError(
        f"{path} is none of the published weight files (its SHA-256 starts {digest[:8]}): what it was trained on and "
        "how it sees images is not known; write it with save_perceptual and a card"
    )
