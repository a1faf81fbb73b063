"""The teacher: a linear classifier trained by noisy gradients, on features that no private image has shaped.

Features: wavelet scattering coefficients (or an autoencoder's latents), the maps of a small CNN trained to classify
*generated* images, and a public encoder if one is named; of all of these the principal components among generated
images, with the smaller ones enlarged. So a gradient has few entries that noise falls on, and all directions converge
at about the same speed.

Released: `steps` noisy sums over all images of the per-example gradients of the cross-entropy, clipped to `bound`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sfumato.engine import GradientVault, Performance
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding
from sfumato.features.unit_norm import (
    CNNFeatures,
    Components,
    EncoderFeatures,
    ScatteringAndPixels,
    UnitNormMaps,
    untrained_cnn_features,
)
from sfumato.methods.checkpoints import Checkpoints
from sfumato.nets.training import state_below

FeatureMap = Callable[[torch.Tensor], torch.Tensor]
MOMENTUM = 0.9
ROWS_PER_BATCH = 512  # of a gradient: the margin for rounding grows with it
IMAGES_PER_BATCH = 250  # of the feature networks, which keep megabytes of each image
ENCODER_SIDE = 128  # pixels to which images are enlarged for a public encoder
LOW_NOISE_THRESHOLD = 3e-5  # noise of all gradients together, per image; below it: more steps and components
FEW_STEPS, MANY_STEPS = 60, 200
FEW_COMPONENTS, MANY_COMPONENTS = 500, 1500
RATE_THRESHOLD = 6e-3  # of noise per image times steps; above it the learning rate is lower


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the teacher.

    - steps: number of noisy gradients; 0: chosen by the noise. bound: clipping norm. rate: learning rate.
    - cnn_images: generated images that the CNN is trained on.
    """

    steps: int = 0
    bound: float = 0.5
    rate: float = 60.0
    cnn_images: int = 12_000

    def planned_steps(self, noise_per_image: float, share: float) -> int:
        """Return the number of gradients, from public facts: more where the noise is low."""
        if self.steps:
            return self.steps
        return MANY_STEPS if noise_per_image < LOW_NOISE_THRESHOLD * math.sqrt(share) else FEW_STEPS


