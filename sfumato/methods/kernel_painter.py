"""The kernel painter: a generator that follows noisy kernel means. `dp-kernel` is this; `atelier` adds a teacher.

Idea: the mean of k(x, .) over a class measures how typical a point is of that class. Release it with the noise of a
Gaussian process and let a generator maximise it while its own images repel each other. This minimises the MMD
between generated and private images.

Released: noisy class sums of random Fourier features, once for each of a few `paths`. Such a sum is a whole noisy
sample path of the function (proof: `features/fourier.py`), so its derivatives, and every training step, are
post-processing. With `common_share`, also the same sums over all classes.

Differs from the paper in the kernels. Frequencies have windows, so parts of images are learned from all images that
share them. The first path uses pixels and wavelet scattering coefficients. Each later path uses the features of a small
CNN that was trained to classify *generated* images. Large images are generated as latents of a public autoencoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from sfumato.data import DataError, PublicFacts
from sfumato.engine import GradientVault
from sfumato.engine.cuda_graph import Graph
from sfumato.features import Perceptual, load_perceptual
from sfumato.features.fourier import FrequencyBlock, RandomFourierFeatures
from sfumato.features.kernels import WindowedSpectrum
from sfumato.features.public_autoencoder import LATENT_SCALE, latent_shape, load_autoencoder
from sfumato.features.unit_norm import (
    CNNFeatures,
    EncoderFeatures,
    ScatteringAndPixels,
    UnitNormMaps,
    scaled_latents,
    untrained_cnn_features,
)
from sfumato.methods.checkpoints import Checkpoints, check_public_files
from sfumato.methods.class_counts import counts_release
from sfumato.methods.generator_method import GeneratorSizes, GeneratorTraining, draw
from sfumato.nets.training import state_below, warm_cosine
from sfumato.privacy import Release

MAX_SIDE = 64  # pixels; larger images go through an autoencoder
MIN_LATENT_SIDE = 4
MIN_PER_CLASS = 4  # generated images of a class in a batch
PATH_RATE_DECAY = 0.7  # factor on the learning rate from one path to the next
PIXEL_NORM, CORRELATION_LENGTH = math.sqrt(0.35), 0.25  # public image model: norm of the vector; in image sides
TV_EPSILON = 1e-2  # smooths total variation at zero


@dataclass(frozen=True)
class PainterSettings:
    """Settings of the kernel painter.

    - features: frequencies of a path.
    - features_per_step: frequencies used in a step.
    - pixel_bandwidths: range of bandwidths of the Gaussian kernels on pixels, vectors of norm one.
    - scattering_bandwidths: the same on scattering coefficients.
    - cnn_bandwidths: the same on features of the CNN.
    - window: range of window sizes, in image sides.
    - scattering_share: part of the first path's frequencies that use scattering coefficients; the others use pixels.
    - cnn_images: generated images that the CNN of a later path is trained on.
    - common_share: part of the sums' budget for sums over all classes: what classes have in common is then known with
      less noise.
    - common_threshold: no such release where the class noise is below it.
    - smoothness: weight of the total variation where the noise in a mean is as large as the mean can be; elsewhere in
      proportion to the squared noise. Noise causes specks; this suppresses them.
    - learning_rate: learning rate of the generator.
    - ema: decay of the exponential moving average of its weights.
    """

    features: int = 4000
    features_per_step: int = 1000
    pixel_bandwidths: tuple[float, float] = (0.2, 0.8)
    scattering_bandwidths: tuple[float, float] = (0.3, 1.0)
    cnn_bandwidths: tuple[float, float] = (0.3, 1.0)
    window: tuple[float, float] = (0.05, 1.0)
    scattering_share: float = 0.5
    cnn_images: int = 12_000
    common_share: float = 0.0
    common_threshold: float = 0.0
    smoothness: float = 0.0
    learning_rate: float = 5e-3
    ema: float = 0.99


CPU_STEPS, CPU_BATCH_SIZE = 1800, 200
CPU_PAINTER = PainterSettings(features_per_step=500, scattering_share=0.0)


class WithPaths(Protocol):
    """The settings of a method that a kernel painter takes."""

    paths: int
    steps: int
    batch_size: int
    seed: int

    @property
    def autoencoder(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    def _noise_per_image(self, public: PublicFacts) -> float: ...


class KernelPainter:
    """A generator for one data set: its releases, its training, its samples.

    - owner: the method. With its `autoencoder` the painter works on latents (`canvas`).
    - settings, sizes: of the training and the network.
    - public: facts of the images.
    - encoder: a public network whose last maps get half of the first path's frequencies; empty: none.
    """

    def __init__(
        self, owner: WithPaths, settings: PainterSettings, sizes: GeneratorSizes, public: PublicFacts, encoder: str = ""
    ) -> None:
        self.settings, self.sizes, self.public, self.encoder = settings, sizes, public, encoder
        self.stages, self.steps, self.batch_size = min(owner.paths, owner.steps), owner.steps, owner.batch_size
        self.seed, self.device, self.autoencoder = owner.seed, owner.torch_device, owner.autoencoder
        self.canvas = replace(public, shape=latent_shape(public.shape)) if self.autoencoder else public
        # noise of one release with the whole budget, over the number of images of a class
        class_noise = len(public.classes) * owner._noise_per_image(public)
        several = len(public.classes) > 1  # with one class, one release has everything
        above = settings.common_threshold == 0 or class_noise >= settings.common_threshold
        self.common_share = settings.common_share if several and above else 0.0

    # -- the plan -----------------------------------------------------------------------------------------

    def releases(self) -> list[Release]:
        """Return the planned releases: class counts unless declared, class sums, and common sums if any."""
        self.check_size()
        times, share = self.stages, self.common_share
        sums = [Release("sums", times, weight=(1 - share) ** -0.5)]
        common = [Release("common", times, weight=share**-0.5)] if share else []
        return [*counts_release(self.public, times**-0.5), *sums, *common]

    def check_size(self) -> None:
        """Raise `DataError` for images that are too large, or too small for the autoencoder."""
        sides = self.canvas.shape[1:]
        if max(sides) > MAX_SIDE:
            other = "" if self.autoencoder else ", or up to 512 with autoencoder='taef2'"
            raise DataError(
                f"images are {self.public.shape[1]} × {self.public.shape[2]}; the method takes up to "
                f"{8 * MAX_SIDE if self.autoencoder else MAX_SIDE} pixels a side (--size){other}"
            )
        if self.autoencoder and min(sides) < MIN_LATENT_SIDE:
            raise DataError("the autoencoder needs images of at least 32 pixels a side; leave it out")

    def facts(self) -> dict[str, Any]:
        """Return the public networks in use, for the certificate."""
        facts = {"encoder": load_perceptual(self.encoder, self.device).facts} if self.encoder else {}
        return {**facts, "autoencoder": load_autoencoder().facts} if self.autoencoder else facts

    def in_use(self) -> dict[str, tuple[Any, str] | None]:
        """Return the settings that a method with this painter uses otherwise; see `Parameterized._in_use`."""
        found: dict[str, tuple[Any, str] | None] = {"paths": (self.stages, "at most one for each step")}
        if not self.common_share:
            why = "less noise than common_threshold" if len(self.public.classes) > 1 else "one class"
            found |= {"painter.common_share": (0.0, why), "painter.common_threshold": None}
        if self.autoencoder:
            found |= dict.fromkeys(("painter.scattering_share", "painter.scattering_bandwidths", "painter.smoothness"))
        if self.stages == 1 or len(self.public.classes) == 1:
            found |= dict.fromkeys(("painter.cnn_bandwidths", "painter.cnn_images"))
        return found

    # -- training -----------------------------------------------------------------------------------------

    def open(self, vault: GradientVault) -> GradientVault:
        """Return a vault of what the generator models: images, or their latents."""
        if not self.autoencoder:
            return vault
        network = load_autoencoder(self.device)
        check_public_files(vault, {"autoencoder": network.facts})
        return vault.map(lambda images: scaled_latents(network, images))

    def training(self) -> PathTraining:
        return PathTraining(self, torch.Generator(self.device).manual_seed(self.seed))

    def fit(self, vault: GradientVault, counts: torch.Tensor, checkpoints: Checkpoints) -> nn.Module:
        """Release one path after another and follow all there are. Return the generator."""
        settings, stages, training = self.settings, self.stages, self.training()
        counts = counts[:, None]
        training.class_shares = counts / counts.sum()
        encoder = load_perceptual(self.encoder, self.device) if self.encoder else None
        if encoder is not None:
            check_public_files(vault, {"encoder": encoder.facts})
        smoothing = self._smoothing(vault.plan["sums"].noise / counts)
        starts = [-(-stage * self.steps // stages) for stage in range(stages + 1)]
        for stage in range(stages):
            training.add(*self._path(vault, training, stage, encoder, counts, checkpoints), smoothing)
            steps = starts[stage + 1] - starts[stage]
            for step in checkpoints.loop(f"generator {stage + 1}/{stages}", steps, training=training):
                place = ((starts[stage] + step) * stages - stage * self.steps) // stages
                rate = settings.learning_rate * warm_cosine(place, self.steps // stages)
                training.trainer.set_rate(PATH_RATE_DECAY**stage * rate)
                training.follow(settings.features_per_step)
        return training.averaged()

    def _path(
        self,
        vault: GradientVault,
        training: PathTraining,
        stage: int,
        encoder: Perceptual | None,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
    ) -> tuple[RandomFourierFeatures, torch.Tensor]:
        """Release a path, or read it from a checkpoint: its features, and noisy class means in them."""
        saved = checkpoints.saved(f"path {stage}")
        network: UnitNormMaps | None = None
        if stage > 0 and training.classes > 1:
            if saved is None:
                network = training.cnn_features(self.settings.cnn_images)
            else:
                network = untrained_cnn_features(training.shape, training.classes).to(self.device)
                network.load_state_dict(state_below(saved, "network."))
        features = self._features(training, network, encoder)
        if saved is not None:
            tensors = [saved[f"frequencies.{number}"].to(self.device) for number in range(len(features.tensors()))]
            training.generator.set_state(saved["random"])
            return features.like(tensors), saved["means"].to(self.device)
        sums = vault.sum(features, release="sums", bound=1.0, by_class=True)
        if training.common_share:
            common = vault.sum(features, release="common", bound=1.0)
            sums = combine_with_common_sum(sums, common, training.common_share)
        held = {f"frequencies.{number}": part for number, part in enumerate(features.tensors())}
        held |= {} if network is None else {f"network.{name}": part for name, part in network.state_dict().items()}
        means = sums / counts
        checkpoints.keep(f"path {stage}", {"means": means, "random": training.generator.get_state(), **held})
        return features, means

    def _features(
        self, training: PathTraining, cnn: UnitNormMaps | None, encoder: Perceptual | None
    ) -> RandomFourierFeatures:
        """Draw a path's features: of pixels and scattering coefficients, or of a CNN."""
        settings, vectors = self.settings, training.vectors
        like = torch.zeros(1, *training.shape, device=self.device)
        if cnn is not None:
            blocks = [self._network_block(cnn, like)]
        else:
            share = 0.0 if self.autoencoder else settings.scattering_share
            scattering = WindowedSpectrum(vectors.maps, settings.scattering_bandwidths, settings.window)
            pixels = WindowedSpectrum(
                training.shape, settings.pixel_bandwidths, settings.window, PIXEL_NORM, CORRELATION_LENGTH
            )
            blocks = [
                FrequencyBlock(vectors.scattering, scattering, share),
                FrequencyBlock(vectors.pixels, pixels, 1 - share),
            ]
            if encoder is not None:
                blocks.append(self._network_block(EncoderFeatures(encoder, training.shape), like))
        used = [block for block in blocks if block.weight > 0]
        return RandomFourierFeatures(used, settings.features, like, training.generator)

    def _network_block(self, maps: UnitNormMaps, like: torch.Tensor) -> FrequencyBlock:
        channels, height, width = maps.maps(like).shape[1:]
        spectrum = WindowedSpectrum((channels, height, width), self.settings.cnn_bandwidths, self.settings.window)
        return FrequencyBlock(maps, spectrum)

    def _smoothing(self, noise: torch.Tensor) -> torch.Tensor:
        """Return the weight of the total variation for each class, from the noise in its mean."""
        return self.settings.smoothness * (2 * self.settings.features * noise.square()).clamp_max(1)

    # -- samples ------------------------------------------------------------------------------------------

    def new_generator(self) -> nn.Module:
        return self.sizes.build(self.canvas, self.seed, self.device)

    def paint(self, network: nn.Module, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images or latents for labels [N], or for class weights [N, classes]."""
        return draw(network, self.sizes.latent, labels, generator)

    def decode(self, painted: torch.Tensor) -> torch.Tensor:
        """Decode generated latents to images; images stay as they are."""
        if not self.autoencoder:
            return painted
        return load_autoencoder(self.device).decode(LATENT_SCALE * painted, self.public.shape)


class PathTraining(GeneratorTraining):
    """Training of a generator that follows all paths released so far."""

    def __init__(self, painter: KernelPainter, generator: torch.Generator) -> None:
        settings, public = painter.settings, painter.canvas
        each = max(MIN_PER_CLASS, painter.batch_size // len(public.classes))
        super().__init__(
            painter.new_generator(), public, generator, each=each, ema=settings.ema, latent=painter.sizes.latent
        )
        self.vectors = ScatteringAndPixels(public.shape).to(generator.device)
        self.paths: list[tuple[RandomFourierFeatures, torch.Tensor]] = []
        self.common_share = painter.common_share
        # precision (1 / noise²) of the common mean, relative to that of a class mean
        self.common_weight = self.common_share / (1 - self.common_share) * self.classes**2
        self.class_shares = torch.full((self.classes, 1), 1 / self.classes, device=generator.device)
        self.smooth = settings.smoothness > 0
        self.smoothing = torch.zeros(len(public.classes), 1, device=generator.device)

    def add(self, features: RandomFourierFeatures, means: torch.Tensor, smoothing: torch.Tensor) -> None:
        """Add a path: its features, noisy class means in them, and the weight of the total variation."""
        self.paths.append((features, means.float()))
        self.smoothing = self.smoothing + smoothing
        self._step = Graph(self._match)

    def follow(self, count: int) -> None:
        """Take a step along all paths, with `count` random frequencies of each."""
        drawn = [features.subsample(count, self.generator, means) for features, means in self.paths]
        features = RandomFourierFeatures.concatenate([features for features, _ in drawn])
        self._step(features, torch.cat([means for _, means in drawn], 1), self.latent())

    def cnn_features(self, count: int) -> CNNFeatures:
        """Train a CNN to classify images of the EMA generator; return its features."""
        self.averaged()
        batches = [self.average_images() for _ in range(math.ceil(count / len(self.labels)))]
        return CNNFeatures(torch.cat(batches), self.labels.repeat(len(batches)), self.classes, self.generator)

    def _match(self, features: RandomFourierFeatures, wanted: torch.Tensor, latent: torch.Tensor) -> None:
        """Descend on |wanted - mean|² plus total variation, summed over classes, plus the common term.

        A path's features have norm 1, so the square of a mean of n images is too large by (1 - its true value) / n;
        the factor n / (n - 1) corrects this up to a constant.
        """
        images = self.images(latent)
        made = self.by_class(features(images)).mean(1)
        squares = made.square()
        loss = (self.each / (self.each - 1) * squares - 2 * made * wanted).sum()
        if self.common_weight:
            every, target = (self.class_shares * made).sum(0), (self.class_shares * wanted).sum(0)
            correction = (self.class_shares.square() * squares).sum(0) / (self.each - 1)
            loss = loss + self.common_weight * (every.square() + correction - 2 * every * target).sum()
        if self.smooth:
            loss = loss + (self.smoothing * self.by_class(total_variation(images)).mean(1, keepdim=True)).sum()
        self.trainer.descend(loss)


def combine_with_common_sum(sums: torch.Tensor, common: torch.Tensor, share: float) -> torch.Tensor:
    """Combine class sums [classes, n] with the sum over all classes, released with `share` of the budget.

    Least squares: with noise² of 1 / (1 - share) in a class's sum and 1 / share in the common one, each class takes its
    part of the difference.
    """
    return sums - (sums.sum(0) - common) * share / (len(sums) * share + 1 - share)


def total_variation(images: torch.Tensor) -> torch.Tensor:
    """Return the total variation of each image per pixel: of brightness, and of opponent colours in RGB images."""
    if images.shape[1] == 3:
        red, green, blue = images.unbind(1)
        images = torch.stack([images.mean(1), red - green, (red + green) / 2 - blue], 1)
    across, down = images[..., :-1, 1:] - images[..., :-1, :-1], images[..., 1:, :-1] - images[..., :-1, :-1]
    return (across.square() + down.square() + TV_EPSILON**2).sqrt().mean((2, 3)).sum(1)
