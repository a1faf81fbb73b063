"""The U-Net: any size, row-wise, told of level and class."""

from __future__ import annotations

import pytest
import torch

from sfumato.nets.unet import UNet


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 9, 13)])
def test_images_keep_their_shape(shape: tuple[int, int, int]) -> None:
    network = UNet(shape[0], 4, widths=(8, 16, 16), context=8)
    made = network(torch.randn(5, *shape), torch.rand(5), torch.arange(5) % 4)
    assert made.shape == (5, *shape)


def test_rows_depend_on_their_own_image_level_and_class() -> None:
    torch.manual_seed(0)
    network = UNet(1, 4, widths=(8, 16), context=8)
    images, levels, labels = torch.randn(6, 1, 8, 8), torch.rand(6), torch.arange(6) % 4
    made = network(images, levels, labels)
    for row in range(6):
        alone = network(images[row : row + 1], levels[row : row + 1], labels[row : row + 1])
        assert torch.allclose(alone[0], made[row], atol=1e-5)
    assert not torch.allclose(network(images, levels + 0.5, labels), made, atol=1e-3)
    assert not torch.allclose(network(images, levels, 3 - labels), made, atol=1e-3)