class Teacher(nn.Module):
    """A linear classifier on several feature vectors of norm at most one.

    - shape: of images (or latents). cnn: features of a CNN trained on generated images. encoder: name of a public
      encoder, or empty. latents: whether it sees an autoencoder's latents instead of images.
    """

    def __init__(
        self, shape: tuple[int, int, int], cnn: UnitNormMaps, classes: int, *, encoder: str = "", latents: bool = False
    ) -> None:
        super().__init__()
        device = next(cnn.parameters()).device
        first: FeatureMap = UnitNormMaps(nn.Identity()) if latents else ScatteringAndPixels(shape).to(device).scattering
        maps: list[FeatureMap] = [first]
        if encoder:
            maps.append(EncoderFeatures(load_perceptual(encoder, device), shape, ENCODER_SIDE))
        self.cnn = cnn
        self._maps: list[FeatureMap] = [*maps, cnn]  # a list: public networks do not belong to the state
        width = self.features(torch.zeros(1, *shape, device=device)).shape[1]
        self.weight = nn.Parameter(torch.zeros(classes, width, device=device))
        self.bias = nn.Parameter(torch.zeros(classes, device=device))
        self.requires_grad_(False)

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        rows = [torch.cat([each(part) for each in self._maps], 1) for part in images.split(IMAGES_PER_BATCH)]
        return torch.cat(rows) / math.sqrt(len(self._maps))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.features(images), self.weight, self.bias)

    def predict(self, images: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the most likely class of each image."""
        return torch.cat([self(part).argmax(1) for part in images.split(batch)])


def prepare_teacher(
    generate: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
    labels: torch.Tensor,
    classes: int,
    components: int,
    seed: int,
    checkpoints: Checkpoints,
    build: Callable[[UnitNormMaps], Teacher],
    batch: int,
) -> tuple[Teacher, Components]:
    """Train the CNN on generated images and return an untrained teacher with its principal components.

    - generate: draws images (or latents) of labels. labels: of the generated images.
    - components: how many. build: a teacher with that CNN. batch: images in a forward.
    """
    made: list[tuple[Teacher, Components]] = []

    def make() -> dict[str, torch.Tensor]:
        generator = torch.Generator(labels.device).manual_seed(seed)
        images = generate(labels, generator)
        teacher = build(CNNFeatures(images, labels, classes, generator))
        rows = torch.cat([teacher.features(part) for part in images.split(batch)])
        found = Components.of(rows, components, seed)
        made.append((teacher, found))
        cnn = {f"cnn.{name}": value for name, value in teacher.cnn.state_dict().items()}
        return {"centre": found.centre, "axes": found.axes, "shape": torch.tensor(images.shape[1:]), **cnn}

    saved = checkpoints.once("components", make)
    if not made:
        channels, height, width = (int(side) for side in saved["shape"])
        cnn = untrained_cnn_features((channels, height, width), classes).to(labels.device)
        cnn.load_state_dict(state_below(saved, "cnn."))
        made.append((build(cnn), Components(saved["centre"].to(labels.device), saved["axes"].to(labels.device))))
    return made[0]


def components_for(vault: GradientVault, images: float) -> int:
    """Return the number of components: more where the noise of all gradients together is low."""
    return MANY_COMPONENTS if _noise(vault, images) < LOW_NOISE_THRESHOLD else FEW_COMPONENTS


def train_teacher(
    vault: GradientVault,
    teacher: Teacher,
    components: Components,
    settings: TeacherSettings,
    images: float,
    checkpoints: Checkpoints,
) -> None:
    """Train by full-batch gradient descent with momentum, each gradient a noisy sum. `images`: how many there are."""
    projected = vault.map(lambda batch: components(teacher.features(batch)))
    weight = _descend(projected, components.axes.shape[1], len(teacher.bias), settings, images, checkpoints)
    teacher.weight.copy_(weight @ components.axes.T)
    teacher.bias.copy_(-teacher.weight @ components.centre)


class EmbeddingTeacher(nn.Module):
    """A linear classifier on an embedding of images, for methods with a prior."""

    def __init__(self, embedding: ImageEmbedding, classes: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.weight = nn.Parameter(torch.zeros(classes, embedding.width, device=embedding.axes.device))
        self.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.embedding(images))

    def classify(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of the embedding."""
        return functional.linear(rows, self.weight)

    def predict(self, images: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the most likely class of each image."""
        return torch.cat([self(part).argmax(1) for part in images.split(batch)])

    def train_on(
        self, embedded: GradientVault, settings: TeacherSettings, images: float, checkpoints: Checkpoints
    ) -> None:
        """Train on a vault of embedded images. `images`: how many there are."""
        self.weight.copy_(_descend(embedded, self.weight.shape[1], len(self.weight), settings, images, checkpoints))


def _descend(
    projected: GradientVault,
    width: int,
    classes: int,
    settings: TeacherSettings,
    images: float,
    checkpoints: Checkpoints,
) -> torch.Tensor:
    """Return the weights [classes, width] of full-batch gradient descent with momentum on noisy gradients."""
    times, noise = projected.plan["teacher"].times, _noise(projected, images)
    linear = nn.utils.skip_init(nn.Linear, width, classes, bias=False)
    nn.init.zeros_(linear.to(projected.device).weight)
    velocity = torch.zeros_like(linear.weight)
    rate = settings.rate * (min(1.0, RATE_THRESHOLD / (noise * times)) if noise > 0 else 1.0)
    for _ in checkpoints.loop("teacher", times, linear=linear, velocity=velocity):
        sums = projected.gradient(
            linear,
            cross_entropy_per_example,
            release="teacher",
            bound=settings.bound,
            with_labels=True,
            performance=Performance(batch_size=ROWS_PER_BATCH),
        )
        velocity.mul_(MOMENTUM).add_(sums["weight"] / images)
        with torch.no_grad():
            linear.weight -= rate * velocity
    weight: torch.Tensor = linear.weight.detach()
    return weight


def cross_entropy_per_example(model: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(rows), labels, reduction="none")


def _noise(vault: GradientVault, images: float) -> float:
    """Return the noise of all the teacher's gradients together, per image."""
    return vault.plan["teacher"].noise / (math.sqrt(vault.plan["teacher"].times) * images)
