"""A small public autoencoder: TAEF2, images to maps of an eighth of their size and back.

Of the family of TAESD (Ollin Boer Bohan, MIT licence): blocks of three convolutions of width 64, and at the smallest
size a branch with a group norm. Everything is row-wise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .weights import Weights, find_weights, load_weights, sha256_of

NAMES = ("taef2",)
CHANNELS, SHRINKING = 32, 8
WIDTH, CLAMP = 64, 3.0
SCALE = 2.0  # maps are divided by it: about 0.4 in scale on photographs and scans
REACH = 1.5  # beyond it, so divided, are about one number in a thousand; cut there, images lose 0.2 dB at most
AT_ONCE = 32  # images that go through it at a time: of 256 pixels, each needs 17 MB for a layer
ADDRESS = "https://github.com/madebyollin/taesd/raw/main/"
ENCODER = Weights(
    "taef2_encoder.pth",
    "10a4e1021e89d7551eaf161352da8dbd0b1aa83872ae28b150c1df1ce2f147b6",
    address=f"{ADDRESS}taef2_encoder.pth",
)
DECODER = Weights(
    "taef2_decoder.pth",
    "0a44a31e1ae59eb9dbf9359d24942fd3ef5928162c1800d97a28c61d51be0ab5",
    address=f"{ADDRESS}taef2_decoder.pth",
)


class Autoencoder(nn.Module):
    """Images [N, 1 or 3, H, W] in [-1, 1] to maps [N, 32, H/8, W/8] of about half scale, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            _conv(3), _Block(), *_stage(1), *_stage(1), *_stage(1, wide=True), _conv(to=CHANNELS)
        )
        self.decoder = nn.Sequential(
            _Clamp(),
            _conv(CHANNELS),
            nn.ReLU(),
            *(_Block(wide=True) for _ in range(3)),
            *_stage(2),
            *_stage(2),
            nn.Upsample(scale_factor=2),
            _conv(bias=False),
            _Block(),
            _conv(to=3),
        )
        self.sha256: tuple[str, str] = ("", "")

    @property
    def facts(self) -> dict[str, Any]:
        """What a certificate says of it."""
        return {
            "name": "taef2",
            "sha256": list(self.sha256),
            "trained_on": "not stated by its author",
            "licence": "MIT",
        }

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        parts = [self.encoder((part.expand(-1, 3, -1, -1) + 1) / 2) for part in images.split(AT_ONCE)]
        return torch.cat(parts) / SCALE

    def decode(self, maps: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Images of `shape`, in grey if it has one channel; what maps of whole pixels have beyond it is cut off."""
        channels, height, width = shape
        images = torch.cat([self.decoder(part * SCALE) * 2 - 1 for part in maps.split(AT_ONCE)])
        images = images[:, :, :height, :width]
        return images if channels == 3 else images.mean(1, keepdim=True)


def maps_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of the maps of images of `shape`."""
    _, height, width = shape
    return CHANNELS, -(-height // SHRINKING), -(-width // SHRINKING)


def load_autoencoder(device: str | torch.device = "cpu", folder: str | Path | None = None) -> Autoencoder:
    """TAEF2 with its weights, from `folder` or where `find_weights` looks; ready for inference."""
    network = Autoencoder()
    paths = [find_weights(of, None if folder is None else Path(folder) / of.file) for of in (ENCODER, DECODER)]
    for part, path in zip((network.encoder, network.decoder), paths, strict=True):
        load_weights(part, path)
    network.sha256 = (sha256_of(paths[0]), sha256_of(paths[1]))
    return network.eval().requires_grad_(False).to(device)


class _Block(nn.Module):
    """Three convolutions, added to their input; with a branch of channels that are normed together, if `wide`."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(), nn.ReLU(), _conv(), nn.ReLU(), _conv())
        if wide:
            outward, inward = (nn.Conv2d(a, b, 1, bias=False) for a, b in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
            self.pool = nn.Sequential(outward, nn.GroupNorm(4, 4 * WIDTH), nn.ReLU(), inward)
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wide:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + x)


class _Clamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / CLAMP) * CLAMP


def _conv(of: int = WIDTH, to: int = WIDTH, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(of, to, 3, stride, 1, bias=bias)


def _stage(doubling: int, wide: bool = False) -> list[nn.Module]:
    """Half the size, or (`doubling` 2) twice, then three blocks."""
    first = [_conv(stride=2, bias=False)] if doubling == 1 else [nn.Upsample(scale_factor=2), _conv(bias=False)]
    return [*first, *(_Block(wide) for _ in range(3))]
