"""DP-kernel: a generator trained on a noisy function ("Functional Rényi Differential Privacy for Generative Modeling").

The idea: the mean of k(x, .) over a class is a function that says how like the class a point is. Release it with the
noise of a Gaussian process, and let a generator climb it while its images keep apart: that minimises the kernel
distance (MMD) to the private images.

Released, at each step: for random frequencies that are drawn afresh, the noisy class sums of random Fourier features
over a Poisson sample; that is a whole noisy path of the function (`functional/release.py` has the proof), so that its
derivatives are post-processing. Noisy class counts unless sizes are declared.
Public: image shape, class names; frequencies and initial weights, from the user's seed.
Events: Gaussian sums over Poisson samples with probability q, composed by PLD; classes are blocks of one vector.

What is ours: the kernel, on wavelet scattering coefficients beside pixels; and rows that are differences from the
generated images' mean, which is public: for kernels as broad as these, most of a row is what all images have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, PublicFacts
from sfumato.encoders.scattering import Scattering
from sfumato.functional import Frequencies, Gaussian, Part
from sfumato.methods.base import Synthesizer
from sfumato.nets.generator import Generator, refresh_batch_norm
from sfumato.privacy import Release, Vault
from sfumato.progress import track

COUNTS_WEIGHT = 4.0  # noise of the counts over that of all sums together
GROUP = 3  # scattering channels that are normalised together
LARGEST_SIDE = 64


@dataclass(kw_only=True, eq=False)
class KernelGenerator(Synthesizer):
    """A generator that follows a noisy function, step by step.

    pixels, scattering: bandwidths of the Gaussian kernels on pixels and on scattering coefficients, both of norm one;
    scattering_share: weight of the latter. features: random frequencies in a step. sampling_prob, steps: q and the
    number of releases. bound: rows are clipped to it. batch_size, learning_rate, latent, hidden, width, ema: of the
    generator.
    """

    key: ClassVar[str] = "dp-kernel"
    paper: ClassVar[str] = "Functional Renyi Differential Privacy for Generative Modeling (Jiang et al., NeurIPS 2023)"
    summary: ClassVar[str] = "a generator that follows a noisy kernel mean of scattering coefficients"

    steps: int = 1500
    sampling_prob: float = 0.05
    features: int = 2000
    pixels: tuple[float, ...] = (0.2, 0.4)
    scattering: tuple[float, ...] = (0.3, 1.0)
    scattering_share: float = 0.5
    bound: float = 1.0
    batch_size: int = 500
    learning_rate: float = 2e-3
    latent: int = 64
    hidden: int = 256
    width: int = 64
    ema: float = 0.99

    def _releases(self, public: PublicFacts) -> list[Release]:
        if max(public.shape[1:]) > LARGEST_SIDE:
            raise DataError(
                f"dp-kernel is for images of up to {LARGEST_SIDE} pixels a side; pass a smaller size (--size)"
            )
        weight = COUNTS_WEIGHT / (self.sampling_prob * math.sqrt(self.steps))
        counts = [] if public.sizes else [Release("counts", weight=weight, nonnegative=True)]
        return [*counts, Release("sums", self.steps, self.sampling_prob)]

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        device, classes = self.torch_device, len(public.classes)
        generator = torch.Generator(device).manual_seed(self.seed)
        counts = torch.tensor(public.sizes, device=device) if public.sizes else vault.counts()
        self.counts_ = counts.float().clamp_min(1)
        expected = (self.sampling_prob * self.counts_)[:, None]
        vectors = Vectors(public.shape).to(device)
        vault = vault.map(vectors)
        network, average = self._network(public), self._network(public).requires_grad_(False)
        average.load_state_dict(network.state_dict())
        optimizer = torch.optim.Adam(network.parameters(), self.learning_rate, betas=(0.5, 0.99))
        each = max(2, self.batch_size // classes)
        labels = torch.arange(classes, device=device).repeat_interleave(each)

        def drawn() -> torch.Tensor:
            latent = torch.randn(len(labels), self.latent, generator=generator, device=device)
            made: torch.Tensor = vectors(network(latent, labels))
            return made

        for step in track(self.steps, "generator"):
            with torch.no_grad():
                seen = drawn()
            features = self._features(vectors, seen, generator)
            means = features(seen).view(classes, each, -1).mean(1)
            sums = vault.sum(
                _differences(features, means), release="sums", bound=self.bound, by_class=True, with_labels=True
            )
            made = features(drawn()).view(classes, each, -1).mean(1)
            loss = -(made * (sums / expected)).sum()
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * self._rate(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - self.ema)

        refresh_batch_norm(average.train())
        with torch.no_grad():
            for _ in range(20):
                average(torch.randn(len(labels), self.latent, generator=generator, device=device), labels)
        self.generator_ = average.eval()

    def _features(self, vectors: Vectors, like: torch.Tensor, generator: torch.Generator) -> Frequencies:
        """Fresh frequencies on both representations."""
        parts = [
            Part(vectors.scattering, Gaussian(self.scattering), self.scattering_share),
            Part(vectors.pixels, Gaussian(self.pixels), 1 - self.scattering_share),
        ]
        return Frequencies([part for part in parts if part.weight > 0], self.features, like, generator)

    def _rate(self, step: int) -> float:
        """Share of the learning rate: up over 2 % of the steps, then a cosine down to 2 %."""
        return min(1.0, (step + 1) / (0.02 * self.steps + 1)) * (0.51 + 0.49 * math.cos(math.pi * step / self.steps))

    def _network(self, public: PublicFacts) -> Generator:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = Generator(
                public.shape, len(public.classes), latent=self.latent, hidden=self.hidden, width=self.width
            )
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


class Vectors(nn.Module):
    """Images as vectors: scattering coefficients, then pixels; each of norm one, or below.

    Coefficients are normalised in small groups of channels, to zero mean and unit variance, and divided by the root of
    their number, which is public; pixels by the root of theirs.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, *size = shape
        self.transform = Scattering((size[0], size[1]))
        self.groups = max(1, channels * self.transform.channels // GROUP)
        self.coefficients = channels * self.transform.channels * (size[0] // 4) * (size[1] // 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, coefficients + pixels]."""
        maps = self.transform(images).flatten(1, 2)
        normal = functional.group_norm(maps, self.groups).flatten(1) / math.sqrt(self.coefficients)
        return torch.cat([normal, images.flatten(1) / math.sqrt(math.prod(images.shape[1:]))], 1)

    def scattering(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, : self.coefficients]

    def pixels(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, self.coefficients :]


def _differences(features: Frequencies, means: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Features less the generated images' mean in their class."""
    return lambda vectors, labels: features(vectors) - means[labels]
