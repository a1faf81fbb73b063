"""Base class of methods with a generator: the network, its training, and samples from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sfumato.data import PublicFacts
from sfumato.methods.base import Synthesizer, constant
from sfumato.nets.generators import GENERATORS, PerClass, refresh_batch_norm
from sfumato.nets.training import Trainer, state_below


@dataclass(frozen=True)
class GeneratorSizes:
    """Architecture of a conditional generator.

    - network: a name of `nets.generators.GENERATORS`.
    - latent: size of the latent vector.
    - hidden: width of the first layer.
    - width: channels of the first map.
    - per_class: one network per class instead of one conditional network.
    """

    network: str = "small"
    latent: int = 64
    hidden: int = 256
    width: int = 32
    per_class: bool = False

    def build(self, public: PublicFacts, seed: int, device: torch.device) -> nn.Module:
        """Return a network with initial weights from the user's seed."""
        sizes = {"latent": self.latent, "hidden": self.hidden, "width": self.width}
        classes = len(public.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.per_class:
                network: nn.Module = PerClass(lambda: GENERATORS[self.network](public.shape, 1, **sizes), classes)
            else:
                network = GENERATORS[self.network](public.shape, classes, **sizes)
        return network.to(device)


@dataclass(kw_only=True, eq=False)
class GeneratorMethod(Synthesizer):
    """A method that learns `generator_`, and `counts_`, the noisy or declared number of images in each class."""

    generator: GeneratorSizes = constant(GeneratorSizes())

    def _new_generator(self, public: PublicFacts) -> nn.Module:
        return self.generator.build(public, self.seed, self.torch_device)

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return draw(self.generator_, self.generator.latent, labels, generator)

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.generator_.state_dict(prefix="generator.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.generator_ = self._new_generator(public).eval()
        self.generator_.load_state_dict(state_below(state, "generator."))


class GeneratorTraining:
    """Training of a generator on batches with equally many images of each class.

    - each: images of a class in a batch.
    - ema: decay of the moving average of the weights.
    """

    def __init__(
        self, network: nn.Module, public: PublicFacts, generator: torch.Generator, *, each: int, ema: float, latent: int
    ) -> None:
        self.shape, self.classes, self.each = public.shape, len(public.classes), each
        self.generator, self._latent = generator, latent
        if generator.device.type == "cuda" and not isinstance(network, PerClass):
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.trainer = Trainer(network, ema=ema, betas=(0.5, 0.99))
        self.labels = torch.arange(self.classes, device=generator.device).repeat_interleave(each)

    @property
    def network(self) -> nn.Module:
        return self.trainer.network

    @property
    def average(self) -> nn.Module:
        return self.trainer.average

    def latent(self) -> torch.Tensor:
        """Draw the latent vectors of a batch."""
        size = (len(self.labels), self._latent)
        return torch.randn(size, generator=self.generator, device=self.generator.device)

    def images(self, latent: torch.Tensor, network: nn.Module | None = None) -> torch.Tensor:
        """Return a batch of generated images, class by class."""
        network = network or self.network
        if isinstance(network, PerClass):
            return network.forward_stacked(self.by_class(latent)).flatten(0, 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.generator.device.type == "cuda"):
            made: torch.Tensor = network(latent, self.labels)
        return made.float()

    def by_class(self, rows: torch.Tensor) -> torch.Tensor:
        """Reshape rows of a batch to [classes, each, ...]."""
        return rows.view(-1, self.each, *rows.shape[1:])

    def averaged(self) -> nn.Module:
        """Return the EMA network, with batch-norm statistics computed anew."""
        refresh_batch_norm(self.average, self.average_images)
        return self.average

    def average_images(self) -> torch.Tensor:
        """Draw a batch from the EMA network."""
        with torch.no_grad():
            return self.images(self.latent(), self.average)

    def state_parts(self) -> dict[str, Any]:
        """Return what a step changes, for checkpoints."""
        return {"trainer": self.trainer, "generator": self.generator}


def draw(network: nn.Module, latent: int, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one image per label, or per row of class weights."""
    noise = torch.randn(len(labels), latent, generator=generator, device=labels.device)
    images: torch.Tensor = network(noise, labels)
    return images
