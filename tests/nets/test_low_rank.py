"""Low-rank adapters: no effect at the start, few trainable parameters, and a merge that computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sfumato.nets.low_rank import LowRankConv, add_low_rank, merge_low_rank
from sfumato.nets.training import Trainer
from sfumato.nets.unet import UNet

RANK = 2


def unet(seed: int = 0) -> UNet:
    torch.manual_seed(seed)
    return UNet(1, 3, widths=(8, 16), context=8, attention=1)


def output(network: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(4, 1, 8, 8, generator=generator), torch.rand(4, generator=generator), torch.arange(4) % 3
    with torch.no_grad():
        return network(*inputs)  # type: ignore[no-any-return]


def train(network: UNet, steps: int = 3) -> None:
    trainer = Trainer(network, ema=0.5)
    trainer.set_rate(0.05)
    for _ in range(steps):
        images = torch.ones(2, 1, 8, 8)
        trainer.descend((network(images, torch.ones(2), torch.arange(2)) - images).square().mean())


CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": (3, 5), "padding": (0, 2), "stride": (1, 2)},
    {"kernel_size": 1, "bias": False},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_a_convolution_keeps_its_stride_and_padding(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    base, images = nn.Conv2d(4, 6, **options), torch.randn(3, 4, 9, 11)  # type: ignore[arg-type]
    before = base(images).detach()
    adapted = LowRankConv(base, RANK)
    assert torch.equal(adapted(images), before)  # starts at the base
    nn.init.normal_(adapted.widen.weight)
    changed = adapted(images).detach()
    assert changed.shape == before.shape
    assert (changed - before).abs().max() > 0.1
    change = (changed - before).permute(1, 0, 2, 3).flatten(1)
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == RANK
    merged = adapted.merged()
    assert (merged.stride, merged.padding, merged.bias is None) == (base.stride, base.padding, "bias" in options)
    assert torch.allclose(merged(images), changed, atol=1e-5)


def test_a_network_starts_equal_to_itself_and_only_adapters_are_trained() -> None:
    network = unet()
    before, plain = output(network), copy.deepcopy(network)
    add_low_rank(network, RANK, seed=0)
    assert torch.equal(output(network), before)
    convolutions = sum(isinstance(part, nn.Conv2d) for part in plain.modules())
    assert sum(isinstance(part, LowRankConv) for part in network.modules()) == convolutions > 5
    names = {name for name, value in network.named_parameters() if value.requires_grad}
    assert len(names) == 2 * convolutions
    assert all(name.endswith(("narrow.weight", "widen.weight")) for name in names)
    frozen = {name: value.clone() for name, value in network.named_parameters() if name not in names}
    train(network)
    now = dict(network.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    assert all(now[name].any() for name in names)
    assert (output(network) - before).abs().max() > 0.01


def test_a_merged_network_computes_the_same_with_the_names_of_the_base() -> None:
    network = unet()
    names, before = list(network.state_dict()), output(network)
    add_low_rank(network, RANK, seed=0)
    train(network)
    adapted = output(network)
    merged = merge_low_rank(network)
    assert merged is network
    assert list(merged.state_dict()) == names
    assert not any(isinstance(part, LowRankConv) for part in merged.modules())
    assert torch.allclose(output(merged), adapted, atol=1e-4)
    assert (adapted - before).abs().max() > 0.01  # a merge that forgets the adapters would be seen
    unet().load_state_dict(merged.state_dict())


def test_the_seed_decides_and_the_global_state_stays() -> None:
    def adapters(seed: int) -> torch.Tensor:
        network = unet()
        add_low_rank(network, RANK, seed)
        return torch.cat([value.flatten() for name, value in network.named_parameters() if "narrow" in name])

    assert torch.equal(adapters(1), adapters(1))
    assert not torch.equal(adapters(1), adapters(2))
    network, state = unet(), torch.get_rng_state()
    add_low_rank(network, RANK, 3)
    assert torch.equal(torch.get_rng_state(), state)
