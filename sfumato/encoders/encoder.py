"""Images to features: one interface over the feature networks.

An `Encoder` is a network with its card: what it was trained on, and how images are brought to it. `features` streams
images through one in batches, so that memory grows with the features only.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

from sfumato.data import DataError, ImageSet
from sfumato.progress import bar

from . import efficientnet, inception
from .efficientnet import EfficientNetLite0
from .inception import Inception
from .weights import Weights, find_weights, load_weights

Resize = Literal["tf", "pytorch", "clean"]
BATCH_CPU, BATCH_GPU = 8, 256  # a small batch stays in a CPU's caches: measured twice as fast as 64


@dataclass(frozen=True)
class Card:
    """What a network is and how it sees an image: resized to `size` square, then (pixel of 0..255 - mean) / scale.

    Resizing is `tf`, TensorFlow 1's bilinear (no half-pixel shift, no antialias), as in the first FID code;
    `pytorch`, half-pixel bilinear without antialias, as in pytorch-fid; or `clean`, antialiased bicubic as Pillow's
    (Parmar et al. 2022, "On Aliased Resizing"). Distances under different resizing do not compare.
    """

    name: str
    trained_on: str
    licence: str
    size: int
    dimension: int
    classes: int
    resize: Resize
    mean: float
    scale: float
    weights: Weights
    architecture: type[Inception] | type[EfficientNetLite0]


EFFNET_LITE0 = Card(
    name="effnet_lite0",
    trained_on="ImageNet-1k (ILSVRC 2012), by Google, 2020",
    licence="Apache-2.0",
    size=224,
    dimension=1280,
    classes=1000,
    resize="clean",
    mean=127,
    scale=128,
    weights=efficientnet.WEIGHTS,
    architecture=EfficientNetLite0,
)
INCEPTION = Card(
    name="inception",
    trained_on="ImageNet-1k (ILSVRC 2012), by Google, December 2015",
    licence="Apache-2.0",
    size=299,
    dimension=2048,
    classes=1008,
    resize="tf",
    mean=128,
    scale=128,
    weights=inception.WEIGHTS,
    architecture=Inception,
)
CARDS = {
    card.name: card
    for card in (
        EFFNET_LITE0,
        INCEPTION,
        replace(INCEPTION, name="inception_pytorch", resize="pytorch", mean=127.5, scale=127.5),
        replace(INCEPTION, name="inception_clean", resize="clean"),
    )
}


@dataclass(frozen=True, eq=False)
class Encoder:
    """A network in inference form: pixels [B, 3, size, size] to features [B, D] and logits [B, K]."""

    card: Card
    network: torch.nn.Module

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [B, C, H, W] to what the network takes; grey is repeated to three channels."""
        pixels = (resized(images.float(), self.card.size, self.card.resize) - self.card.mean) / self.card.scale
        return pixels.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class Features:
    """Features float32 [N, D] of an image set under one network, and class probabilities [N, K] if asked for."""

    network: str
    values: torch.Tensor
    probabilities: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


def load_encoder(name: str, weights: str | Path | None = None) -> Encoder:
    """The named network with its published weights, from `weights` (a file) or from where `find_weights` finds them."""
    if name not in CARDS:
        near = get_close_matches(name.lower(), CARDS, n=1, cutoff=0.0)
        raise DataError(f"unknown feature network {name!r}; the nearest is {near[0]!r} (all: {', '.join(CARDS)})")
    card = CARDS[name]
    network = card.architecture()
    load_weights(network, find_weights(card.weights, weights))
    network.eval().requires_grad_(False).fold()
    return Encoder(card, network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def features(
    images: ImageSet,
    network: str | Encoder = "effnet_lite0",
    *,
    device: str | torch.device = "cpu",
    batch_size: int | None = None,
    probabilities: bool = False,
    progress: bool = True,
) -> Features:
    """The network's features of every image, in order and in float32 (never TF32), in one pass."""
    encoder = load_encoder(network) if isinstance(network, str) else network
    if batch_size is None:
        batch_size = BATCH_CPU if torch.device(device).type == "cpu" else BATCH_GPU
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, got {batch_size}")
    model = encoder.network.to(device)
    values = torch.empty(len(images), encoder.card.dimension)
    classes = torch.empty(len(images), encoder.card.classes) if probabilities else None
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.inference_mode(), exact, bar("features") if progress else nullcontext(lambda *_: None) as advance:
        for start in range(0, len(images), batch_size):
            batch = images.images[start : start + batch_size].to(device)
            found, logits = model(encoder.prepare(batch))
            values[start : start + batch_size] = found.float().cpu()
            if classes is not None:
                classes[start : start + batch_size] = logits.float().softmax(1).cpu()
            advance(min(start + batch_size, len(images)), len(images))
    return Features(encoder.card.name, values, classes)


def resized(pixels: torch.Tensor, size: int, resize: Resize) -> torch.Tensor:
    """Float pixels of 0..255 at `size` square; `Card` says how."""
    if resize == "tf":
        rows, columns = (_bilinear(length, size).to(pixels) for length in pixels.shape[2:])
        return rows @ pixels @ columns.T
    if resize == "pytorch":
        return functional.interpolate(pixels, (size, size), mode="bilinear", align_corners=False)
    bicubic = functional.interpolate(pixels, (size, size), mode="bicubic", align_corners=False, antialias=True)
    return bicubic.clamp(0, 255)


def _bilinear(length: int, size: int) -> torch.Tensor:
    """Weights [size, length] of TensorFlow 1: output i lies at i * length / size, without the half-pixel shift."""
    place = torch.arange(size, dtype=torch.float32) * (length / size)
    low = place.long().clamp(max=length - 1)
    high = (low + 1).clamp(max=length - 1)
    fraction = (place - low)[:, None]
    return functional.one_hot(low, length) * (1 - fraction) + functional.one_hot(high, length) * fraction
