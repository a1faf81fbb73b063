"""What the tests of methods share."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

from sfumato.data import ImageSet
from sfumato.features import PerceptualCard, save_perceptual
from sfumato.features.perceptual import ENCODER_NETWORKS
from sfumato.features.public_autoencoder import CHANNELS, DOWNSAMPLING

CARD = PerceptualCard("tiny", "small", "random numbers", "Apache-2.0", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small network with random weights, as a file with its card."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = ENCODER_NETWORKS["small"]().state_dict()
    path = tmp_path_factory.mktemp("encoder") / "tiny.safetensors"
    save_perceptual(path, CARD, state)
    return str(path)


class Averages:
    """In the place of TAEF2, whose weights are not shipped: means of two pixels, those of a square as channels."""

    facts: ClassVar[dict[str, Any]] = {"name": "averages"}

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        rows = functional.avg_pool2d(images.mean(1), (2, 1))
        squares = rows.unflatten(2, (-1, DOWNSAMPLING)).unflatten(1, (-1, CHANNELS // DOWNSAMPLING))
        return squares.permute(0, 2, 4, 1, 3).flatten(1, 2)

    def decode(self, maps: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        squares = maps.unflatten(1, (-1, DOWNSAMPLING)).permute(0, 3, 1, 4, 2)
        images = squares.flatten(3, 4).flatten(1, 2).repeat_interleave(2, 1)
        return images[:, None].expand(-1, shape[0], -1, -1)


@pytest.fixture
def averages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kernel_painter", "atelier"):
        monkeypatch.setattr(f"sfumato.methods.{module}.load_autoencoder", lambda device="cpu": Averages())


def enlarged(images: ImageSet, times: int) -> ImageSet:
    """Each pixel a square."""
    pixels = images.images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    return ImageSet(pixels, images.labels, images.classes)


@pytest.fixture(scope="session")
def large_digits(few_digits: ImageSet) -> ImageSet:
    """Sixty-one digits of 64 pixels a side."""
    return enlarged(few_digits, 8)


@pytest.fixture(scope="session")
def fewer_large_digits(fewer_digits: ImageSet) -> ImageSet:
    return enlarged(fewer_digits, 8)
