"""DP-MERF: mean embeddings in random Fourier features (Harder, Adamczewski, Park; AISTATS 2021).

The idea: the mean of random features phi(x) over a class describes its distribution (in the sense of a kernel
distance, MMD). Release the noisy means once; fit a generator whose images have the same means. Everything after the
release is post-processing, so the generator may look at it as often as it likes.

phi(x) = (cos(w_j . x), sin(w_j . x))_j / sqrt(m) has norm 1 exactly, whatever m is: more features are not more noise.

Released: noisy class sums of phi, and noisy class counts unless sizes are declared public; once each.
Public: image shape, class names; the frequencies w_j, which are drawn from the user's seed.
Events: two Gaussian releases on all the data, composed exactly; classes are blocks of one vector.

What is ours: the frequencies. The paper's kernel is Gaussian on all pixels at once, and a mean in it says little that
survives noise. Here each w_j looks through a Gaussian window of random size and place, and is scaled so that w_j . x
varies by a chosen amount under a public model of images: local parts are learned from all images that share them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sfumato.data import DataError, PublicFacts
from sfumato.engine import Vault
from sfumato.functional import Windowed
from sfumato.methods.generating import GeneratorMethod, warm_cosine
from sfumato.nets.generator import refresh_batch_norm
from sfumato.privacy import Release

COUNTS_WEIGHT = 4.0  # noise of the counts over that of the sums: they need less accuracy, and cost 3 % of it
CORRELATION_LENGTH = 0.25  # of the public image model, in image sides
PIXEL_VARIANCE = 0.35  # of the public image model, for pixels in [-1, 1]
LARGEST_SIDE = 128
LEAST_PER_CLASS = 8  # generated images of a class in a step


@dataclass(kw_only=True, eq=False)
class MeanEmbedding(GeneratorMethod):
    """One noisy mean embedding per class, matched by a small conditional generator.

    features: number m of frequencies. window, amplitude: ranges (log-uniform) of a frequency's window, in image sides,
    and of the standard deviation of w . x. steps, batch_size, features_per_step, learning_rate, ema: of the generator.
    """

    key: ClassVar[str] = "dp-merf"
    paper: ClassVar[str] = "Harder et al., AISTATS 2021"
    summary: ClassVar[str] = "one noisy mean embedding in random Fourier features, matched by a small generator"

    features: int = 4000
    window: tuple[float, float] = (0.05, 1.0)
    amplitude: tuple[float, float] = (0.7, 2.8)
    steps: int = 2000
    batch_size: int = 500
    features_per_step: int = 1000
    learning_rate: float = 5e-3
    ema: float = 0.995

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape) > LARGEST_SIDE:
            raise DataError(
                f"dp-merf is for images of up to {LARGEST_SIDE} pixels a side; pass a smaller size (--size 64)"
            )
        counts = [] if public.sizes else [Release("counts", weight=COUNTS_WEIGHT, nonnegative=True)]
        return [*counts, Release("embedding")]

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        frequencies = self._spectrum(public.shape).frequencies(self.features, math.prod(public.shape), generator)
        counts = torch.tensor(public.sizes, device=self.torch_device) if public.sizes else vault.counts()
        self.counts_ = counts.float().clamp_min(1)
        sums = vault.sum(
            lambda images: _fourier(images, frequencies) / math.sqrt(self.features),
            release="embedding",
            bound=1.0,
            by_class=True,
        )
        means = sums * math.sqrt(self.features) / self.counts_[:, None]
        self._fit_generator(public, means, frequencies, generator)

    def _spectrum(self, shape: tuple[int, int, int]) -> Windowed:
        """w . x varies by `amplitude` under the public model of images."""
        norm = math.sqrt(PIXEL_VARIANCE * math.prod(shape))
        low, high = self.amplitude
        return Windowed(shape, (norm / high, norm / low), self.window, norm, CORRELATION_LENGTH)

    def _fit_generator(
        self, public: PublicFacts, means: torch.Tensor, frequencies: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Minimises |means - generated means|^2 over a random part of the features and classes at each step.

        The square of a mean over n images is biased by its variance; as |phi| = 1 the factor n / (n - 1) undoes that.
        """
        device, classes = self.torch_device, len(public.classes)
        network = self._network(public)
        parameters: list[torch.Tensor] = list(network.parameters())
        average = [parameter.detach().clone() for parameter in parameters]
        optimizer = torch.optim.Adam(parameters, self.learning_rate, betas=(0.5, 0.99), fused=True)
        chosen = max(1, min(classes, self.batch_size // LEAST_PER_CLASS))
        each = max(2, self.batch_size // chosen)

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            some = torch.randperm(classes, generator=generator, device=device)[:chosen]
            latent = torch.randn(chosen * each, self.latent, generator=generator, device=device)
            return some, network(latent, some.repeat_interleave(each))

        parts: dict[str, Any] = {"network": network, "average": average, "optimizer": optimizer, "generator": generator}
        for step in self._checkpoints.loop("generator", self.steps, **parts):
            optimizer.param_groups[0]["lr"] = self.learning_rate * warm_cosine(step, self.steps)
            some, images = draw()
            part = torch.randint(self.features, (self.features_per_step,), generator=generator, device=device)
            wanted = means[some][:, torch.cat([part, part + self.features])]
            made = _fourier(images, frequencies[part]).view(chosen, each, -1).mean(1)
            loss = (each / (each - 1) * made.square() - 2 * made * wanted).sum(1).mean() / self.features_per_step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(average, parameters, 1 - self.ema)

        with torch.no_grad():
            for parameter, mean in zip(parameters, average, strict=True):
                parameter.copy_(mean)
        refresh_batch_norm(network, draw)
        self.generator_ = network


def _fourier(images: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """cos and sin of each frequency's phase, [N, 2m]."""
    phase = images.flatten(1) @ frequencies.T
    return torch.cat([phase.cos(), phase.sin()], 1)
