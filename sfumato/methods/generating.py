"""What the methods with a generator share: its network, its training, and images drawn from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.engine import Vault
from sfumato.methods.base import Synthesizer
from sfumato.nets.generator import NETWORKS, PerClass, refresh_batch_norm


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

    def _confirm(self, vault: Vault, network: dict[str, Any], role: str = "encoder") -> None:
        """Raises if the public network at hand is not the one that the ledger names."""
        stated = (vault.ledger.opening or {}).get("public_facts", {})
        if stated.get(role) != network:
            raise DataError(f"the {role}'s file was changed under way; nothing was spent, start again")

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


class Training:
    """A generator under way: batches with as many images of each class, steps, and an average of the weights."""

    def __init__(
        self, method: GeneratorMethod, public: PublicFacts, generator: torch.Generator, *, each: int, ema: float
    ) -> None:
        self.shape, self.classes, self.each = public.shape, len(public.classes), each
        self.generator, self._latent, self._ema = generator, method.latent, ema
        self.network, self.average = method._network(public), method._network(public).requires_grad_(False)
        graphs = generator.device.type == "cuda"
        if graphs and not method._per_class:
            for network in (self.network, self.average):
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters: list[torch.Tensor] = list(self.network.parameters())
        self._rate = torch.zeros((), device=generator.device)
        self._optimizer = torch.optim.Adam(
            self._parameters, self._rate if graphs else 0.0, betas=(0.5, 0.99), fused=True, capturable=graphs
        )
        self.labels = torch.arange(self.classes, device=generator.device).repeat_interleave(each)

    def latent(self) -> Latent:
        """Latent vectors of a batch."""
        size = (len(self.labels), self._latent)
        return Latent(torch.randn(size, generator=self.generator, device=self.generator.device))

    def images(self, latent: Latent, network: nn.Module | None = None) -> torch.Tensor:
        """A batch, class by class."""
        network = network or self.network
        if isinstance(network, PerClass):
            return network.together(self.by_class(latent.values)).flatten(0, 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.generator.device.type == "cuda"):
            made: torch.Tensor = network(latent.values, self.labels)
        return made.float()

    def by_class(self, rows: torch.Tensor) -> torch.Tensor:
        """[classes, images, …]"""
        return rows.view(-1, self.each, *rows.shape[1:])

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        self._rate.fill_(rate)
        if self._rate.device.type == "cpu":
            self._optimizer.param_groups[0]["lr"] = rate

    def descend(self, loss: torch.Tensor) -> None:
        """A step. On a GPU it can be captured in a graph, with the loss."""
        gradients = torch.autograd.grad(loss, self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            alike = gradient.stride() == parameter.stride()  # the fused optimizer asks for that
            parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), self._parameters, 1 - self._ema)

    def state_parts(self) -> dict[str, Any]:
        """What a step changes, for checkpoints."""
        return {
            "network": self.network,
            "average": self.average,
            "optimizer": self._optimizer,
            "generator": self.generator,
        }

    def averaged(self) -> nn.Module:
        """The average of the weights, with its batch norms' statistics taken afresh."""
        refresh_batch_norm(self.average, self.average_images)
        return self.average

    def average_images(self) -> torch.Tensor:
        """A batch of the averaged network."""
        with torch.no_grad():
            return self.images(self.latent(), self.average)


@dataclass(frozen=True)
class Latent:
    """Latent vectors, as a graph takes them."""

    values: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.values]

    def like(self, tensors: Sequence[torch.Tensor]) -> Latent:
        return Latent(tensors[0])


def equal_batches(expected: float, most: int) -> int:
    """Size of equal batches of at most `most` for a Poisson sample of about so many images; all public."""
    needed = expected + 3 * math.sqrt(expected)
    return math.ceil(needed / math.ceil(needed / most))


def warm_cosine(step: int, steps: int) -> float:
    """Share of the learning rate: up over 2 % of the steps, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / (0.02 * steps + 1)) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
