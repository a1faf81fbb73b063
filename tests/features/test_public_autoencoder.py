"""TAEF2: shapes, row independence, and reconstruction if the weights are available."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import DataError
from sfumato.features.public_autoencoder import CHANNELS, ENCODER, Autoencoder, latent_shape, load_autoencoder
from sfumato.features.weights import find_weights


def test_latent_shape_and_row_independence() -> None:
    torch.manual_seed(0)
    network, images = Autoencoder().eval(), torch.rand(3, 3, 32, 24) * 2 - 1
    with torch.no_grad():
        latents = network.encode(images)
        assert latents.shape == (3, CHANNELS, 4, 3)
        assert latent_shape((3, 31, 20)) == latent_shape((1, 32, 24)) == latents.shape[1:]
        assert network.decode(latents, (3, 32, 24)).shape == images.shape
        assert network.decode(latents, (1, 31, 20)).shape == (3, 1, 31, 20)
        assert torch.allclose(network.encode(images[1:2]), latents[1:2], atol=1e-5)
        assert torch.allclose(network.encode(images[:, :1]), network.encode(images[:, :1].expand(-1, 3, -1, -1)))


def test_number_of_parameters() -> None:
    network = Autoencoder()
    assert [sum(p.numel() for p in part.parameters()) for part in (network.encoder, network.decoder)] == [
        1_338_528,
        1_338_499,
    ]


def test_reconstruction() -> None:
    """Needs the weights in $SFUMATO_WEIGHTS or in the cache; they are not part of the package."""
    try:
        find_weights(ENCODER.__class__(ENCODER.file, ENCODER.sha256))  # without address: tests do not download
    except DataError:
        pytest.skip("the weights of TAEF2 are not available")
    network = load_autoencoder()
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij")
    image = torch.stack([(3 * rows).sin(), (4 * columns).cos(), rows * columns])[None]
    with torch.no_grad():
        decoded = network.decode(network.encode(image), (3, 128, 128))
    assert float((decoded - image).square().mean()) < 4 / 10**3  # 30 dB
    assert set(network.facts) == {"name", "sha256", "trained_on", "licence"}
