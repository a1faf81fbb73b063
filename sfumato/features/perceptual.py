"""Perceptual encoders: all ReLU activations of a public network, at the original resolution of the images.

A `Perceptual` is a network with its card, which states training data and normalisation. Batch norms are folded and
weights are frozen, so the activations of an image do not depend on the rest of the batch. Gradients with respect to the
images are available for the training of a generator.
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
from sfumato.features import efficientnet, resnet
from sfumato.features.efficientnet import EfficientNetLite0
from sfumato.features.feature_network import EFFNET_LITE0
from sfumato.features.resnet import ResNet
from sfumato.features.vgg import STAGES, VGG
from sfumato.features.weights import (
    SAFETENSORS,
    SHIPPED,
    Weights,
    check_fit,
    find_by_checksum,
    find_encoder,
    find_weights,
    load_weights,
    read_card,
    save_with_card,
    sha256_of,
)

RGB = tuple[float, float, float]
Network = VGG | ResNet | EfficientNetLite0

ENCODER_NETWORKS: dict[str, Callable[[], Network]] = {
    **{f"vgg{depth}": partial(VGG, depth) for depth in STAGES},
    **{f"vgg{depth}_bn": partial(VGG, depth, norms=True) for depth in STAGES},
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
    "resnet18_cifar": resnet.resnet18_cifar,
    "small": resnet.small_resnet,
    "effnet_lite0": EfficientNetLite0,
}
CLASSIFIER_PREFIXES = ("classifier.", "fc.")  # weights after the last activation, which are skipped
SHIPPED_NAMES = ("small_cifar10", "small_tinyimagenet")


@dataclass(frozen=True)
class PerceptualCard:
    """Origin and normalisation of an encoder.

    - name: of the encoder.
    - network: architecture, a key of `ENCODER_NETWORKS`.
    - trained_on: training data and publisher.
    - licence: of the weights.
    - mean, std: for each colour channel; the network input is (pixel - mean) / std for pixels in [0, 1].
    - notes: further facts, for example the test accuracy; default none.
    """

    name: str
    network: str
    trained_on: str
    licence: str
    mean: RGB
    std: RGB
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.network not in ENCODER_NETWORKS:
            raise DataError(f"unknown network {self.network!r}; available: {', '.join(ENCODER_NETWORKS)}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise DataError("mean and std must have three numbers each, and std must be positive")

    def shapes(self, shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
        """Return channels, height and width of each activation for images of `shape`; needs no weights."""
        with torch.device("meta"), torch.no_grad():
            outputs = activations(ENCODER_NETWORKS[self.network]().eval(), torch.empty(1, 3, *shape[1:]))
        return [tuple(values.shape[1:]) for values in outputs]

    def dimension(self, shape: tuple[int, int, int]) -> int:
        """Return the total number of activations for an image of `shape`."""
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
    name, mean, std = EFFNET_LITE0.name, EFFNET_LITE0.mean / 255, EFFNET_LITE0.scale / 255
    colours = (mean, mean, mean), (std, std, std)
    card = PerceptualCard(name, name, EFFNET_LITE0.trained_on, EFFNET_LITE0.licence, *colours)
    return card, efficientnet.WEIGHTS


# torchvision publishes the first eight digits of SHA-256; the full checksum is given where it is known.
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
    """Map images [B, C, H, W] in [-1, 1] to a list of activations [B, c, h, w], in the precision of the network.

    Grey images are repeated to three channels.

    - card: origin and normalisation.
    - network: the network with its weights; its batch norms are folded.
    - sha256: of the weight file, default "".
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
        """Return the certificate's description: a guarantee depends on which data were treated as public."""
        return {
            "name": self.card.name,
            "network": self.card.network,
            "sha256": self.sha256,
            "trained_on": self.card.trained_on,
            "licence": self.card.licence,
        }

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        pixels = images * self.gain + self.shift
        return activations(self.network, pixels.to(next(self.network.parameters()).dtype))

    def shapes(self, shape: tuple[int, int, int]) -> list[tuple[int, ...]]:
        """Return channels, height and width of each activation for images of `shape`."""
        return self.card.shapes(shape)

    def dimension(self, shape: tuple[int, int, int]) -> int:
        """Return the total number of activations for an image of `shape`."""
        return self.card.dimension(shape)


def activations(network: Network, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of all ReLUs of the network, in order."""
    outputs: list[torch.Tensor] = []
    network.trunk(pixels, outputs.append)
    return outputs


def load_perceptual(
    source: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Perceptual:
    """Load a public encoder for inference.

    - source: a name of `PERCEPTUAL`; the name of a file NAME.safetensors in a folder that `find_weights` searches; the
      path of a published weight file (identified by SHA-256) or of a file of `save_perceptual`; or `sha256:` and at
      least 8 digits.
    - device: default "cpu".
    - dtype: precision of the network, default float32.
    """
    card, path = _resolve(source)
    network = ENCODER_NETWORKS[card.network]()
    load_weights(network, path, skip=CLASSIFIER_PREFIXES)
    perceptual = Perceptual(card, network, sha256_of(path))
    perceptual.network.to(dtype)
    return perceptual.to(device)


def save_perceptual(path: str | Path, card: PerceptualCard, state: Mapping[str, torch.Tensor]) -> None:
    """Write the state dict of a network and its card to a safetensors file."""
    with torch.device("meta"):
        check_fit(ENCODER_NETWORKS[card.network](), state, f"the state dict for {path}", CLASSIFIER_PREFIXES)
    save_with_card(Path(path), state, asdict(card))


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
            "reinstall sfumato, or train the encoder with sfumato.features.train_encoder"
        )
    nearest = get_close_matches(name.lower(), PERCEPTUAL, n=1, cutoff=0.0)[0]
    raise DataError(
        f"unknown encoder {name!r}; did you mean {nearest!r}? (available: {', '.join(PERCEPTUAL)}; or a path)"
    )


def _by_checksum(digits: str) -> tuple[PerceptualCard, Path]:
    if not re.fullmatch(r"[0-9a-f]{8,64}", digits):
        raise DataError(f"sha256:{digits} is not a SHA-256 checksum; expected 8 to 64 hexadecimal digits")
    for card, weights in PUBLISHED.values():
        if weights.sha256[:8] == digits[:8]:
            path = find_weights(weights)
            if sha256_of(path).startswith(digits):
                return card, path
    path = find_by_checksum(digits)
    return _card_of(path), path


def _card_of(path: Path) -> PerceptualCard:
    """Return the card of a weight file, from its metadata or by its checksum."""
    if path.suffix == SAFETENSORS:
        metadata = read_card(path)
        try:
            return PerceptualCard(**{**metadata, "mean": tuple(metadata["mean"]), "std": tuple(metadata["std"])})
        except (KeyError, TypeError, DataError) as error:
            raise DataError(f"the card in {path} is incomplete or invalid: {error}") from error
    if not path.is_file():
        raise DataError(f"there is no weight file {path}")
    digest = sha256_of(path)
    for card, weights in PUBLISHED.values():
        if digest.startswith(weights.sha256):
            return card
    raise DataError(
        f"{path} is not a published weight file (its SHA-256 starts with {digest[:8]}), so its training data and "
        "normalisation are unknown; write it with save_perceptual, which stores them"
    )
