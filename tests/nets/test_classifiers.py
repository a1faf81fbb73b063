"""Classifiers: image shapes, gradients, published numbers of parameters."""

from __future__ import annotations

import pytest
import torch

from sfumato.nets.classifiers import CLASSIFIER_NETWORKS

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 20, 36)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLASSIFIER_NETWORKS)
def test_every_network_accepts_every_shape(name: str, shape: tuple[int, int, int]) -> None:
    network = CLASSIFIER_NETWORKS[name](shape, 7)
    logits = network(torch.randn(3, *shape))
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("convnet", (3, 32, 32), 320_010),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet9", (3, 32, 32), 2_274_880 + 10),  # plus the bias of the head
        ("mlp", (1, 28, 28), 118_282),
    ],
)
def test_number_of_parameters_matches_publication(name: str, shape: tuple[int, int, int], parameters: int) -> None:
    assert sum(p.numel() for p in CLASSIFIER_NETWORKS[name](shape, 10).parameters()) == parameters
