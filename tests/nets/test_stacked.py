"""Stacked networks: agreement with the separate networks, copies, gradients."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.nets.stacked import apply_stacked, named_tensors, stacked, unstack


def build() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).eval()
    network[0].bias.requires_grad_(False)
    network[1].running_mean.normal_()
    return network


def test_stacked_networks_equal_separate_networks() -> None:
    networks = [build() for _ in range(3)]
    stack = stacked(networks)
    images = torch.randn(3, 5, 1, 8, 8)
    expected = torch.stack([network(batch) for network, batch in zip(networks, images, strict=True)])
    assert torch.allclose(apply_stacked(stack, images), expected, atol=1e-6)
    for index, network in enumerate(networks):
        assert torch.equal(unstack(stack, index)(images[index]), network(images[index]))


def test_names_requires_grad_and_copies() -> None:
    networks = [build() for _ in range(2)]
    stack = stacked(networks)
    assert list(named_tensors(stack)) == list(named_tensors(networks[0]))
    assert all(len(tensor) == 2 for tensor in named_tensors(stack).values())
    assert not stack[0].bias.requires_grad
    assert stack[3].weight.requires_grad
    single = unstack(stack, 1)
    with torch.no_grad():
        stack[3].weight.zero_()
    for network in (single, *networks):  # copies
        assert network[3].weight.any()
    stack.load_state_dict(stacked(networks).state_dict())
    assert torch.equal(stack[3].weight[1], networks[1][3].weight)


def test_gradients_reach_every_network() -> None:
    stack = stacked([build() for _ in range(2)])
    apply_stacked(stack, torch.randn(2, 4, 1, 8, 8)).square().sum().backward()
    assert all(gradient.any() for gradient in stack[3].weight.grad)
