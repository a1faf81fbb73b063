"""What the methods with a generator share: its network, its training, and images drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from sfumato.data import PublicFacts
from sfumato.methods.base import Synthesizer
from sfumato.nets.generator import NETWORKS, PerClass, refresh_batch_norm
from sfumato.nets.graph import Graph


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


class Training:
    """A generator under way: batches with as many images of each class, steps, and an average of the weights.

    `loss` is that of a batch, class by class. On a GPU a step is one launch, `loss` within it: it may neither draw
    random numbers nor decide by values.
    """

    def __init__(
        self,
        method: GeneratorMethod,
        public: PublicFacts,
        generator: torch.Generator,
        loss: Callable[[torch.Tensor], torch.Tensor],
        *,
        each: int,
        steps: int,
        learning_rate: float,
        ema: float,
    ) -> None:
        self._latent, self._generator, self._loss = method.latent, generator, loss
        self._steps, self._learning_rate, self._ema = steps, learning_rate, ema
        self._network, self.average = method._network(public), method._network(public).requires_grad_(False)
        graphs = generator.device.type == "cuda"
        if graphs:
            for network in (self._network, self.average):
                network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._parameters: list[torch.Tensor] = list(self._network.parameters())
        self._rate = torch.zeros((), device=generator.device)
        self._optimizer = torch.optim.Adam(
            self._parameters, self._rate if graphs else 0.0, betas=(0.5, 0.99), fused=True, capturable=graphs
        )
        self._labels = torch.arange(len(public.classes), device=generator.device).repeat_interleave(each)
        self._step = Graph(self._descend)

    def step(self, number: int) -> None:
        """A step down the loss of a fresh batch."""
        self._rate.fill_(self._learning_rate * warm_cosine(number, self._steps))
        if self._rate.device.type == "cpu":
            self._optimizer.param_groups[0]["lr"] = float(self._rate)
        self._step(self._draw())

    def averaged(self) -> nn.Module:
        """The average of the weights, with its batch norms' statistics taken afresh."""
        refresh_batch_norm(self.average, self.images)
        return self.average

    def images(self) -> torch.Tensor:
        """A batch of the averaged network, class by class."""
        with torch.no_grad():
            return self._images(self.average, self._draw())

    def _draw(self) -> Latent:
        size = (len(self._labels), self._latent)
        return Latent(torch.randn(size, generator=self._generator, device=self._generator.device))

    def _images(self, network: nn.Module, latent: Latent) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._labels.device.type == "cuda"):
            made: torch.Tensor = network(latent.values, self._labels)
        return made.float()

    def _descend(self, latent: Latent) -> None:
        loss = self._loss(self._images(self._network, latent))
        gradients = torch.autograd.grad(loss, self._parameters)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            alike = gradient.stride() == parameter.stride()  # the fused optimizer asks for that
            parameter.grad = gradient if alike else torch.empty_like(parameter).copy_(gradient)
        self._optimizer.step()
        torch._foreach_lerp_(list(self.average.parameters()), self._parameters, 1 - self._ema)


@dataclass(frozen=True)
class Latent:
    """Latent vectors, as a graph takes them."""

    values: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.values]

    def like(self, tensors: Sequence[torch.Tensor]) -> Latent:
        return Latent(tensors[0])


def warm_cosine(step: int, steps: int) -> float:
    """Share of the learning rate: up over 2 % of the steps, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / (0.02 * steps + 1)) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
