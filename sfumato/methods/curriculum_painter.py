"""The curriculum painter: a public prior that learns the private classes. `dp-diffusion` is this.

Three steps adapt the prior:

1. Ask for noisy class means of an embedding of the images (`features/embedding.py`).
2. Curriculum, free of charge: draw images from the prior, weight them so that their mean embedding approaches a class
   mean (exponential tilting; PrivImage selects whole public classes instead) and by a teacher's probabilities if there
   is one, and train the network on them under the class's label. Draw again, weight again, for a few rounds.
3. Train by DP-SGD on denoising score matching (DPDM), on few parameters, on low-rank adapters, or on all.

Released: the class means, once; at each of `steps` steps the noisy sum of clipped per-example gradients over a Poisson
sample, several noise levels of an image averaged before clipping.
Public: the prior and the encoder, named in the certificate with what they were trained on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine import GradientVault
from sfumato.features.embedding import ImageEmbedding, convert, tilt
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.prior_painter import PriorPainter, PrivateLoss
from sfumato.methods.teacher import EmbeddingTeacher
from sfumato.nets.score import ScoreNetwork
from sfumato.nets.training import Trainer, use_average, warm_cosine
from sfumato.priors.denoising import CONDITION_DROPOUT, compiled_denoising_loss, draw_levels
from sfumato.priors.prior import embedded_shape
from sfumato.privacy import Release

CPU_NOTE = (
    "without a GPU this prior is fine-tuned by few steps, and its images may show no classes (docs/choosing.md): use a "
    "GPU, a prior that is conditioned on embeddings (tiny-imagenet, or one of sfumato prior train), or no prior"
)
EMBEDDED_AT_ONCE, POOL_BATCH = 500, 2000  # images
EMBEDDING_IMAGES = 10_000  # of the prior, from which the principal components come


class CurriculumPainter(PriorPainter):
    """A prior that learns the private classes by a curriculum and by private gradients."""

    def notes(self) -> list[str]:
        return [*super().notes(), *([CPU_NOTE] if self.device.type == "cpu" else [])]

    def moments(self, share: float) -> list[Release]:
        return [Release("means", weight=share**-0.5)] if self.settings.rounds else []

    def new_embedding(self) -> ImageEmbedding:
        return ImageEmbedding(embedded_shape(self.public.shape, self.encoder), self.encoder, self.device)

    def embed(self, vault: GradientVault, checkpoints: Checkpoints) -> tuple[ImageEmbedding, GradientVault]:
        """Fit an embedding to the prior's images; return it, and a vault of the embedded private images."""
        embedding = self.new_embedding()

        def make() -> dict[str, torch.Tensor]:
            pool = self._public_pool(checkpoints)[:EMBEDDING_IMAGES].split(EMBEDDED_AT_ONCE)
            parts = [convert(to_unit_range(part.to(self.device)), embedding.shape) for part in pool]
            embedding.fit(torch.cat(parts), self.seed)
            return dict(embedding.state_dict())

        embedding.load_state_dict(checkpoints.once("embedding", make))
        return embedding, vault.map(embedding)

    def adapt(
        self,
        vault: GradientVault,
        embedded: GradientVault | None,
        embedding: ImageEmbedding | None,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None = None,
    ) -> ScoreNetwork:
        """Return the network after curriculum and private gradients; without an embedding there is no curriculum."""
        if embedded is None or embedding is None:
            network = self._mixed_network()
        else:
            pool = self._public_pool(checkpoints)
            network = self._mixed_network(embedding, pool, teacher)
            network = self._practise(network, embedded, embedding, pool, counts, checkpoints, teacher)
        loss = PrivateLoss(self.space.maps, self.settings.level_centre)
        if self.steps and self.space.changes:
            vault = vault.map(self.space.encode)
        return self.train_privately(vault, network, counts, checkpoints, loss)

    def _public_pool(self, checkpoints: Checkpoints) -> torch.Tensor:
        """Draw images from the prior, equally many of each of its classes; uint8."""
        network = self._prior_network()
        classes = self.prior.card.classes
        labels = torch.arange(max(self.settings.pool, 1), device=self.device) % classes
        return checkpoints.once("public pool", partial(self._drawn, network, labels, 0))["images"]

    def _mixed_network(
        self,
        embedding: ImageEmbedding | None = None,
        pool: torch.Tensor | None = None,
        teacher: EmbeddingTeacher | None = None,
    ) -> ScoreNetwork:
        """Return the prior's network for the private classes: each starts as a mixture of the prior's classes.

        The mixture is what a teacher sees in the prior's images, `pool`; without a teacher it is uniform.
        """
        own, public = len(self.public.classes), self.prior.card.classes
        shares = torch.full((own, public), 1 / public, device=self.device)
        if teacher is not None and embedding is not None and pool is not None:
            seen = teacher.classify(self._embed(embedding, pool)).softmax(1)
            labels = torch.arange(len(pool), device=self.device) % public
            shares = torch.zeros(public, own, device=self.device).index_add_(0, labels, seen).T
            shares = shares / shares.sum(1, keepdim=True)
        return self._prior_network().with_classes(shares)

    def _practise(
        self,
        network: ScoreNetwork,
        embedded: GradientVault,
        embedding: ImageEmbedding,
        pool: torch.Tensor,
        counts: torch.Tensor,
        checkpoints: Checkpoints,
        teacher: EmbeddingTeacher | None = None,
    ) -> ScoreNetwork:
        """Train on weighted images, first of the prior, then also on the network's own.

        - embedded: the vault of the embedded images, which releases their class means.
        - pool: images of the prior.
        """
        if not self.settings.rounds:
            return network
        sums = checkpoints.once("means", lambda: {"sums": _release_means(embedded)})["sums"].to(self.device)
        means = sums / counts[:, None].clamp_min(1)
        settings, generator = self.settings, torch.Generator(self.device).manual_seed(self.seed)
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        trainer = Trainer(network, ema=settings.practice_ema, warm_up=True)
        maps, rows = self._maps(pool), self._embed(embedding, pool)
        shares = (counts / counts.sum()).float()
        for number in range(settings.rounds):
            if number:
                labels = torch.arange(settings.pool, device=self.device) % len(self.public.classes)
                drawn = checkpoints.once(f"pool {number}", partial(self._drawn, network, labels, number))["images"]
                maps = torch.cat([maps, self._maps(drawn)])
                rows = torch.cat([rows, self._embed(embedding, drawn)])
            weights = tilt(rows, means, settings.strength)
            if teacher is not None:
                weights = weights * teacher.weigh(rows)
                weights = weights / weights.sum(0)
            loop = checkpoints.loop(
                f"curriculum {number + 1}/{settings.rounds}", settings.practice_steps, trainer=trainer, random=generator
            )
            for step in loop:
                labels = torch.multinomial(shares, settings.practice_batch, replacement=True, generator=generator)
                chosen = _draw_rows(weights, labels, generator)
                batch = to_unit_range(maps[chosen]) if maps.dtype == torch.uint8 else maps[chosen].float()
                noise = torch.randn(batch.shape, generator=generator, device=self.device)
                levels = draw_levels(len(batch), generator, settings.practice_centre)
                trainer.set_rate(settings.practice_rate * warm_cosine(step, settings.practice_steps))
                dropped = torch.rand(len(labels), generator=generator, device=self.device) < CONDITION_DROPOUT
                labels = torch.where(dropped, -1, labels)  # for guidance
                trainer.descend(compiled_denoising_loss(network, batch, noise, levels, labels))
            use_average(trainer)
            trainer.reset()
        return network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]

    def paint(self, network: nn.Module, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw images for labels [N]."""
        assert isinstance(network, ScoreNetwork)
        guidance = self.settings.guidance if len(self.public.classes) > 1 else 1.0
        return self.draw(network, labels, generator, guidance=guidance)

    def vary(
        self, network: nn.Module, images: torch.Tensor, labels: torch.Tensor, level: float, generator: torch.Generator
    ) -> torch.Tensor:
        assert isinstance(network, ScoreNetwork)
        return self.draw(network, labels, generator, start=images, highest=level)

    def new_generator(self) -> ScoreNetwork:
        """Return a network for the private classes, whose weights are to be loaded."""
        shares = torch.zeros(len(self.public.classes), self.prior.card.classes)
        return self._prior_network().with_classes(shares.to(self.device))

    def _prior_network(self) -> ScoreNetwork:
        return self.prior.network().to(self.device)

    def _drawn(self, network: ScoreNetwork, labels: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Draw images of a round for a checkpoint, uint8."""
        generator = torch.Generator(self.device).manual_seed(self.seed + number)
        parts = [self.draw(network, part, generator) for part in labels.split(POOL_BATCH)]
        return {"images": torch.cat([to_bytes(part).cpu() for part in parts])}

    def _maps(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the network draws, of images as bytes: these bytes, or maps in half precision."""
        if not self.space.changes:
            return images.to(self.device)
        parts = images.split(EMBEDDED_AT_ONCE)
        return torch.cat([self.space.encode(to_unit_range(part.to(self.device))).half() for part in parts])

    def _embed(self, embedding: ImageEmbedding, images: torch.Tensor) -> torch.Tensor:
        parts = images.split(EMBEDDED_AT_ONCE)
        return torch.cat([embedding(to_unit_range(part.to(self.device))) for part in parts])


def _draw_rows(weights: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one image for each label, with the probabilities of its column in `weights` [N, classes]."""
    cumulative = weights.double().cumsum(0)
    uniform = torch.rand(len(labels), generator=generator, device=labels.device, dtype=torch.float64)
    places = torch.searchsorted(
        cumulative.T.contiguous(), (uniform * cumulative[-1, labels])[None].expand(weights.shape[1], -1).contiguous()
    )
    return places[labels, torch.arange(len(labels), device=labels.device)].clamp_max(len(weights) - 1)


def _release_means(embedded: GradientVault) -> torch.Tensor:
    return embedded.sum(_identity, release="means", bound=1.0, by_class=True)


def _identity(rows: torch.Tensor) -> torch.Tensor:
    return rows * 1.0
