"""The embedding painter: a prior that is conditioned on embeddings of a private class.

The network of such a prior is conditioned on an embedding of the image to be made (`features/embedding.py`): it has
learned from public images what an image with this embedding looks like. Only the distribution of the embeddings is
learned from private images:

1. Ask for noisy sums of first and second moments of each class, and of second moments of all images; a Gaussian
   distribution for each class follows (`features/class_gaussians.py`). With a teacher, the covariance that is
   expected of a class is that of images of the prior which the teacher takes for it.
2. Optional: train the network by DP-SGD on private images and their embeddings, to learn their look.
3. Draw embeddings from the class Gaussians, and images with these embeddings.
4. Correct, at no privacy cost: the network follows an embedding only in part. In each of `rounds` rounds the class
   means that it is conditioned on move by `CORRECTION` of the difference between the wanted class means and those of
   its images. Skipped where a round would draw fewer than `MIN_IMAGES_PER_CLASS` images of a class.

Released: both sums of moments, once; at each of `steps` steps a noisy sum of clipped per-example gradients.
Public: the prior and its encoder, named in the certificate with what they were trained on.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError
from sfumato.engine import GradientVault
from sfumato.features.class_gaussians import (
    ClassGaussians,
    Expected,
    moment_rows,
    moved,
    product_rows,
    weighted_covariances,
)
from sfumato.features.embedding import ImageEmbedding, convert
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.prior_painter import (
    CURRICULUM_FIELDS,
    MAX_MOMENTS_SHARE,
    PriorPainter,
    PrivateLoss,
    gpu_sample_batch,
)
from sfumato.methods.teacher import EmbeddingTeacher
from sfumato.nets.score import ScoreNetwork
from sfumato.nets.training import even_labels
from sfumato.priors import Prior
from sfumato.priors.latent_space import DrawingSpace
from sfumato.privacy import Release

NO_GRADIENTS_NOTE = "without private gradients (steps=0) the images keep the look of the prior's; a GPU is advised"
CORRECTION_IMAGES, MIN_IMAGES_PER_CLASS = 10_000, 100  # drawn in a round of the correction; fewer would add noise
COMMON_SHARE = 1 / 3  # of the budget of the moments, for those of all images together
NORM_LIMIT, MIN_NORM_LIMIT = (
    1.2,
    0.25,
)  # of the rows of moments, relative to the public ones' root mean square; at least
PUBLIC_IMAGES, MIN_PUBLIC_IMAGES = 20_000, 5000  # of the prior, from which covariances of classes are expected
MIN_IMAGES_PER_GROUP = 20  # of these; with fewer the prior's classes are taken as one
CORRECTION = 0.7  # part of the difference of means by which a round corrects


class ConditionedGenerator(nn.Module):
    """A network, and for each class the distribution of the embeddings that it is conditioned on."""

    means: torch.Tensor
    roots: torch.Tensor

    def __init__(self, network: ScoreNetwork, classes: int, width: int) -> None:
        super().__init__()
        self.network = network
        device = next(network.parameters()).device
        self.register_buffer("means", torch.zeros(classes, width, device=device))
        self.register_buffer("roots", torch.zeros(classes, width, width, device=device))

    @property
    def gaussians(self) -> ClassGaussians:
        return ClassGaussians(self.means, self.roots)


class EmbeddingPainter(PriorPainter):
    """A prior that makes images with the embeddings of a class. It works in the prior's own shape."""

    moments_share: ClassVar[float] = MAX_MOMENTS_SHARE

    def __init__(self, prior: Prior, *arguments: Any, encoder: str, **options: Any) -> None:
        if encoder not in ("", prior.card.encoder):
            own = prior.card.encoder or "scattering coefficients"
            raise DataError(f"the prior {prior.card.name} has its own embedding, of {own}; leave encoder out")
        super().__init__(prior, *arguments, encoder=encoder, **options)
        self.new_embedding()  # a damaged prior is refused before anything is spent

    @property
    def drawn_shape(self) -> tuple[int, int, int]:
        return self.prior.card.shape

    def notes(self) -> list[str]:
        return [*super().notes(), *([NO_GRADIENTS_NOTE] if not self.steps else [])]

    def unused(self) -> tuple[str, ...]:
        skipped = () if self._corrected_images else ("rounds",) if self._public_images else ("rounds", "pool")
        return (*CURRICULUM_FIELDS, *skipped)

    @property
    def _corrected_images(self) -> int:
        """Return how many images a round of the correction draws; 0: it is skipped."""
        count = min(self.settings.pool, CORRECTION_IMAGES)
        enough = self.settings.rounds and count >= MIN_IMAGES_PER_CLASS * len(self.public.classes)
        return count if enough else 0

    @property
    def _public_images(self) -> int:
        """Return how many images of the prior are drawn, from which covariances are expected; 0: none."""
        count = min(self.settings.pool, PUBLIC_IMAGES)
        return count if count >= MIN_PUBLIC_IMAGES else 0

    def moments(self, share: float) -> list[Release]:
        if len(self.public.classes) == 1:
            return [Release("moments", weight=share**-0.5)]
        shares = {"moments": (1 - COMMON_SHARE) * share, "common-moments": COMMON_SHARE * share}
        return [Release(name, weight=part**-0.5) for name, part in shares.items()]

    def new_embedding(self) -> ImageEmbedding:
        return self.prior.new_embedding(self.encoder, self.device)

    def embed(self, vault: GradientVault, checkpoints: Checkpoints) -> tuple[ImageEmbedding, GradientVault]:  # noqa: ARG002
        embedding = self.new_embedding()
        return embedding, vault.map(embedding)

    def adapt(
        self,
        vault: GradientVault,
        embedded: GradientVault,
        embedding: ImageEmbedding,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None = None,
    ) -> ConditionedGenerator:
        gaussians = self._gaussians(embedded, embedding, counts, checkpoints, teacher)
        generator = self.new_generator()
        loss = PrivateLoss(self.space.maps, self.settings.level_centre, embedding.condition_width)
        records = vault.map(Records(embedding, self.space)) if self.steps else vault
        network = self.train_privately(records, generator.network, counts, checkpoints, loss).eval()
        generator.network = network
        generator.means.copy_(gaussians.means)
        generator.roots.copy_(gaussians.roots)
        self._correct(generator, embedding, checkpoints)
        return generator

    def _gaussians(
        self,
        embedded: GradientVault,
        embedding: ImageEmbedding,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None,
    ) -> ClassGaussians:
        limit = float(embedding.spread.sum().sqrt().mul(NORM_LIMIT).clamp(MIN_NORM_LIMIT, 1))
        plan, common = embedded.plan, None

        def first(rows: torch.Tensor) -> torch.Tensor:
            return moment_rows(embedding.condition(rows) / limit)

        def second(rows: torch.Tensor) -> torch.Tensor:
            return product_rows(embedding.condition(rows) / limit)

        asked = checkpoints.once(
            "moments", lambda: {"sums": embedded.sum(first, release="moments", bound=1.0, by_class=True)}
        )
        if len(self.public.classes) > 1:
            held = checkpoints.once(
                "common moments", lambda: {"sum": embedded.sum(second, release="common-moments", bound=1.0)}
            )
            common = held["sum"].to(self.device), plan["common-moments"].noise
        sums, noise = asked["sums"].to(self.device), plan["moments"].noise
        spread, expected = self._public_spread(embedding, teacher, limit)
        found = ClassGaussians.of(sums, counts, noise, spread, common, expected)
        return ClassGaussians(found.means * limit, found.roots * limit)

    def _public_spread(
        self, embedding: ImageEmbedding, teacher: EmbeddingTeacher | None, limit: float
    ) -> tuple[torch.Tensor, Expected | None]:
        """Return the covariance of public conditions, divided by `limit`; and what gives those expected of classes.

        With images of the prior, the former is that within the prior's classes. The latter is that of the images that
        the teacher takes for a class, once they are moved to the mean and covariance of all private images.
        """
        if not self._public_images:
            return torch.diag(embedding.spread) / limit**2, None
        count, classes = self._public_images, self.prior.card.classes
        labels = torch.arange(count, device=self.device) % classes
        network, generator = self.prior.network().to(self.device), torch.Generator(self.device).manual_seed(self.seed)
        nothing = torch.zeros(len(labels), embedding.condition_width, device=self.device)
        parts = labels.split(gpu_sample_batch(self.drawn_shape)), nothing.split(gpu_sample_batch(self.drawn_shape))
        pairs = zip(*parts, strict=True)
        rows = torch.cat([embedding(self.draw(network, part, generator, condition=none)) for part, none in pairs])
        conditions = embedding.condition(rows).double() / limit
        groups = labels if count >= MIN_IMAGES_PER_GROUP * classes else torch.zeros_like(labels)
        shares = functional.one_hot(groups).to(conditions.dtype)
        spread = torch.cov((conditions - shares @ (shares.T @ conditions / shares.sum(0)[:, None])).T)

        def expected(means: torch.Tensor, shares: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
            assert teacher is not None
            mean = shares @ means
            between = ((means - mean) * shares[:, None]).T @ (means - mean)
            near = moved(conditions, mean, within + between)
            weights = teacher.weigh(embedding.with_condition(rows, (near * limit).to(rows.dtype)))
            return weighted_covariances(near, weights, within)

        return spread, expected if teacher is not None else None

    def _correct(self, made: ConditionedGenerator, embedding: ImageEmbedding, checkpoints: Checkpoints) -> None:
        """Move the class means of the conditions so that the images come closer to the means of the private ones."""
        wanted, classes = made.means.clone(), len(made.means)
        if not self._corrected_images:
            return
        labels = even_labels(classes, self._corrected_images, self.device)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for _ in checkpoints.loop("correction", self.settings.rounds, means=made.means, random=generator):
            parts = labels.split(gpu_sample_batch(self.drawn_shape))
            drawn = torch.cat([embedding(self.paint(made, part, generator)) for part in parts])
            rows = embedding.condition(drawn)
            sums = torch.zeros_like(wanted).index_add_(0, labels, rows)
            made.means += CORRECTION * (wanted - sums / torch.bincount(labels, minlength=classes)[:, None])

    # -- samples ------------------------------------------------------------------------------------------

    def paint(self, generator_network: nn.Module, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        assert isinstance(generator_network, ConditionedGenerator)
        return self.draw(
            generator_network.network,
            torch.full_like(labels, -1),
            generator,
            guidance=self.settings.guidance,
            condition=generator_network.gaussians.draw(labels, generator),
        )

    def vary(
        self,
        generator_network: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        level: float,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Draw images conditioned on the embeddings of these images."""
        assert isinstance(generator_network, ConditionedGenerator)
        embedding = self.new_embedding()
        return self.draw(
            generator_network.network,
            torch.full_like(labels, -1),
            generator,
            condition=embedding.condition(embedding(images)),
            start=images,
            highest=level,
        )

    def new_generator(self) -> ConditionedGenerator:
        card = self.prior.card
        return ConditionedGenerator(self.prior.network().to(self.device), len(self.public.classes), card.condition)

    def decode(self, painted: torch.Tensor) -> torch.Tensor:
        return convert(painted, self.public.shape)


class Records:
    """Map images to records for private gradients: what the network draws, and the condition."""

    def __init__(self, embedding: ImageEmbedding, space: DrawingSpace) -> None:
        self._embedding, self._space = embedding, space

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        maps = self._space.encode(convert(images, self._space.shape)).flatten(1)
        return torch.cat([maps, self._embedding.condition(self._embedding(images))], 1)
