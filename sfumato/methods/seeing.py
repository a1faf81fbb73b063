"""What painters and teachers see in images: maps as vectors of norm one, by wavelets, or by networks that are public.

A network is public if it comes with the package or from its user, or if it was taught by generated images only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from sfumato.encoders import Perceptual
from sfumato.encoders.autoencoder import REACH, Autoencoder
from sfumato.encoders.scattering import Scattering
from sfumato.nets.classifiers import small_cnn

GROUP = 3  # scattering channels that are normalised together
MAP_GROUP = 4  # maps of a network that are normalised together
LEAST_ACROSS = 4  # pixels of an encoder's map
LESSON_EPOCHS = 3  # how often a network sees the images that it is taught on


class Maps(nn.Module):
    """Maps of a network as vectors of norm one: normalised in small groups, divided by the root of their number."""

    def __init__(self, maps: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.maps(images)
        groups = max(1, maps.shape[1] // MAP_GROUP)
        return functional.group_norm(maps, groups).flatten(1) / math.sqrt(maps[0].numel())


class Encoded(Maps):
    """What a public network sees: the last of its activations that still says where.

    Images that are less than `enlarged` pixels across are enlarged to that first.
    """

    def __init__(self, encoder: Perceptual, shape: tuple[int, int, int], enlarged: int = 0) -> None:
        channels, *size = shape
        height, width = (max(side, side * enlarged // min(size)) for side in size)
        sides = [min(of[1:]) for of in encoder.shapes((channels, height, width))]
        last = max(place for place, side in enumerate(sides) if side >= min(LEAST_ACROSS, max(sides)))

        def maps(images: torch.Tensor) -> torch.Tensor:
            if [height, width] != size:
                images = functional.interpolate(images, (height, width), mode="bilinear")
            seen: list[torch.Tensor] = encoder(images)
            return seen[last]

        super().__init__(maps)


class Taught(Maps):
    """What a small CNN sees after it has learned to tell public images apart: its last maps."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, classes: int, generator: torch.Generator) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))
            network = small_cnn((images.shape[1], images.shape[2], images.shape[3]), classes).to(images.device)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for _ in range(LESSON_EPOCHS):
            order = torch.randperm(len(images), generator=generator, device=images.device)
            for index in torch.split(order, 256):
                optimizer.zero_grad()
                functional.cross_entropy(network(images[index]), labels[index]).backward()
                optimizer.step()
        super().__init__(body(network).eval().requires_grad_(False))


def untaught(shape: tuple[int, int, int], classes: int) -> Maps:
    """A network of the kind of `Taught`, whose weights are still to be loaded."""
    with torch.random.fork_rng(devices=[]):
        return Maps(body(small_cnn(shape, classes)).eval().requires_grad_(False))


def body(network: nn.Module) -> nn.Sequential:
    """The layers of a CNN that give maps."""
    layers = list(network.children())
    return nn.Sequential(*layers[: next(place for place, layer in enumerate(layers) if isinstance(layer, nn.Flatten))])


class Vectors(nn.Module):
    """Images as vectors: scattering coefficients, then pixels; each of norm one, or below.

    Coefficients are normalised in small groups of channels, to zero mean and unit variance, and divided by the root of
    their number, which is public; pixels by the root of theirs.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *size = shape
        self.transform = Scattering((size[0], size[1]))
        self.maps = (channels * self.transform.channels, size[0] // 4, size[1] // 4)
        self.groups = max(1, self.maps[0] // GROUP)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, coefficients + pixels]."""
        return torch.cat([self.scattering(images), self.pixels(images)], 1)

    def scattering(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.transform(images).flatten(1, 2)
        return functional.group_norm(maps, self.groups).flatten(1) / math.sqrt(math.prod(self.maps))

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) / math.sqrt(images[0].numel())


def scaled_maps(autoencoder: Autoencoder, images: torch.Tensor) -> torch.Tensor:
    """Maps of images within [-1, 1], as a generator paints them: scaled by a public number, and cut."""
    with torch.no_grad():
        return (autoencoder.encode(images) / REACH).clamp(-1, 1)
