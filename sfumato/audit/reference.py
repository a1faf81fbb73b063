"""DP-SGD of a small classifier as a method, to calibrate the auditor: it is the mechanism that others audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods.base import Synthesizer
from sfumato.privacy import Release

HIDDEN = 16


@dataclass(kw_only=True, eq=False)
class SmallClassifier(Synthesizer):
    """A network with one hidden layer, trained by DP-SGD. Its "images" are noise with the mean of the logits.

    - steps: int, 50; training steps.
    - sampling_prob: float, 0.2; of Poisson sampling.
    - learning_rate: float, 0.5.
    """

    key: ClassVar[str] = "dp-sgd"
    paper: ClassVar[str] = "Abadi et al., CCS 2016"
    summary: ClassVar[str] = "train a small classifier by DP-SGD, to calibrate the auditor"

    steps: int = 50
    sampling_prob: float = 0.2
    learning_rate: float = 0.5

    def _releases(self, public: PublicFacts) -> list[Release]:  # noqa: ARG002
        return [Release("gradients", self.steps, self.sampling_prob)]

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.network_ = _network(public)
        for _ in self._checkpoints.loop("network", self.steps, network=self.network_):
            sums = vault.gradient(self.network_, _loss, release="gradients", bound=1.0, with_labels=True)
            for name, parameter in self.network_.named_parameters():
                parameter.data -= self.learning_rate / 10 * sums[name]

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        shape = (len(labels), *self._fitted().shape)
        noise = torch.randn(shape, generator=generator, device=labels.device)
        levels: torch.Tensor = self.network_(noise).mean(1)
        return (levels.view(-1, 1, 1, 1) + noise).tanh()

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.network_.state_dict())

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.network_ = _network(public)
        self.network_.load_state_dict(state)


def _network(public: PublicFacts) -> nn.Module:
    inputs = public.shape[0] * public.shape[1] * public.shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, len(public.classes)))


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels, reduction="none")
