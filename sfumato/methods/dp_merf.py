"""DP-MERF: mean embeddings in random Fourier features (Harder, Adamczewski, Park; AISTATS 2021).

Idea: the mean of random features phi(x) over a class describes its distribution, in the sense of a kernel distance
(MMD). Release the noisy means once, then train a generator whose images have the same means. Everything after the
release is post-processing.

phi(x) = (cos(w_j . x), sin(w_j . x))_j / sqrt(m) has norm 1 exactly for every m: more features do not mean more noise.

Released: noisy class sums of phi, and noisy class counts unless sizes are declared public; once each.
Public: image shape, class names; the frequencies w_j, drawn from the user's seed.
Events: two Gaussian releases on all the data, composed exactly; classes are blocks of one vector.

Differs from the paper in the frequencies. The paper's Gaussian kernel over all pixels has a low signal-to-noise ratio.
Here each w_j has a Gaussian window of random size and place, and a random scale at which w_j . x varies by a chosen
amount under a public model of images. So local parts are learned from all images that share them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from sfumato.data import DataError, PublicFacts
from sfumato.engine import GradientVault
from sfumato.features.kernels import WindowedSpectrum
from sfumato.methods.base import constant
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.generator_method import GeneratorMethod
from sfumato.nets.generators import refresh_batch_norm
from sfumato.nets.training import Trainer, use_average, warm_cosine
from sfumato.privacy import Release

CORRELATION_LENGTH = 0.25  # of the public image model, in image sides
PIXEL_VARIANCE = 0.35  # of the public image model, for pixels in [-1, 1]
MAX_SIDE = 128
MIN_PER_CLASS = 8  # generated images of a class in a step


@dataclass(kw_only=True, eq=False)
class MeanEmbedding(GeneratorMethod):
    """One noisy mean embedding per class, matched by a small conditional generator.

    - features: int, 4000; number m of frequencies.
    - steps: int, 2000; training steps of the generator.
    - batch_size: int, 500; generated images in a step.
    - learning_rate: float, 5e-3; of Adam.
    """

    key: ClassVar[str] = "dp-merf"
    paper: ClassVar[str] = "Harder et al., AISTATS 2021"
    summary: ClassVar[str] = "match one noisy mean embedding in random Fourier features"

    features: int = 4000
    steps: int = 2000
    batch_size: int = 500
    learning_rate: float = 5e-3
    window: tuple[float, float] = constant((0.05, 1.0))  # range of window sizes, in image sides; log-uniform
    amplitude: tuple[float, float] = constant((0.7, 2.8))  # range of the standard deviation of w . x; log-uniform
    features_per_step: int = constant(1000)
    ema: float = constant(0.995)

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape) > MAX_SIDE:
            raise DataError(f"dp-merf takes images of up to {MAX_SIDE} pixels a side; pass a smaller size (--size 64)")
        return [*counts_release(public), Release("embedding")]

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        frequencies = self._spectrum(public.shape).frequencies(self.features, math.prod(public.shape), generator)
        self.counts_ = class_counts(vault, public)
        sums = vault.sum(
            lambda images: _fourier(images, frequencies) / math.sqrt(self.features),
            release="embedding",
            bound=1.0,
            by_class=True,
        )
        means = sums * math.sqrt(self.features) / self.counts_[:, None]
        self._fit_generator(public, means, frequencies, generator)

    def _spectrum(self, shape: tuple[int, int, int]) -> WindowedSpectrum:
        """Return the distribution of the frequencies: w . x varies by `amplitude` under the public model of images."""
        norm = math.sqrt(PIXEL_VARIANCE * math.prod(shape))
        low, high = self.amplitude
        return WindowedSpectrum(shape, (norm / high, norm / low), self.window, norm, CORRELATION_LENGTH)

    def _fit_generator(
        self, public: PublicFacts, means: torch.Tensor, frequencies: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Minimise |means - generated means|² over random features and classes at each step.

        The square of a mean over n images is biased by its variance; as |phi| = 1, the factor n / (n - 1) corrects it.
        """
        device, classes = self.torch_device, len(public.classes)
        network = self._new_generator(public)
        trainer = Trainer(network, ema=self.ema, betas=(0.5, 0.99))
        classes_per_step = max(1, min(classes, self.batch_size // MIN_PER_CLASS))
        per_class = max(2, self.batch_size // classes_per_step)

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            labels = torch.randperm(classes, generator=generator, device=device)[:classes_per_step]
            latent = torch.randn(len(labels) * per_class, self.generator.latent, generator=generator, device=device)
            return labels, network(latent, labels.repeat_interleave(per_class))

        for step in self._checkpoints.loop("generator", self.steps, trainer=trainer, generator=generator):
            trainer.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            labels, images = draw()
            chosen = torch.randint(self.features, (self.features_per_step,), generator=generator, device=device)
            private = means[labels][:, torch.cat([chosen, chosen + self.features])]
            generated = _fourier(images, frequencies[chosen]).view(len(labels), per_class, -1).mean(1)
            unbiased = per_class / (per_class - 1) * generated.square()
            trainer.descend((unbiased - 2 * generated * private).sum(1).mean() / self.features_per_step)
        use_average(trainer)
        refresh_batch_norm(network, draw)
        self.generator_ = network


def _fourier(images: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return cos and sin of each frequency's phase, [N, 2m]."""
    phase = images.flatten(1) @ frequencies.T
    return torch.cat([phase.cos(), phase.sin()], 1)
