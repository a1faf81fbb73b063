"""Feature networks: batches, preprocessing, resizing and error messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from sfumato.data import DataError, ImageSet
from sfumato.features import CARDS, FeatureNetwork, features, load_feature_network
from sfumato.features.feature_network import resized


class Projection(nn.Module):
    """A fixed random projection to seven features and three logits."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randn(3 * 8 * 8, 10, generator=generator))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.flatten(1) @ self.weight
        return y[:, :7], y[:, 7:]


@pytest.fixture(scope="module")
def projection() -> FeatureNetwork:
    card = replace(CARDS["effnet_lite0"], name="projection", size=8, dimension=7, classes=3)
    return FeatureNetwork(card, Projection())


def test_features_do_not_depend_on_the_batch_size(digits: ImageSet, projection: FeatureNetwork) -> None:
    some = digits.subset(range(50))
    found = features(some, projection, batch_size=16, probabilities=True)
    assert found.network == "projection"
    assert found.values.shape == (50, 7)
    assert found.values.dtype == torch.float32
    assert found.probabilities is not None
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(50))
    torch.testing.assert_close(found.values, features(some, projection, batch_size=50).values)
    reverse = features(some.subset(range(49, -1, -1)), projection, batch_size=7)
    torch.testing.assert_close(reverse.values.flip(0), found.values)
    assert reverse.probabilities is None


def test_grey_is_repeated_to_three_channels(digits: ImageSet, projection: FeatureNetwork) -> None:
    grey = digits.subset(range(5))
    coloured = ImageSet(grey.images.expand(-1, 3, -1, -1).contiguous())
    torch.testing.assert_close(features(grey, projection).values, features(coloured, projection).values)


def test_pixels_are_normalised() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 5, 5)
    for name, low, high in (
        ("effnet_lite0", -127 / 128, 1.0),
        ("inception", -1.0, 127 / 128),
        ("inception_pytorch", -1.0, 1.0),
    ):
        pixels = FeatureNetwork(CARDS[name], nn.Identity()).prepare(images)
        size = CARDS[name].size
        assert pixels.shape == (2, 3, size, size)
        torch.testing.assert_close(pixels[0], torch.full((3, size, size), low))
        torch.testing.assert_close(pixels[1], torch.full((3, size, size), high))


def test_clean_resizing_equals_pillow(digits: ImageSet) -> None:
    for size in (3, 21):  # reduction and enlargement of 8 pixels
        pixels = digits.images[:3].float()
        for found, image in zip(resized(pixels, size, "clean"), pixels, strict=True):
            expected = Image.fromarray(image[0].numpy()).resize((size, size), Image.Resampling.BICUBIC)
            np.testing.assert_allclose(found[0].numpy(), np.asarray(expected).clip(0, 255), atol=1e-3)


def test_tensorflow_resizing_has_no_half_pixel_shift() -> None:
    pixels = torch.tensor([[0.0, 100.0], [0.0, 100.0]])[None, None]
    assert resized(pixels, 4, "tf")[0, 0, 0].tolist() == [0, 50, 100, 100]
    assert resized(pixels, 4, "pytorch")[0, 0, 0].tolist() == [0, 25, 75, 100]
    checkerboard = (torch.arange(8)[:, None] + torch.arange(8)) % 2 * 100.0
    assert resized(checkerboard[None, None], 4, "tf").unique().tolist() == [0]  # aliasing, as in the original


def test_invalid_arguments_raise_errors(digits: ImageSet) -> None:
    with pytest.raises(DataError, match="unknown feature network 'incepton'; did you mean 'inception'"):
        load_feature_network("incepton")
    with pytest.raises(DataError, match="batch_size"):
        features(digits, FeatureNetwork(CARDS["effnet_lite0"], nn.Identity()), batch_size=0)


def test_efficientnet_features_do_not_depend_on_the_batch_size(digits: ImageSet, effnet: FeatureNetwork) -> None:
    some = digits.subset(range(4))
    found = features(some, effnet, batch_size=3)
    assert found.values.shape == (4, 1280)
    torch.testing.assert_close(found.values, features(some, effnet, batch_size=4).values, atol=1e-4, rtol=1e-4)
