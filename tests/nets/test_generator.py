"""Generators: shapes, sizes as published, one network per class, statistics taken afresh."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from sfumato.nets.generator import (
    NETWORKS,
    ColourMEPFGenerator,
    GreyMEPFGenerator,
    MMDGenerator,
    PerClass,
    mepf_generator,
    refresh_batch_norm,
)


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 24, 36), (1, 8, 8)])
def test_images_have_their_shape_and_range(name: str, shape: tuple[int, int, int]) -> None:
    network = NETWORKS[name](shape, 3, latent=7, hidden=20, width=16)
    images = network(torch.randn(6, 7), torch.arange(6) % 3)
    assert images.shape == (6, *shape)
    assert images.abs().max() <= 1
    images.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_the_mmd_gan_generator_is_the_published_one() -> None:
    network = MMDGenerator((1, 32, 32), 10, latent=10, hidden=10, width=64)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert round(count / 1000) == 698  # the paper's count


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_labels_matter(name: str) -> None:
    network = NETWORKS[name]((1, 8, 8), 2, latent=5, hidden=20, width=16).eval()
    latent = torch.randn(4, 5)
    one, other = (network(latent, torch.full((4,), label)) for label in (0, 1))
    assert not torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_label_may_be_parts_of_classes(name: str) -> None:
    network, latent = NETWORKS[name]((1, 8, 8), 3, latent=8, hidden=16, width=16).eval(), torch.randn(6, 8)
    labels = torch.arange(6) % 3
    whole = torch.eye(3)[labels]
    assert torch.allclose(network(latent, whole), network(latent, labels), atol=1e-6)
    between = network(latent, (whole + torch.eye(3)[(labels + 1) % 3]) / 2)
    assert not torch.allclose(between, network(latent, labels), atol=1e-4)


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("training", [True, False])
def test_one_network_per_class_is_what_it_says(name: str, training: bool) -> None:
    """Side by side they make what each would make alone, statistics of its own batch included."""
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(NETWORKS[name]((1, 8, 8), 1, latent=5, hidden=20, width=16))
        return made[-1]

    together = PerClass(build, 3).train(training)
    alone = [network.train(training) for network in made]
    labels = torch.tensor([2, 0, 1, 2, 0, 1, 2, 0, 1])
    latent = torch.randn(9, 5)
    images = together(latent, labels)
    for label, network in enumerate(alone):
        mine = labels == label
        expected = network(latent[mine], torch.zeros(3, dtype=torch.int64))
        assert torch.allclose(images[mine], expected, atol=1e-5)


def test_classes_may_have_different_numbers_of_images() -> None:
    network = PerClass(lambda: NETWORKS["small"]((1, 8, 8), 1, latent=5, hidden=20, width=16), 4).eval()
    latent, labels = torch.randn(7, 5), torch.tensor([3, 3, 0, 3, 0, 3, 3])
    images = network(latent, labels)
    for place in range(7):
        alone = network(latent[place : place + 1], labels[place : place + 1])
        assert torch.allclose(images[place : place + 1], alone, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
def test_statistics_taken_afresh_are_those_of_the_batches(parallel: bool) -> None:
    def build() -> nn.Module:
        return NETWORKS["small"]((1, 8, 8), 1 if parallel else 2, latent=5, hidden=20, width=16)

    network = PerClass(build, 2) if parallel else build()
    labels = torch.arange(400) % 2
    latent = torch.randn(400, 5)
    network.train()
    with torch.no_grad():
        in_training = network(latent, labels)
        refresh_batch_norm(network, lambda: network(latent, labels))
        assert not network.training
        assert torch.allclose(network(latent, labels), in_training, atol=0.02)


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
