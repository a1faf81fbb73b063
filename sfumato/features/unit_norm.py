"""Feature vectors of norm at most 1, from wavelet scattering, pixels or public networks.

A network is public if its weights are part of the package or given by the user, or if it was trained on generated
images only. `Components` projects such vectors on partially whitened principal components of public ones, so that
gradients converge at similar speeds in all directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.perceptual import Perceptual
from sfumato.features.public_autoencoder import LATENT_SCALE, Autoencoder
from sfumato.features.scattering import Scattering
from sfumato.nets.classifiers import small_cnn

SCATTERING_GROUP = 3  # channels per group of the group norm of scattering coefficients
MAP_GROUP = 4  # channels per group of the group norm of network activations
MIN_MAP_SIDE = 4  # pixels: smallest activation of an encoder that is used
EPOCHS, BATCH_SIZE, LEARNING_RATE = 3, 256, 1e-3  # training of `CNNFeatures`
WHITENING, MIN_SPREAD = 0.5, 1e-4  # exponent: 0 leaves the components' spreads as they are, 1 makes them equal
TINY = 1e-12  # where all rows are equal


class UnitNormMaps(nn.Module):
    """Group-normalised feature maps, flattened and divided by the square root of their length.

    - maps: row-wise function from images to feature maps [N, C, H, W].
    """

    def __init__(self, maps: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.maps(images)
        groups = max(1, maps.shape[1] // MAP_GROUP)
        return functional.group_norm(maps, groups).flatten(1) / math.sqrt(maps[0].numel())


class EncoderFeatures(UnitNormMaps):
    """The last activation of a public network that is at least 4 pixels per side.

    - encoder: the network.
    - shape: channels, height and width of the images.
    - min_side: images whose shorter side is smaller are enlarged to this many pixels; 0 (default): no enlargement.
    """

    def __init__(self, encoder: Perceptual, shape: tuple[int, int, int], min_side: int = 0) -> None:
        channels, *size = shape
        height, width = (max(side, side * min_side // min(size)) for side in size)
        sides = [min(maps_shape[1:]) for maps_shape in encoder.shapes((channels, height, width))]
        last = max(layer for layer, side in enumerate(sides) if side >= min(MIN_MAP_SIDE, max(sides)))

        def maps(images: torch.Tensor) -> torch.Tensor:
            if [height, width] != size:
                images = functional.interpolate(images, (height, width), mode="bilinear")
            activations: list[torch.Tensor] = encoder(images)
            return activations[last]

        super().__init__(maps)


class CNNFeatures(UnitNormMaps):
    """The last feature maps of a small CNN, trained here as a classifier of public (generated) images.

    - images: [N, C, H, W] in [-1, 1].
    - labels: [N].
    - classes: number of classes.
    - generator: draws the initial weights and the order of the images.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, classes: int, generator: torch.Generator) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))
            network = small_cnn((images.shape[1], images.shape[2], images.shape[3]), classes).to(images.device)
        optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
        for _ in range(EPOCHS):
            order = torch.randperm(len(images), generator=generator, device=images.device)
            for index in torch.split(order, BATCH_SIZE):
                optimizer.zero_grad()
                functional.cross_entropy(network(images[index]), labels[index]).backward()
                optimizer.step()
        super().__init__(_convolutional_layers(network).eval().requires_grad_(False))


def untrained_cnn_features(shape: tuple[int, int, int], classes: int) -> UnitNormMaps:
    """Return a network with the architecture of `CNNFeatures`, whose weights are to be loaded."""
    with torch.random.fork_rng(devices=[]):
        return UnitNormMaps(_convolutional_layers(small_cnn(shape, classes)).eval().requires_grad_(False))


class ScatteringAndPixels(nn.Module):
    """Scattering coefficients and pixels as vectors of norm at most 1 each, concatenated.

    Scattering coefficients are group-normalised. Both vectors are divided by the square root of their length, which is
    public.

    - shape: channels, height and width of the images.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *size = shape
        self.transform = Scattering((size[0], size[1]))
        self.maps = (channels * self.transform.channels, size[0] // 4, size[1] // 4)  # shape of the coefficients
        self.groups = max(1, self.maps[0] // SCATTERING_GROUP)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return both vectors, [N, coefficients + pixels]."""
        return torch.cat([self.scattering(images), self.pixels(images)], 1)

    def scattering(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised scattering coefficients, [N, coefficients]."""
        maps = self.transform(images).flatten(1, 2)
        return functional.group_norm(maps, self.groups).flatten(1) / math.sqrt(math.prod(self.maps))

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scaled pixels, [N, pixels]."""
        return images.flatten(1) / math.sqrt(images[0].numel())


def scaled_latents(autoencoder: Autoencoder, images: torch.Tensor) -> torch.Tensor:
    """Return the latents of images, divided by `LATENT_SCALE` and clipped to the range [-1, 1] of a generator."""
    with torch.no_grad():
        return (autoencoder.encode(images) / LATENT_SCALE).clamp(-1, 1)


def _convolutional_layers(network: nn.Module) -> nn.Sequential:
    """Return the layers of a CNN before the first `nn.Flatten`."""
    layers = list(network.children())
    return nn.Sequential(*layers[: next(i for i, layer in enumerate(layers) if isinstance(layer, nn.Flatten))])


@dataclass(frozen=True)
class Components:
    """Partially whitened principal components of public rows, scaled so that rows have a mean norm of one."""

    centre: torch.Tensor
    axes: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, count: int, seed: int) -> Components:
        """Return at most `count` components of these rows."""
        centre = rows.mean(0)
        count = min(count, *rows.shape)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed)
            _, spread, axes = torch.svd_lowrank(rows - centre, count, niter=2)
        axes = axes * (spread / spread[0].clamp_min(TINY)).clamp_min(MIN_SPREAD) ** -WHITENING
        return cls(centre, axes / ((rows - centre) @ axes).norm(dim=1).mean().clamp_min(TINY))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = (rows - self.centre) @ self.axes
        return projected
