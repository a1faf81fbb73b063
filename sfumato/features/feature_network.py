"""Features of the fidelity scores (FID, KID, Inception Score), from Inception-v3 or EfficientNet-Lite0.

A `FeatureNetwork` is a network with its card, which states training data and preprocessing. `features` processes the
images in batches, so memory grows with the number of features only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional

from sfumato.data import DataError, ImageSet
from sfumato.features import efficientnet, inception
from sfumato.features.efficientnet import EfficientNetLite0
from sfumato.features.inception import Inception, load_inception
from sfumato.features.weights import Weights, find_weights, load_weights
from sfumato.progress import bar

Resize = Literal["tf", "pytorch", "clean"]
BATCH_CPU, BATCH_GPU = 8, 256  # on a CPU a batch of 8 fits into the cache: twice as fast as 64


@dataclass(frozen=True)
class Card:
    """Origin and preprocessing of a feature network. Distances under different preprocessing are not comparable.

    - name: key in `CARDS`.
    - trained_on: training data and publisher.
    - licence: of the weights.
    - size: pixels per side after resizing.
    - dimension: number of features.
    - classes: number of logits.
    - resize: `tf`: bilinear of TensorFlow 1 (no half-pixel shift, no antialiasing), as in the original FID code;
      `pytorch`: bilinear with half-pixel centres and no antialiasing, as in pytorch-fid; `clean`: antialiased bicubic,
      as in Pillow (Parmar et al. 2022, "On Aliased Resizing").
    - mean, scale: the network input is (pixel - mean) / scale for pixels in 0..255.
    - weights: the published weight file.
    - architecture: the network class.
    - load: loads a weight file into the network.
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
    load: Callable[[Any, Path], None] = load_weights


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
    load=load_inception,
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
class FeatureNetwork:
    """A network for inference, from pixels [B, 3, size, size] to features [B, D] and logits [B, K], with its card.

    The logits are None if the weight file has no classifier.
    """

    card: Card
    network: torch.nn.Module

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Return the network input for uint8 images [B, C, H, W]; grey images are repeated to three channels."""
        pixels = (resized(images.float(), self.card.size, self.card.resize) - self.card.mean) / self.card.scale
        return pixels.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class Features:
    """Features of an image set.

    - network: name of the feature network.
    - values: float32 [N, D].
    - probabilities: class probabilities [N, K], or None.
    """

    network: str
    values: torch.Tensor
    probabilities: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


def load_feature_network(name: str, weights: str | Path | None = None) -> FeatureNetwork:
    """Load a feature network with its published weights, from the file `weights` or from where `find_weights` looks."""
    if name not in CARDS:
        nearest = get_close_matches(name.lower(), CARDS, n=1, cutoff=0.0)[0]
        raise DataError(f"unknown feature network {name!r}; did you mean {nearest!r}? (available: {', '.join(CARDS)})")
    card = CARDS[name]
    network = card.architecture()
    card.load(network, find_weights(card.weights, weights))
    network.eval().requires_grad_(False).fold()
    return FeatureNetwork(card, network.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def features(
    images: ImageSet,
    network: str | FeatureNetwork = "effnet_lite0",
    *,
    device: str | torch.device = "cpu",
    batch_size: int | None = None,
    probabilities: bool = False,
    progress: bool = True,
    tf32: bool = False,
) -> Features:
    """Return the features of all images, in order, computed in float32.

    - images: the image set.
    - network: name of a feature network, default `effnet_lite0`, or a loaded one.
    - device: where the network runs, default "cpu".
    - batch_size: default 8 on a CPU, 256 on a GPU.
    - probabilities: also return class probabilities, if the network has a classifier; default False.
    - progress: show a progress bar, default True.
    - tf32: allow TF32 convolutions on a GPU, as PyTorch does by default: several times as fast; default False.
    """
    encoder = load_feature_network(network) if isinstance(network, str) else network
    if batch_size is None:
        batch_size = BATCH_CPU if torch.device(device).type == "cpu" else BATCH_GPU
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, got {batch_size}")
    model = encoder.network.to(device)
    values = torch.empty(len(images), encoder.card.dimension)
    classes: list[torch.Tensor] = []
    precision = torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32)
    with torch.inference_mode(), precision, bar("features") if progress else nullcontext(lambda *_: None) as advance:
        for start in range(0, len(images), batch_size):
            batch = images.images[start : start + batch_size].to(device)
            outputs, logits = model(encoder.prepare(batch))
            values[start : start + batch_size] = outputs.float().cpu()
            if probabilities and logits is not None:
                classes.append(logits.float().softmax(1).cpu())
            advance(min(start + batch_size, len(images)), len(images))
    return Features(encoder.card.name, values, torch.cat(classes) if classes else None)


def resized(pixels: torch.Tensor, size: int, resize: Resize) -> torch.Tensor:
    """Resize float pixels in 0..255 to `size` × `size`, as `Card` describes."""
    if resize == "tf":
        rows, columns = (_bilinear(length, size).to(pixels) for length in pixels.shape[2:])
        return rows @ pixels @ columns.T
    if resize == "pytorch":
        return functional.interpolate(pixels, (size, size), mode="bilinear", align_corners=False)
    bicubic = functional.interpolate(pixels, (size, size), mode="bicubic", align_corners=False, antialias=True)
    return bicubic.clamp(0, 255)


def _bilinear(length: int, size: int) -> torch.Tensor:
    """Return TensorFlow 1's interpolation weights [size, length]: output i samples position i * length / size."""
    position = torch.arange(size, dtype=torch.float32) * (length / size)
    low = position.long().clamp(max=length - 1)
    high = (low + 1).clamp(max=length - 1)
    fraction = (position - low)[:, None]
    return functional.one_hot(low, length) * (1 - fraction) + functional.one_hot(high, length) * fraction
