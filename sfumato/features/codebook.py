"""Soft vector quantisation of the features of a public network.

The features come from the encoder of a public autoencoder, or from an activation of a public classifier
(`load_perceptual`). The codebook is the result of k-means on the features of random smooth images, so it contains no
private data. Each codebook entry has a standard normal embedding vector. Therefore Gaussian noise can replace a missing
code without a change of scale.

The assignment is soft. A hard assignment would turn rounding differences between devices into different codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.perceptual import load_perceptual
from sfumato.features.public_autoencoder import NAMES, load_autoencoder

ENTRIES = 256
WIDTH = 16  # channels of a code: the dimension of the embedding vectors
SMOOTH_IMAGES = 256  # random images for k-means
KMEANS_ITERATIONS = 10
TEMPERATURE = 0.1  # of the soft assignment, in units of the mean squared distance to the nearest entry
BATCH_SIZE = 32


class CodebookEncoder(nn.Module):
    """Map images [N, C, H, W] in [-1, 1] to codes [N, 16, *size].

    - source: name of a public autoencoder, or an encoder that `load_perceptual` accepts.
    - shape: channels, height and width of the images.
    - size: height and width of the codes.
    - device: of the network and the codebook.
    """

    entries: torch.Tensor
    embeddings: torch.Tensor
    mean_squared_distance: torch.Tensor

    def __init__(self, source: str, shape: tuple[int, int, int], size: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        self.size = size
        self._maps = _feature_maps(source, shape, size, device)
        generator = torch.Generator().manual_seed(0)  # constant: every installation gets the same codebook
        with torch.no_grad():
            images = _smooth_images(shape, generator).to(device)
            vectors = torch.cat([self._vectors(batch).flatten(0, 1) for batch in images.split(BATCH_SIZE)])
            entries = vectors[torch.randperm(len(vectors), generator=generator)[:ENTRIES].to(device)]
            for _ in range(KMEANS_ITERATIONS):
                assignment = functional.one_hot(torch.cdist(vectors, entries).argmin(1), len(entries)).to(vectors)
                count = assignment.sum(0)[:, None]
                entries = torch.where(count > 0, assignment.T @ vectors / count.clamp_min(1), entries)
            distance = torch.cdist(vectors, entries).min(1).values.square().mean().clamp_min(1e-12)
        self.register_buffer("entries", entries)
        self.register_buffer("mean_squared_distance", distance)
        self.register_buffer("embeddings", torch.randn(len(entries), WIDTH, generator=generator).to(device))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        vectors = self._vectors(images)
        squares = vectors.square().sum(-1, keepdim=True) - 2 * vectors @ self.entries.T + self.entries.square().sum(-1)
        assignment = torch.softmax(-squares / (TEMPERATURE * self.mean_squared_distance), -1)
        codes: torch.Tensor = (assignment @ self.embeddings).mT.unflatten(2, self.size)
        return codes

    def _vectors(self, images: torch.Tensor) -> torch.Tensor:
        """Return the feature vectors of all positions, [N, positions, channels]."""
        return functional.interpolate(self._maps(images).float(), self.size, mode="nearest").flatten(2).mT


def facts(source: str) -> dict[str, Any]:
    """Return the certificate's description of the public network."""
    return load_autoencoder().facts if source in NAMES else load_perceptual(source).facts


def _feature_maps(
    source: str, shape: tuple[int, int, int], size: tuple[int, int], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the network's function from images to feature maps, at the resolution nearest to `size`."""
    if source in NAMES:
        return load_autoencoder(device).encode
    encoder = load_perceptual(source, device)
    heights = [maps_shape[1] for maps_shape in encoder.shapes(shape)]
    layer = min(range(len(heights)), key=lambda layer: (abs(heights[layer] - size[0]), -layer))
    return lambda images: encoder(images)[layer]


def _smooth_images(shape: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw random images: multi-scale noise, strongest at coarse scales; tanh saturates some regions."""
    total = torch.zeros(SMOOTH_IMAGES, *shape)
    for side in (2, 4, 8, 16):
        noise = torch.randn(SMOOTH_IMAGES, shape[0], side, side, generator=generator)
        total += functional.interpolate(noise, shape[1:], mode="bicubic", align_corners=False) * (2 / side) ** 0.5
    shift = torch.randn(SMOOTH_IMAGES, 1, 1, 1, generator=generator)
    return torch.tanh(2 * (total + shift))
