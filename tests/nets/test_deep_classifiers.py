"""Deep classifiers: image shapes, published numbers of parameters."""

from __future__ import annotations

import pytest
import torch

from sfumato.nets.deep_classifiers import (
    DEEP_CIFAR_NETWORKS,
    DEEP_NETWORKS,
    grouped_network,
    residual_network,
    wide_network,
)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 20, 12)])
def test_shallow_ones_accept_every_shape(shape: tuple[int, int, int]) -> None:
    for network in (
        residual_network(shape, 3, depth=8),
        wide_network(shape, 3, depth=10, factor=1),
        grouped_network(shape, 3, depth=11, factor=1),
    ):
        logits = network(torch.randn(2, *shape))
        assert logits.shape == (2, 3)
        logits.square().sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet110", 1_730_714),
        ("wrn40_4", 8_949_210),
        ("wrn28_10", 36_479_194),
        ("resnext29", 34_426_698),
    ],
)
def test_number_of_parameters_matches_publication(name: str, parameters: int) -> None:
    with torch.device("meta"):
        network = {**DEEP_NETWORKS, **DEEP_CIFAR_NETWORKS}[name]((3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
