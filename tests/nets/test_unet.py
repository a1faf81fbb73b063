"""U-Net: image sizes, row independence, conditioning on noise level and class."""

from __future__ import annotations

import pytest
import torch

from sfumato.nets.unet import UNet


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 9, 13)])
def test_output_has_the_shape_of_the_input(shape: tuple[int, int, int]) -> None:
    network = UNet(shape[0], 4, widths=(8, 16, 16), context=8)
    output = network(torch.randn(5, *shape), torch.rand(5), torch.arange(5) % 4)
    assert output.shape == (5, *shape)


def test_rows_are_independent_and_depend_on_level_and_class() -> None:
    torch.manual_seed(0)
    network = UNet(1, 4, widths=(8, 16), context=8)
    images, levels, labels = torch.randn(6, 1, 8, 8), torch.rand(6), torch.arange(6) % 4
    output = network(images, levels, labels)
    for row in range(6):
        single = network(images[row : row + 1], levels[row : row + 1], labels[row : row + 1])
        assert torch.allclose(single[0], output[row], atol=1e-5)
    assert not torch.allclose(network(images, levels + 0.5, labels), output, atol=1e-3)
    assert not torch.allclose(network(images, levels, 3 - labels), output, atol=1e-3)
