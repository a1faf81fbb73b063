"""Several networks of one architecture as one module with stacked weights, evaluated by `torch.vmap`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def stacked(networks: Sequence[nn.Module]) -> nn.Module:
    """Return a module of the same architecture whose parameters and buffers are stacked: [networks, ...].

    Names do not change. The module cannot be called itself: `apply_stacked` calls all networks, `unstack` returns a
    copy of one network, and `Vault.gradient(by_class=True)` evaluates each image with the network of its class.
    """
    stack = copy.deepcopy(networks[0])
    for path, module in stack.named_modules():
        modules = [network.get_submodule(path) for network in networks]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                values = torch.stack([other.get_parameter(name).detach() for other in modules])
                module._parameters[name] = nn.Parameter(values, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.stack([other.get_buffer(name).detach() for other in modules])
    return stack


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def unstack(stack: nn.Module, index: int) -> nn.Module:
    """Return a copy of one of the stacked networks."""
    single = copy.deepcopy(stack)
    for module in single.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach()[index].clone(), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer[index].clone()
    return single


def apply_stacked(stack: nn.Module, *inputs: torch.Tensor) -> Any:
    """Apply each network to its own batch: inputs and outputs are [networks, n, ...]."""

    def single(weights: dict[str, torch.Tensor], *batch: torch.Tensor) -> Any:
        return functional_call(stack, weights, batch)

    return torch.vmap(single)(named_tensors(stack), *inputs)
