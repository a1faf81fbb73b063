"""Training of networks: Adam, an exponential moving average (EMA) of the weights, a learning-rate schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Trainer:
    """Adam on a network's parameters and an EMA of them, in a form that CUDA graphs and checkpoints can hold.

    - network: its parameters with `requires_grad` are trained. On a GPU, `step` can be captured in a CUDA graph.
    - ema: decay of the moving average, which is `average`.
    - betas: of Adam.
    - rates: learning rates relative to `set_rate`, by prefix of the parameter's name; the first match counts.
    - warm_up: start the average with a short memory, min(ema, (1 + n) / (10 + n)) after n steps.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        ema: float,
        betas: tuple[float, float] = (0.9, 0.999),
        rates: Mapping[str, float] | None = None,
        warm_up: bool = False,
    ) -> None:
        self.network, self.average = network, copy.deepcopy(network).requires_grad_(False)
        self.parameters: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        averaged = dict(self.average.named_parameters())
        self._averaged: list[torch.Tensor] = [averaged[name] for name in self.parameters]
        self._ema, self._betas, self._warm_up = ema, betas, warm_up
        self._steps = torch.zeros((), dtype=torch.int64)
        self._rates = dict(rates or {"": 1.0})
        self._on_gpu = next(iter(self.parameters.values())).is_cuda
        self.reset()

    def reset(self) -> None:
        """Forget Adam's state and the number of steps."""
        groups: dict[str, list[torch.Tensor]] = {prefix: [] for prefix in self._rates}
        for name, parameter in self.parameters.items():
            groups[next(prefix for prefix in self._rates if name.startswith(prefix))].append(parameter)
        self._optimizer = torch.optim.Adam(
            [
                {"params": some, "lr": self._rate(0.0), "relative": self._rates[prefix]}
                for prefix, some in groups.items()
                if some
            ],
            betas=self._betas,
            fused=True,
            capturable=self._on_gpu,
        )
        self._steps.zero_()

    def _rate(self, value: float) -> Any:
        """Return a learning rate: a tensor on a GPU, so that a captured graph sees later values."""
        return torch.full((), value, device=next(iter(self.parameters.values())).device) if self._on_gpu else value

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the steps to come."""
        for group in self._optimizer.param_groups:
            if self._on_gpu:
                group["lr"].fill_(rate * group["relative"])
            else:
                group["lr"] = rate * group["relative"]

    def descend(self, loss: torch.Tensor) -> None:
        """Take a step down the gradient of a loss, and update the average."""
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        self.step(dict(zip(self.parameters, gradients, strict=True)))

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take a step along gradients by name of the parameter, and update the average."""
        for name, parameter in self.parameters.items():
            gradient = gradients[name].to(parameter)
            alike = gradient.stride() == parameter.stride()  # the fused optimizer requires that
            parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
        self._optimizer.step()
        self._update_average()

    def _update_average(self) -> None:
        decay = self._ema
        if self._warm_up:  # depends on the step, so such a step cannot be captured as a whole
            decay = min(decay, (1 + int(self._steps)) / (10 + int(self._steps)))
            self._steps += 1
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, list(self.parameters.values()), 1 - decay)

    def state_parts(self) -> dict[str, Any]:
        """Return what a step changes, for checkpoints."""
        return {
            "network": self.network,
            "average": self.average,
            "optimizer": self._optimizer,
            "steps": self._steps,
        }


def use_average(trainer: Trainer) -> None:
    """Copy the average into the network."""
    with torch.no_grad():
        torch._foreach_copy_(list(trainer.parameters.values()), trainer._averaged)


def warm_cosine(step: int, steps: int) -> float:
    """Return the learning-rate factor: linear warm-up over 2 % of the steps, then a cosine decay to 2 %."""
    return min(1.0, (step + 1) / (0.02 * steps + 1)) * (0.51 + 0.49 * math.cos(math.pi * step / steps))


def equal_batches(expected: float, largest: int) -> int:
    """Return the size of equal batches, at most `largest`, for a Poisson sample of `expected` images on average."""
    needed = expected + 3 * math.sqrt(expected)
    return math.ceil(needed / math.ceil(needed / largest))


def even_labels(classes: int, count: int, device: torch.device) -> torch.Tensor:
    """Return at least `count` labels, equally many of each class: 0, 1, ..., 0, 1, ..."""
    return torch.arange(classes, device=device).repeat(math.ceil(count / classes))


def state_below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
