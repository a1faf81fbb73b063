"""ResNet: torchvision's names, and a reference implementation on the state dict."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from sfumato.features.perceptual import activations
from sfumato.features.resnet import ResNet, resnet18, resnet18_cifar, resnet34, resnet50, small_resnet

State = dict[str, torch.Tensor]


def with_statistics(network: ResNet) -> ResNet:
    """Set statistics and weights of batch norms to random values."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return network.eval()


def reference(state: State, x: torch.Tensor, blocks: tuple[int, ...], small_images: bool) -> list[torch.Tensor]:
    """Return the outputs of all ReLUs, computed from the state dict."""

    def conv_norm(x: torch.Tensor, convolution: str, norm: str, stride: int = 1) -> torch.Tensor:
        weight = state[f"{convolution}.weight"]
        y = functional.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
        mean, var, scale, shift = (
            state[f"{norm}.{kind}"].view(-1, 1, 1) for kind in ("running_mean", "running_var", "weight", "bias")
        )
        return (y - mean) / (var + 1e-5).sqrt() * scale + shift

    outputs = [conv_norm(x, "conv1", "bn1", 1 if small_images else 2).relu()]
    x = outputs[0] if small_images else functional.max_pool2d(outputs[0], 3, 2, 1)
    for stage, repeats in enumerate(blocks, 1):
        for repeat in range(repeats):
            name, stride = f"layer{stage}.{repeat}", 2 if stage > 1 and repeat == 0 else 1
            bottleneck = f"{name}.conv3.weight" in state
            shortcut = x
            if f"{name}.downsample.0.weight" in state:
                shortcut = conv_norm(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
            y = conv_norm(x, f"{name}.conv1", f"{name}.bn1", 1 if bottleneck else stride).relu()
            outputs.append(y)
            y = conv_norm(y, f"{name}.conv2", f"{name}.bn2", stride if bottleneck else 1)
            if bottleneck:
                outputs.append(y.relu())
                y = conv_norm(y.relu(), f"{name}.conv3", f"{name}.bn3")
            x = (y + shortcut).relu()
            outputs.append(x)
    return outputs


@pytest.mark.parametrize(
    ("build", "parameters", "entries"),
    [(resnet18, 11_689_512, 122), (resnet34, 21_797_672, 218), (resnet50, 25_557_032, 320)],
)
def test_number_of_parameters(build: Callable[[int], ResNet], parameters: int, entries: int) -> None:
    with torch.device("meta"):
        network = build(1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    assert len(network.state_dict()) == entries


def test_names_and_shapes_match_torchvision() -> None:
    with torch.device("meta"):
        state = resnet50(1000).state_dict()
    for name, shape in {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.bn3.bias": (1024,),
        "layer4.0.downsample.1.running_var": (2048,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
        "fc.weight": (1000, 2048),
    }.items():
        assert state[name].shape == shape
    assert "layer1.1.downsample.0.weight" not in state


def test_small_resnet() -> None:
    network = small_resnet(10)
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_275_946
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "blocks", "small_images"),
    [
        (resnet18, (2, 2, 2, 2), False),
        (resnet50, (3, 4, 6, 3), False),
        (resnet18_cifar, (2, 2, 2, 2), True),
        (small_resnet, (2, 2, 2, 1), True),
    ],
)
@pytest.mark.parametrize("size", [28, 32])
def test_activations_equal_reference(
    build: Callable[[], ResNet], blocks: tuple[int, ...], small_images: bool, size: int
) -> None:
    torch.manual_seed(0)
    network = with_statistics(build())
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        expected = reference(dict(network.state_dict()), x, blocks, small_images)
        as_built = activations(network, x)
        network.fold()
        folded = activations(network, x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    for values, before, after in zip(expected, as_built, folded, strict=True):
        scale = float(values.abs().max())
        torch.testing.assert_close(before, values, atol=1e-5 * scale, rtol=1e-4)
        torch.testing.assert_close(after, values, atol=1e-5 * scale, rtol=1e-4)
