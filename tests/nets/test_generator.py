"""Generators: every shape, every class, the sizes of the papers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sfumato.nets.generator import NETWORKS, ColourMEPFGenerator, GreyMEPFGenerator, mepf_generator

SIZES = {"latent": 12, "hidden": 20, "width": 8}


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 33, 20)])
def test_images_of_the_right_shape_and_range(name: str, shape: tuple[int, int, int]) -> None:
    network = NETWORKS[name](shape, 3, **SIZES)
    images = network(torch.randn(6, 12), torch.arange(6) % 3)
    assert images.shape == (6, *shape)
    assert images.abs().max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_label_matters(name: str) -> None:
    network = NETWORKS[name]((1, 28, 28), 2, **SIZES).eval()
    latent = torch.randn(1, 12).expand(2, 12)
    with torch.no_grad():
        one, other = network(latent, torch.tensor([0, 1]))
    assert not torch.allclose(one, other, atol=1e-4)


def test_mepf_is_as_published() -> None:
    """Section 6 and its code: 28 pixels, grey; 32 and 64, colour."""
    grey = mepf_generator((1, 28, 28), 10, latent=90, hidden=500, width=16)
    assert isinstance(grey, GreyMEPFGenerator)
    shapes = [tuple(weight.shape) for weight in grey.parameters() if weight.ndim > 1]
    assert shapes == [(500, 100), (16 * 7 * 7, 500), (8, 16, 5, 5), (1, 8, 5, 5)]
    for size, widths in ((32, [512, 256, 128, 64]), (64, [512, 256, 128, 64, 64])):
        colour = mepf_generator((3, size, size), 10, latent=90, hidden=500, width=64)
        assert isinstance(colour, ColourMEPFGenerator)
        assert colour.entry.weight.shape == (100, 512, 4, 4)
        firsts = [block.first.weight.shape for block in colour.trunk[: len(widths) - 1]]
        assert [(shape[1], shape[0]) for shape in firsts] == list(pairwise(widths))
        assert colour.trunk[-1].weight.shape == (3, 64, 3, 3)
