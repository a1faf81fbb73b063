"""DP-kernel as published. Not private: the noise never reaches the gradient.

Released: images made with the raw ones. Public: nothing is protected. Events: none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sfumato.data import PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault, calibrate
from sfumato.methods.base import constant
from sfumato.methods.generator_method import GeneratorMethod, GeneratorTraining
from sfumato.nets.training import warm_cosine
from sfumato.privacy import Release

BANDWIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0)
LEAK = (
    "the noise never reaches the gradient: training differentiates the exact mean of k(x, .), of which only values are "
    "noised. The update's direction is that of the un-noised gradient, at every noise level; no finite epsilon holds"
)


@dataclass(kw_only=True, eq=False)
class PublishedKernelGenerator(GeneratorMethod):
    """The training loop of the paper: Poisson batches, noise on values, gradients through the exact function.

    - steps: int, 4500; training steps.
    - learning_rate: float, 5e-3; of Adam.
    """

    key: ClassVar[str] = "dp-kernel-as-published"
    paper: ClassVar[str] = "Jiang et al., NeurIPS 2023"
    summary: ClassVar[str] = "train dp-kernel as its authors do; not private"
    guarantee: ClassVar[str] = "none"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"cpu": {"steps": 1800}}

    steps: int = 4500
    learning_rate: float = 5e-3
    batch_size: int = constant(60)  # expected, of a Poisson sample; and generated images of each class
    ema: float = constant(0.99)

    @property
    def claimed(self) -> dict[str, Any] | None:  # type: ignore[override]
        if not self._budget().private:
            return None
        return {"epsilon": self.epsilon, "delta": self.delta, "by": self.paper, "why": LEAK}

    def _releases(self, public: PublicFacts) -> list[Release]:  # noqa: ARG002
        return []

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        device = self.torch_device
        generator = torch.Generator(device).manual_seed(self.seed)
        network = self._new_generator(public)
        latent_size, each = self.generator.latent, self.batch_size
        training = GeneratorTraining(network, public, generator, each=each, ema=self.ema, latent=latent_size)
        self.counts_ = torch.ones(len(public.classes), device=device)
        images, labels = vault.unprotected(f"as published: {LEAK}")
        pixels = to_unit_range(images)
        labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        q = min(1.0, each / max(len(images), 1))
        noise = 0.0
        if self._budget().private:
            noise = calibrate([Release("claimed", self.steps, q)], self._budget()).releases[0].noise
        for step in self._checkpoints.loop("generator", self.steps, training=training):
            chosen = (torch.rand(len(images), generator=generator, device=device) < q).nonzero()[:, 0]
            if len(chosen) < 2:
                continue
            real, given = pixels[chosen.to(pixels.device)].to(device), labels[chosen.to(labels.device)].to(device)
            latent = torch.randn(len(real), latent_size, generator=generator, device=device)
            fake = training.network(latent, given)
            training.trainer.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            training.trainer.descend(published_loss(real, given, fake, given, noise, generator))
        self.generator_ = training.averaged()


def published_loss(
    real: torch.Tensor,
    real_labels: torch.Tensor,
    fake: torch.Tensor,
    fake_labels: torch.Tensor,
    noise: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return (MMD²)² with noised values of the exact function (Eq. 4 and 5): five kernels, one-hot labels.

    The noise is a constant to the derivative. That is the leak.
    """
    points, labels = torch.cat([real, fake]).flatten(1), torch.cat([real_labels, fake_labels])
    squares = (points[:, None] - points).square().sum(2)
    gram = torch.stack([torch.exp(-squares / (2 * h**2)) for h in BANDWIDTHS]).sum(0)
    gram = gram * (labels[:, None] == labels)
    values = gram[:, : len(real)].mean(1)
    sensitivity = math.sqrt(2 * len(BANDWIDTHS)) / len(real)
    covariance = noise * sensitivity * gram.detach().double() + 1e-8 * torch.eye(len(gram), device=gram.device)
    path = torch.linalg.cholesky(covariance).float() @ torch.randn(len(gram), generator=generator, device=gram.device)
    noised = values + (path if noise > 0 else 0.0)
    distance = noised[: len(real)].mean() - 2 * noised[len(real) :].mean() + gram[len(real) :, len(real) :].mean()
    return distance.square()
