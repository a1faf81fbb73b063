"""TAEF2: shapes and rows without its weights; with them, wherever they are found, what it makes of an image."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import DataError
from sfumato.encoders.autoencoder import CHANNELS, ENCODER, Autoencoder, load_autoencoder, maps_shape
from sfumato.encoders.weights import find_weights


def test_maps_are_an_eighth_and_rows_do_not_meet() -> None:
    torch.manual_seed(0)
    network, images = Autoencoder().eval(), torch.rand(3, 3, 32, 24) * 2 - 1
    with torch.no_grad():
        maps = network.encode(images)
        assert maps.shape == (3, CHANNELS, 4, 3)
        assert maps_shape((3, 31, 20)) == maps_shape((1, 32, 24)) == maps.shape[1:]
        assert network.decode(maps, (3, 32, 24)).shape == images.shape
        assert network.decode(maps, (1, 31, 20)).shape == (3, 1, 31, 20)
        assert torch.allclose(network.encode(images[1:2]), maps[1:2], atol=1e-5)
        assert torch.allclose(network.encode(images[:, :1]), network.encode(images[:, :1].expand(-1, 3, -1, -1)))


def test_the_published_layout_has_its_numbers_of_parameters() -> None:
    network = Autoencoder()
    assert [sum(p.numel() for p in part.parameters()) for part in (network.encoder, network.decoder)] == [
        1_338_528,
        1_338_499,
    ]


def test_it_makes_an_image_of_its_maps() -> None:
    """Needs the weights, which are not shipped ($SFUMATO_WEIGHTS, or the cache)."""
    try:
        find_weights(ENCODER.__class__(ENCODER.file, ENCODER.sha256))  # no address: nothing is downloaded by a test
    except DataError:
        pytest.skip("the weights of TAEF2 are not on this machine")
    network = load_autoencoder()
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij")
    image = torch.stack([(3 * rows).sin(), (4 * columns).cos(), rows * columns])[None]
    with torch.no_grad():
        again = network.decode(network.encode(image), (3, 128, 128))
    assert float((again - image).square().mean()) < 4 / 10**3  # 30 dB
    assert set(network.facts) == {"name", "sha256", "trained_on", "licence"}
