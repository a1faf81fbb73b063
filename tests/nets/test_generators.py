"""Generators: shapes, published architectures, one network per class, batch-norm statistics."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from sfumato.nets.generators import (
    GENERATORS,
    ColourMEPFGenerator,
    GreyMEPFGenerator,
    MMDGANGenerator,
    PerClass,
    mepf_generator,
    refresh_batch_norm,
)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 24, 36), (1, 8, 8)])
def test_shape_range_and_gradients(name: str, shape: tuple[int, int, int]) -> None:
    network = GENERATORS[name](shape, 3, latent=7, hidden=20, width=16)
    images = network(torch.randn(6, 7), torch.arange(6) % 3)
    assert images.shape == (6, *shape)
    assert images.abs().max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_number_of_parameters_of_mmd_gan() -> None:
    network = MMDGANGenerator((1, 32, 32), 10, latent=10, hidden=10, width=64)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert round(count / 1000) == 698  # as in the paper


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_images_depend_on_labels(name: str) -> None:
    network = GENERATORS[name]((1, 8, 8), 2, latent=5, hidden=20, width=16).eval()
    latent = torch.randn(4, 5)
    first, second = (network(latent, torch.full((4,), label)) for label in (0, 1))
    assert not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_labels_may_be_class_weights(name: str) -> None:
    network, latent = GENERATORS[name]((1, 8, 8), 3, latent=8, hidden=16, width=16).eval(), torch.randn(6, 8)
    labels = torch.arange(6) % 3
    one_hot = torch.eye(3)[labels]
    assert torch.allclose(network(latent, one_hot), network(latent, labels), atol=1e-6)
    between = network(latent, (one_hot + torch.eye(3)[(labels + 1) % 3]) / 2)
    assert not torch.allclose(between, network(latent, labels), atol=1e-4)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("training", [True, False])
def test_per_class_equals_separate_networks(name: str, training: bool) -> None:
    """The stacked networks give the output of the separate networks, with the batch statistics of each class."""
    networks: list[nn.Module] = []

    def build() -> nn.Module:
        networks.append(GENERATORS[name]((1, 8, 8), 1, latent=5, hidden=20, width=16))
        return networks[-1]

    per_class = PerClass(build, 3).train(training)
    separate = [network.train(training) for network in networks]
    labels = torch.tensor([2, 0, 1, 2, 0, 1, 2, 0, 1])
    latent = torch.randn(9, 5)
    images = per_class(latent, labels)
    for label, network in enumerate(separate):
        members = labels == label
        expected = network(latent[members], torch.zeros(3, dtype=torch.int64))
        assert torch.allclose(images[members], expected, atol=1e-5)


def test_classes_of_different_sizes() -> None:
    network = PerClass(lambda: GENERATORS["small"]((1, 8, 8), 1, latent=5, hidden=20, width=16), 4).eval()
    latent, labels = torch.randn(7, 5), torch.tensor([3, 3, 0, 3, 0, 3, 3])
    images = network(latent, labels)
    for row in range(7):
        single = network(latent[row : row + 1], labels[row : row + 1])
        assert torch.allclose(images[row : row + 1], single, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
def test_refresh_batch_norm(parallel: bool) -> None:
    def build() -> nn.Module:
        return GENERATORS["small"]((1, 8, 8), 1 if parallel else 2, latent=5, hidden=20, width=16)

    network = PerClass(build, 2) if parallel else build()
    labels = torch.arange(400) % 2
    latent = torch.randn(400, 5)
    network.train()
    with torch.no_grad():
        in_training = network(latent, labels)
        refresh_batch_norm(network, lambda: network(latent, labels))
        assert not network.training
        assert torch.allclose(network(latent, labels), in_training, atol=0.02)


def test_mepf_generators_match_publication() -> None:
    """Section 6 of the paper and its code: 28 pixels, grey; 32 and 64 pixels, colour."""
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
