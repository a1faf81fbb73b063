"""What the methods with a generator share: its network, and images drawn from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from sfumato.data import PublicFacts
from sfumato.methods.base import Synthesizer
from sfumato.nets.generator import NETWORKS, PerClass


@dataclass(kw_only=True, eq=False)
class GeneratorMethod(Synthesizer):
    """A method that learns `generator_`, and `counts_`, the noisy or declared number of images in each class."""

    network: str = "small"
    latent: int = 64
    hidden: int = 256
    width: int = 32

    def validate(self) -> Self:
        if self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")
        return super().validate()

    @property
    def _per_class(self) -> bool:
        """Whether each class has a network of its own."""
        return False

    def _network(self, public: PublicFacts) -> nn.Module:
        """A network, or one for each class, with initial weights of the user's seed."""
        sizes = {"latent": self.latent, "hidden": self.hidden, "width": self.width}
        classes = len(public.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if self._per_class:
                network: nn.Module = PerClass(lambda: NETWORKS[self.network](public.shape, 1, **sizes), classes)
            else:
                network = NETWORKS[self.network](public.shape, classes, **sizes)
        return network.to(self.torch_device)

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        latent = torch.randn(len(labels), self.latent, generator=generator, device=self.torch_device)
        images: torch.Tensor = self.generator_(latent, labels)
        return images

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.generator_.state_dict(prefix="generator.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.generator_ = self._network(public).eval()
        own = {name.removeprefix("generator."): value for name, value in state.items() if name != "counts"}
        self.generator_.load_state_dict(own)


def warm_cosine(step: int, steps: int) -> float:
    """Share of the learning rate: up over 2 % of the steps, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / (0.02 * steps + 1)) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
