"""Stacked networks do what each does by itself."""

from __future__ import annotations

import torch
from torch import nn

from sfumato.nets.stacked import one, stacked, state, together


def build() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2)).eval()
    network[0].bias.requires_grad_(False)
    network[1].running_mean.normal_()
    return network


def test_all_networks_at_once() -> None:
    networks = [build() for _ in range(3)]
    whole = stacked(networks)
    images = torch.randn(3, 5, 1, 8, 8)
    apart = torch.stack([network(batch) for network, batch in zip(networks, images, strict=True)])
    assert torch.allclose(together(whole, images), apart, atol=1e-6)
    for index, network in enumerate(networks):
        assert torch.equal(one(whole, index)(images[index]), network(images[index]))


def test_names_kinds_and_memory() -> None:
    networks = [build() for _ in range(2)]
    whole = stacked(networks)
    assert list(state(whole)) == list(state(networks[0]))
    assert all(len(tensor) == 2 for tensor in state(whole).values())
    assert not whole[0].bias.requires_grad
    assert whole[3].weight.requires_grad
    single = one(whole, 1)
    with torch.no_grad():
        whole[3].weight.zero_()
    for network in (single, *networks):  # copies
        assert network[3].weight.any()
    whole.load_state_dict(stacked(networks).state_dict())
    assert torch.equal(whole[3].weight[1], networks[1][3].weight)


def test_derivatives_reach_every_network() -> None:
    whole = stacked([build() for _ in range(2)])
    together(whole, torch.randn(2, 4, 1, 8, 8)).square().sum().backward()
    assert all(slice.any() for slice in whole[3].weight.grad)
