"""Convolutional encoder and decoder: shapes for all image sizes."""

from __future__ import annotations

import pytest
import torch

from sfumato.nets.conv_autoencoder import ConvDecoder, ConvEncoder, halvings


@pytest.mark.parametrize(
    ("shape", "times"), [((1, 28, 28), 2), ((3, 32, 32), 3), ((3, 64, 64), 4), ((1, 256, 256), 6), ((1, 8, 8), 1)]
)
def test_shapes_for_all_image_sizes(shape: tuple[int, int, int], times: int) -> None:
    assert halvings(shape) == times
    images = torch.rand(2, *shape) * 2 - 1
    encoder, decoder = ConvEncoder(shape, code=5, width=4), ConvDecoder(shape, code=5, width=4, context=3)
    codes = encoder(images)
    assert codes.shape == (2, 5)
    assert decoder(codes, torch.eye(3)[:2]).shape == images.shape
    assert ConvDecoder((1, 20, 30), code=5, width=4)(codes).shape == (2, 1, 20, 30)
