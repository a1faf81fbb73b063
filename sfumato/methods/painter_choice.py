"""Choose the painter for a prior: one with embeddings is conditioned on those of a class, others learn the classes."""

from __future__ import annotations

from typing import Protocol

import torch

from sfumato.data import PublicFacts
from sfumato.methods.curriculum_painter import CurriculumPainter
from sfumato.methods.embedding_painter import EmbeddingPainter
from sfumato.methods.prior_painter import PainterTraining, PriorPainter
from sfumato.priors import load_prior


class WithPrior(Protocol):
    """The settings of a method that a painter takes."""

    prior: str
    encoder: str
    sampling_prob: float
    adaptation: PainterTraining
    seed: int

    @property
    def torch_device(self) -> torch.device: ...


def painter_for(owner: WithPrior, public: PublicFacts, steps: int) -> PriorPainter:
    """Return the painter for the prior that a method names; `steps` private gradients adapt it."""
    prior = load_prior(owner.prior)
    kind = EmbeddingPainter if prior.card.condition else CurriculumPainter
    return kind(
        prior,
        owner.adaptation,
        public,
        steps=steps,
        sampling_prob=owner.sampling_prob,
        encoder=owner.encoder,
        seed=owner.seed,
        device=owner.torch_device,
    )
