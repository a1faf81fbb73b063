"""TAEF2, a small public autoencoder of the TAESD family (Ollin Boer Bohan, MIT licence).

It maps images to latents of an eighth of their size and back. Blocks have three convolutions of width 64; at the lowest
resolution they also have a branch with group norm. No layer mixes the images of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfumato.features.weights import Weights, find_weights, load_weights, sha256_of

NAMES = ("taef2",)
CHANNELS, DOWNSAMPLING = 32, 8
WIDTH, CLAMP = 64, 3.0
ENCODER_SCALE = 2.0  # divides the latents; their standard deviation is then about 0.4 on photographs and scans
LATENT_SCALE = 1.5  # range of a generator's latents: it clips about 0.1 % of the values, which costs at most 0.2 dB
BATCH_SIZE = 32  # limits memory: an image of 256 pixels needs 17 MB per layer
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
    """Encode images [N, 1 or 3, H, W] in [-1, 1] to latents [N, 32, H/8, W/8], and decode latents."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(_conv(3), _Block(), *_down(), *_down(), *_down(pool=True), _conv(outputs=CHANNELS))
        self.decoder = nn.Sequential(
            _Clamp(),
            _conv(CHANNELS),
            nn.ReLU(),
            *(_Block(pool=True) for _ in range(3)),
            *_up(),
            *_up(),
            nn.Upsample(scale_factor=2),
            _conv(bias=False),
            _Block(),
            _conv(outputs=3),
        )
        self.sha256: tuple[str, str] = ("", "")

    @property
    def facts(self) -> dict[str, Any]:
        """Return the certificate's description of the network."""
        return {
            "name": "taef2",
            "sha256": list(self.sha256),
            "trained_on": "not stated by its author",
            "licence": "MIT",
        }

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Return the latents of images; grey images are repeated to three channels."""
        latents = [self.encoder((batch.expand(-1, 3, -1, -1) + 1) / 2) for batch in images.split(BATCH_SIZE)]
        return torch.cat(latents) / ENCODER_SCALE

    def decode(self, latents: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return images, cropped to `shape`; the mean over the channels if `shape` has one channel."""
        channels, height, width = shape
        images = torch.cat([self.decoder(batch * ENCODER_SCALE) * 2 - 1 for batch in latents.split(BATCH_SIZE)])
        images = images[:, :, :height, :width]
        return images if channels == 3 else images.mean(1, keepdim=True)


def latent_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the shape of the latents of images of `shape`."""
    _, height, width = shape
    return CHANNELS, -(-height // DOWNSAMPLING), -(-width // DOWNSAMPLING)


def load_autoencoder(device: str | torch.device = "cpu", folder: str | Path | None = None) -> Autoencoder:
    """Load TAEF2 for inference, with weights from `folder` or from where `find_weights` looks."""
    network = Autoencoder()
    files = (ENCODER, DECODER)
    paths = [find_weights(weights, None if folder is None else Path(folder) / weights.file) for weights in files]
    for half, path in zip((network.encoder, network.decoder), paths, strict=True):
        load_weights(half, path)
    network.sha256 = (sha256_of(paths[0]), sha256_of(paths[1]))
    return network.eval().requires_grad_(False).to(device)


class _Block(nn.Module):
    """Residual block of three convolutions; `pool` adds a 1×1 bottleneck with group norm."""

    def __init__(self, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(), nn.ReLU(), _conv(), nn.ReLU(), _conv())
        self.has_pool = pool
        if pool:
            expand, reduce = (nn.Conv2d(a, b, 1, bias=False) for a, b in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
            self.pool = nn.Sequential(expand, nn.GroupNorm(4, 4 * WIDTH), nn.ReLU(), reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.has_pool:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + x)


class _Clamp(nn.Module):
    """Smooth clamp to [-3, 3]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / CLAMP) * CLAMP


def _conv(inputs: int = WIDTH, outputs: int = WIDTH, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias)


def _down(pool: bool = False) -> list[nn.Module]:
    """Return a convolution of stride 2 and three blocks."""
    return [_conv(stride=2, bias=False), *(_Block(pool) for _ in range(3))]


def _up() -> list[nn.Module]:
    """Return an upsampling by 2, a convolution and three blocks."""
    return [nn.Upsample(scale_factor=2), _conv(bias=False), *(_Block() for _ in range(3))]
