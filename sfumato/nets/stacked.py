"""Several networks of one kind as one module: their weights stacked, all of them run at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def stacked(networks: Sequence[nn.Module]) -> nn.Module:
    """A network of the same kind whose parameters and buffers are those of all `networks`, stacked: [networks, ...].

    Names stay as they are. It cannot be called itself: `together` calls all networks, `one` takes one out, and
    `Vault.gradient(by_class=True)` has each image in its class's network.
    """
    whole = copy.deepcopy(networks[0])
    for path, module in whole.named_modules():
        others = [network.get_submodule(path) for network in networks]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.stack([other.get_parameter(name).detach() for other in others])
                module._parameters[name] = nn.Parameter(values, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.stack([other.get_buffer(name).detach() for other in others])
    return whole


def state(whole: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {**dict(whole.named_parameters()), **dict(whole.named_buffers())}


def one(whole: nn.Module, index: int) -> nn.Module:
    """A copy of one of the networks."""
    single = copy.deepcopy(whole)
    for module in single.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach()[index].clone(), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer[index].clone()
    return single


def together(whole: nn.Module, *inputs: torch.Tensor) -> Any:
    """Each network on its own batch: inputs [networks, n, ...], and so is what comes out."""

    def single(weights: dict[str, torch.Tensor], *batch: torch.Tensor) -> Any:
        return functional_call(whole, weights, batch)

    return torch.vmap(single)(state(whole), *inputs)
