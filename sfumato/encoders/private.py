"""An encoder that learns from the private images themselves, under differential privacy.

For data that no public images resemble (appendix F of the DP-MEPF paper): part of a method's budget trains a small
classifier by DP-SGD; its activations are then as public as the noisy gradients that it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sfumato.engine import Vault
from sfumato.privacy import Release

WIDTHS = (32, 64, 128)
BOUND, RATE, MOMENTUM = 1.0, 0.5, 0.9
FACTS: dict[str, Any] = {
    "name": "dp",
    "network": "three convolutions of 32, 64 and 128 maps",
    "trained_on": "the private images, by noisy gradients within this budget",
}


class PrivateEncoder(nn.Module):
    """Three convolutions, the first at full size: all activations after ReLU, and a classifier on the last."""

    def __init__(self, shape: tuple[int, int, int], classes: int, seed: int) -> None:
        super().__init__()
        widths = list(pairwise((shape[0], *WIDTHS)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.convolutions = nn.ModuleList(
                nn.Conv2d(entering, leaving, 3, 1 if place == 0 else 2, 1)
                for place, (entering, leaving) in enumerate(widths)
            )
            self.classifier = nn.Linear(WIDTHS[-1], classes)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        maps = [images]
        for convolution in self.convolutions:
            maps.append(functional.relu(convolution(maps[-1])))
        return maps[1:]

    def dimension(self, shape: tuple[int, int, int]) -> int:
        """How many activations an image has."""
        with torch.no_grad():
            like = torch.zeros(1, *shape, device=self.classifier.weight.device)
            return sum(values.numel() for values in self(like))

    def learn(self, vault: Vault, release: Release, images: float, loop: Callable[..., Iterator[int]]) -> None:
        """Train by DP-SGD over the vault's images, of which there are about so many, which is public by now."""
        expected = images * release.sampling_prob
        velocity = {name: torch.zeros_like(parameter) for name, parameter in self.named_parameters()}
        for step in loop("encoder", release.times, network=self, velocity=list(velocity.values())):
            sums = vault.gradient(self, _surprise, release=release.name, bound=BOUND, with_labels=True)
            rate = RATE * (1 + math.cos(math.pi * step / release.times)) / 2
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    velocity[name].mul_(MOMENTUM).add_(sums[name] / expected)
                    parameter.sub_(rate * velocity[name])
        self.requires_grad_(False)


def _surprise(model: PrivateEncoder, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scores = model.classifier(model(images)[-1].mean((2, 3)))
    return functional.cross_entropy(scores, labels, reduction="none")
