"""VGG: torchvision's names, and a reference implementation on the state dict."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sfumato.features.perceptual import activations
from sfumato.features.vgg import VGG

DENSE = 512 * 7 * 7 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 1000 + 1000  # the omitted classifier
CONVOLUTIONS = {  # indices of the convolutions in torchvision's `features`
    11: (0, 3, 6, 8, 11, 13, 16, 18),
    13: (0, 2, 5, 7, 10, 12, 15, 17, 20, 22),
    16: (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28),
    19: (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34),
}


@pytest.mark.parametrize(
    ("depth", "plain", "normed"),
    [
        (11, 132_863_336, 132_868_840),
        (13, 133_047_848, 133_053_736),
        (16, 138_357_544, 138_365_992),
        (19, 143_667_240, 143_678_248),
    ],
)
def test_number_of_parameters_and_names(depth: int, plain: int, normed: int) -> None:
    with torch.device("meta"):
        networks = VGG(depth), VGG(depth, norms=True)
    for network, expected in zip(networks, (plain, normed), strict=True):
        assert sum(parameter.numel() for parameter in network.parameters()) + DENSE == expected
    expected_names = {f"features.{index}.{kind}" for index in CONVOLUTIONS[depth] for kind in ("weight", "bias")}
    assert networks[0].state_dict().keys() == expected_names


def test_names_with_batch_norm() -> None:
    with torch.device("meta"):
        state = VGG(16, norms=True).state_dict()
    assert len(state) == 13 * 7
    assert state["features.0.weight"].shape == (64, 3, 3, 3)
    assert state["features.1.running_var"].shape == (64,)
    assert state["features.40.weight"].shape == (512, 512, 3, 3)
    assert state["features.41.running_mean"].shape == (512,)


@pytest.mark.parametrize("size", [28, 32])
def test_activations_equal_reference(size: int) -> None:
    torch.manual_seed(0)
    network = VGG(11)
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        found = activations(network, x)
        for index, values in zip(CONVOLUTIONS[11], found, strict=True):
            if index in (3, 6, 11, 16):
                x = functional.max_pool2d(x, 2)
            state = network.state_dict()
            x = functional.conv2d(
                x, state[f"features.{index}.weight"], state[f"features.{index}.bias"], padding=1
            ).relu()
            torch.testing.assert_close(values, x)


def test_folding_preserves_the_activations() -> None:
    torch.manual_seed(0)
    network = VGG(11, norms=True)
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        network.trunk(x)  # in training mode: sets the statistics of the norms
        network.eval()
        before = activations(network, x)
        network.fold()
        after = activations(network, x)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())
    for expected, values in zip(before, after, strict=True):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)


def test_small_images_raise_errors() -> None:
    with pytest.raises(ValueError, match="at least 16 pixels"), torch.device("meta"):
        VGG(11).trunk(torch.empty(1, 3, 8, 32))
