"""Spaces in which the network of a prior draws: pixels in its own channels, or latents of an autoencoder (*maps*).

Private images are encoded through `Vault.map`: each by itself, by a public network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from sfumato.features.embedding import with_channels
from sfumato.features.public_autoencoder import CLAMP, ENCODER_SCALE, Autoencoder, latent_shape

Shape = tuple[int, int, int]
IMAGES_PER_BATCH = 32  # of an autoencoder


class DrawingSpace(ABC):
    """Convert images [N, C, H, W] in [-1, 1] to what a network draws, and back.

    - shape: of images.
    - maps: shape of what the network draws.
    - limit: its largest absolute value.
    - changes: whether maps differ from images.
    - facts: description of the autoencoder for certificates; None: there is none.
    """

    limit: float = 1.0
    changes: bool = True
    facts: Mapping[str, Any] | None = None

    def __init__(self, shape: Shape, maps: Shape) -> None:
        self.shape, self.maps = shape, maps

    @abstractmethod
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Return maps of images."""

    @abstractmethod
    def decode(self, maps: torch.Tensor) -> torch.Tensor:
        """Return images of maps."""


class Pixels(DrawingSpace):
    """No autoencoder: maps are images with the channels of the prior.

    A grey image has three equal channels for a prior of colour images, whose noise differs from channel to channel: a
    network of one channel, with the mean of the weights, would see too little noise and leave it in the image.

    - channels: of the prior; None (default): those of the images.
    """

    def __init__(self, shape: Shape, channels: int | None = None) -> None:
        super().__init__(shape, (channels or shape[0], *shape[1:]))
        self.changes = self.maps != shape

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return with_channels(images, self.maps[0])

    def decode(self, maps: torch.Tensor) -> torch.Tensor:
        return with_channels(maps, self.shape[0])


class PublicAutoencoderMaps(DrawingSpace):
    """The maps of TAEF2 (`features/public_autoencoder.py`): 32 channels, an eighth of the side."""

    limit = CLAMP / ENCODER_SCALE  # the decoder clamps there

    def __init__(self, shape: Shape, autoencoder: Autoencoder) -> None:
        super().__init__(shape, latent_shape(shape))
        self.autoencoder, self.facts = autoencoder, autoencoder.facts

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.encode(images)

    @torch.no_grad()
    def decode(self, maps: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.decode(maps, self.shape).clamp(-1, 1)
