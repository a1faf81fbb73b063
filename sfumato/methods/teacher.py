"""The teacher: a linear classifier trained by noisy gradients, on features that no private image has shaped.

Features: wavelet scattering coefficients (or an autoencoder's latents), the maps of a small CNN trained to classify
*generated* images, and the maps of a public encoder if one is named. The classifier sees partially whitened principal
components of all these features, computed on generated images. So a gradient has few entries that receive noise, and
all directions converge at about the same speed.

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
from sfumato.privacy import Plan

FeatureMap = Callable[[torch.Tensor], torch.Tensor]
MOMENTUM = 0.9
ROWS_PER_BATCH = 512  # of a gradient: the margin for rounding grows with it
IMAGES_PER_BATCH = 250  # of the feature networks, which keep megabytes of each image
ENCODER_SIDE = 128  # pixels to which images are enlarged for a public encoder
LOW_NOISE_THRESHOLD = 3e-5  # noise of all gradients together, per image: below it more steps and components
FEW_STEPS, MANY_STEPS = 60, 200
FEW_COMPONENTS, MANY_COMPONENTS = 500, 1500
LOGIT_SCALE = 2.0  # factor on the logits by which the teacher weights public images
RATE_THRESHOLD = 6e-3  # of noise per image times steps; above it the learning rate is lower


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the teacher.

    - steps: number of noisy gradients; 0: chosen by the noise.
    - components: number of principal components; 0: chosen by the noise.
    - bound: clipping norm.
    - rate: learning rate, at most; lower where the noise is high.
    - cnn_images: generated images that the CNN is trained on.
    """

    steps: int = 0
    components: int = 0
    bound: float = 0.5
    rate: float = 60.0  # large: rows have norm one over hundreds of components, so the loss is flat along each
    cnn_images: int = 12_000

    # `noise` below: of all gradients together, per image.

    def planned_steps(self, noise: float) -> int:
        return self.steps or (MANY_STEPS if noise < LOW_NOISE_THRESHOLD else FEW_STEPS)

    def planned_components(self, noise: float) -> int:
        return self.components or (MANY_COMPONENTS if noise < LOW_NOISE_THRESHOLD else FEW_COMPONENTS)

    def planned_rate(self, noise: float, steps: int) -> float:
        return self.rate * (min(1.0, RATE_THRESHOLD / (noise * steps)) if noise > 0 else 1.0)


class Classifier(nn.Module):
    def predict(self, images: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the most likely class of each image."""
        return torch.cat([self(part).argmax(1) for part in images.split(batch)])


class Teacher(Classifier):
    """A linear classifier on several feature vectors of norm at most one.

    - shape: of images (or latents).
    - cnn: features of a CNN trained on generated images.
    - encoder: name of a public encoder, or empty.
    - latents: whether it sees an autoencoder's latents instead of images.
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

    - generate: draws images (or latents) of labels.
    - labels: of the generated images.
    - components: how many.
    - build: a teacher with that CNN.
    - batch: images in a forward.
    """
    saved = checkpoints.saved("components")
    if saved is not None:
        channels, height, width = (int(side) for side in saved["shape"])
        cnn = untrained_cnn_features((channels, height, width), classes).to(labels.device)
        cnn.load_state_dict(state_below(saved, "cnn."))
        return build(cnn), Components(saved["centre"].to(labels.device), saved["axes"].to(labels.device))
    generator = torch.Generator(labels.device).manual_seed(seed)
    images = generate(labels, generator)
    teacher = build(CNNFeatures(images, labels, classes, generator))
    rows = torch.cat([teacher.features(part) for part in images.split(batch)])
    found = Components.of(rows, components, seed)
    state = {f"cnn.{name}": value for name, value in teacher.cnn.state_dict().items()}
    state |= {"centre": found.centre, "axes": found.axes, "shape": torch.tensor(images.shape[1:])}
    checkpoints.keep("components", state)
    return teacher, found


def train_teacher(
    vault: GradientVault,
    teacher: Teacher,
    components: Components,
    settings: TeacherSettings,
    image_count: float,
    checkpoints: Checkpoints,
) -> None:
    """Train by full-batch gradient descent with momentum, each gradient a noisy sum over `image_count` images."""
    projected = vault.map(lambda batch: components(teacher.features(batch)))
    weight = _descend(projected, components.axes.shape[1], len(teacher.bias), settings, image_count, checkpoints)
    teacher.weight.copy_(weight @ components.axes.T)
    teacher.bias.copy_(-teacher.weight @ components.centre)


class EmbeddingTeacher(Classifier):
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

    def weigh(self, rows: torch.Tensor) -> torch.Tensor:
        """Return weights [N, classes] of public rows, by how much they resemble each class."""
        return (LOGIT_SCALE * self.classify(rows)).softmax(1)

    def train_on(
        self, embedded: GradientVault, settings: TeacherSettings, image_count: float, checkpoints: Checkpoints
    ) -> None:
        """Train on a vault of `image_count` embedded images."""
        classes, width = self.weight.shape
        self.weight.copy_(_descend(embedded, width, classes, settings, image_count, checkpoints))


def _descend(
    projected: GradientVault,
    width: int,
    classes: int,
    settings: TeacherSettings,
    image_count: float,
    checkpoints: Checkpoints,
) -> torch.Tensor:
    """Return the weights [classes, width] of full-batch gradient descent with momentum on noisy gradients."""
    times = projected.plan["teacher"].times
    linear = nn.utils.skip_init(nn.Linear, width, classes, bias=False)
    nn.init.zeros_(linear.to(projected.device).weight)
    velocity = torch.zeros_like(linear.weight)
    rate = settings.planned_rate(gradient_noise(projected.plan, image_count), times)
    for _ in checkpoints.loop("teacher", times, linear=linear, velocity=velocity):
        sums = projected.gradient(
            linear,
            cross_entropy_per_example,
            release="teacher",
            bound=settings.bound,
            with_labels=True,
            performance=Performance(batch_size=ROWS_PER_BATCH),
        )
        velocity.mul_(MOMENTUM).add_(sums["weight"] / image_count)
        with torch.no_grad():
            linear.weight -= rate * velocity
    weight: torch.Tensor = linear.weight.detach()
    return weight


def cross_entropy_per_example(model: nn.Module, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(rows), labels, reduction="none")


def gradient_noise(plan: Plan, image_count: float) -> float:
    """Return the noise of all the teacher's gradients together, per image."""
    return plan["teacher"].noise / (math.sqrt(plan["teacher"].times) * image_count)
