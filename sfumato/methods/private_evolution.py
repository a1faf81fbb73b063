"""private-evolution: private images vote for generated images; the winners are varied and voted on again.

Private Evolution (Lin et al., ICLR 2024) with a prior of `priors/` as its generator. No network is trained on private
images. In each of `rounds` generations:

1. Each class has `candidates` generated images, the first ones drawn from the prior.
2. Each private image votes for the nearest candidates of its class, in an embedding (`features/embedding.py`) that no
   private image has shaped. The votes are summed with noise.
3. A threshold, a multiple of the noise, is subtracted. Candidates are drawn in proportion to the votes that are left. A
   candidate that is drawn stays; for each further time that it is drawn it adds a variation of itself: noise is added
   and removed by the network. The level of the noise decreases from generation to generation.

Samples are variations of the last candidates, in proportion to their votes. With `adapt` the prior learns from noisy
moments and gradients first (`embedding_painter.py`, `curriculum_painter.py`): "tune, then vote".

A vote is a softmax over distances, not a one-hot vector: a row of non-negative numbers whose sum is 1, so its norm
is at most 1. A one-hot vote would jump where an image is equally far from two candidates, and the rounding errors of a
batch could move it; no margin covers that (proof 4 of docs/proofs.md). The softmax is continuous: its norm changes by
at most 2 / TEMPERATURE of the change of an embedding, which the margin covers (`TEMPERATURE`).

Released: noisy sums of votes for each candidate, one for each generation. With `adapt` also what the painter releases.
Public: image shape, class names; the prior and the encoder, which the certificate names with their training data.
Events: Gaussian sums over all images, `rounds` times; each image adds to the candidates of its class only, each person
the mean of their images' votes. With `adapt` those of the painter. Class sizes come from the votes: those of a class
sum to its number of images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch.nn import functional

from sfumato.data import PublicFacts
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine import GradientVault, with_share
from sfumato.features.embedding import ImageEmbedding
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.painter_choice import painter_for
from sfumato.methods.prior_painter import (
    CPU_TRAINING,
    CURRICULUM_FIELDS,
    PainterTraining,
    PriorPainter,
    gpu_sample_batch,
)
from sfumato.nets.training import state_below
from sfumato.privacy import Release

TEMPERATURE = 0.02  # of the votes, in squared distances. Rounding on a GPU moves an embedding by 4e-5: a vote by 4e-3
MOMENTS_SHARE = 0.3  # of the budget of `adapt`, for counts and moments; the rest is for gradients
CPU_SAMPLE_BATCH = 250


@dataclass(frozen=True)
class EvolutionSettings:
    """Settings of the evolution.

    - threshold: subtracted from noisy votes, in standard deviations of their noise.
    - widest: noise level of variations in the first generation.
    - narrowest: noise level of variations in the last generation, and of samples.
    """

    threshold: float = 2.0
    widest: float = 10.0
    narrowest: float = 0.5

    def __post_init__(self) -> None:
        for each in fields(self):
            if not (getattr(self, each.name) > 0 or (each.name == "threshold" and self.threshold == 0)):
                raise ValueError(f"{each.name} of the evolution must be positive, got {getattr(self, each.name)!r}")

    def level(self, generation: int, generations: int) -> float:
        """Return the noise level of a generation, from 0: geometric between the two."""
        share = generation / max(1, generations - 1)
        return math.exp((1 - share) * math.log(self.widest) + share * math.log(self.narrowest))


@dataclass(kw_only=True, eq=False)
class PrivateEvolution(Synthesizer):
    """Generated images that private images vote for.

    - prior: text, `random-process`; a name of `sfumato prior list`, or the folder of `sfumato prior train`.
    - encoder: text; a public network for the embedding, as `load_perceptual` takes it; none: the prior's own.
    - rounds: int, 10; number of generations, each with one vote.
    - candidates: int, 100; generated images of each class in a generation. Fewer get more votes each.
    - adapt: bool, False; fine-tune the prior by noisy moments and gradients before the votes.
    - adapt_share: float, 0.5; part of the budget for that.
    - steps: int, 50; number of private gradients of `adapt`; 0: moments only.

    Presets: `cpu`.
    """

    key: ClassVar[str] = "private-evolution"
    paper: ClassVar[str] = "Lin et al., ICLR 2024"
    summary: ClassVar[str] = "let private images vote for images of a public model, and vary the winners"
    may_be_zero: ClassVar[frozenset[str]] = Synthesizer.may_be_zero | {"steps"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"rounds": 4, "candidates": 20, "steps": 5, "sampling_prob": 0.002, "adaptation": CPU_TRAINING},
    }

    prior: str = "random-process"
    encoder: str = ""
    rounds: int = 10
    candidates: int = 100
    adapt: bool = False
    adapt_share: float = 0.5
    steps: int = 50
    sampling_prob: float = constant(0.1)
    evolution: EvolutionSettings = constant(EvolutionSettings())
    adaptation: PainterTraining = constant(PainterTraining())

    def validate(self) -> Self:
        super().validate()
        if self.steps == 1:
            raise ValueError("steps must be at least 2, or 0 for no private gradients")
        if not self.adapt_share < 1:
            raise ValueError(f"adapt_share must lie between 0 and 1, got {self.adapt_share!r}")
        if self.candidates < 2:
            raise ValueError(f"candidates must be at least 2, got {self.candidates}")
        return self

    def _painter(self, public: PublicFacts) -> PriorPainter:
        return painter_for(self, public, self.steps if self.adapt else 0)

    def explain_plan(self, public: PublicFacts) -> list[str]:
        painter = self._painter(public)
        noise = self.plan(public)["votes"].noise
        if not noise:
            return PriorPainter.notes(painter)
        needed = math.ceil(self._resolved(public).evolution.threshold * noise)
        note = f"a candidate must be nearest to more than {needed} private images of its class to be chosen reliably"
        return [*PriorPainter.notes(painter), note]

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:
        adapting = ("adapt_share", "steps", "adaptation.rounds", *(f"adaptation.{name}" for name in CURRICULUM_FIELDS))
        without = () if self.adapt else adapting
        return self._painter(public).in_use() | dict.fromkeys(("adaptation.tries", *without))

    def _releases(self, public: PublicFacts) -> list[Release]:
        votes = Release("votes", self.rounds, nonnegative=True)
        if not self.adapt:
            return [votes]
        painter, budget = self._painter(public), self._budget(public.unit)
        moments, gradients = [*counts_release(public), *painter.moments(1.0)], painter.gradients()
        share = self.adapt_share * (MOMENTS_SHARE if gradients else 1.0)
        first = with_share(moments, budget, share) if moments else []
        last = with_share([votes], budget, 1 - self.adapt_share) if gradients else [votes]
        return [*first, *gradients, *last]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return self._painter(public).facts()

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        painter = self._painter(public)
        painter.check_unchanged(vault)
        embedding, embedded = painter.embed(vault, self._checkpoints)
        if self.adapt:
            counts = class_counts(vault, public)
            self.network_ = painter.adapt(vault, embedded, embedding, counts, self._checkpoints).eval()
        else:
            self.network_ = painter.new_generator().eval()
        self.network_.requires_grad_(False)
        self._evolve(painter, embedding, embedded, len(public.classes))

    def _evolve(self, painter: PriorPainter, embedding: ImageEmbedding, embedded: GradientVault, classes: int) -> None:
        """Set the last candidates [classes, candidates, C, H, W], uint8, their weights, and the class sizes."""
        device, each = self.torch_device, self.candidates
        labels = torch.arange(classes, device=device).repeat_interleave(each)
        generator = torch.Generator(device).manual_seed(self.seed + 1)

        def first() -> dict[str, torch.Tensor]:
            own = torch.Generator(device).manual_seed(self.seed)
            return {"images": to_bytes(painter.paint(self.network_, labels, own))}

        images = self._checkpoints.once("first generation", first)["images"].to(device)
        weights, sizes = torch.zeros(classes, each, device=device), torch.zeros(classes, device=device)
        state: dict[str, Any] = {"images": images, "weights": weights, "sizes": sizes, "random": generator}
        votes = Votes(classes)
        least = self.evolution.threshold * embedded.plan["votes"].noise
        for number in self._checkpoints.loop("generations", self.rounds, **state):
            if number:
                level = self.evolution.level(number - 1, self.rounds - 1)
                chosen, again = draw_parents(weights, each, generator)
                images.copy_(images[chosen])
                if bool(again.any()):
                    parents = to_unit_range(images[again])
                    varied = painter.vary(self.network_, parents, labels[again], level, generator)
                    images[again] = to_bytes(varied)
            rows = embedding(to_unit_range(images)).view(classes, each, -1)
            found = embedded.sum(votes, release="votes", bound=1.0, by_class=True, with_labels=True, constants=[rows])
            weights.copy_(chosen_weights(found, least))
            sizes += found.sum(1) / self.rounds
        self.candidates_ = images.view(classes, each, *images.shape[1:])
        self.weights_, self.counts_ = weights, sizes.clamp_min(1)

    @property
    def sample_batch(self) -> int:  # type: ignore[override]
        return gpu_sample_batch(self._fitted().shape) if self.torch_device.type == "cuda" else CPU_SAMPLE_BATCH

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        painter = self._painter(self._fitted())
        parents = torch.multinomial(self.weights_[labels], 1, generator=generator)[:, 0]
        images = to_unit_range(self.candidates_[labels, parents])
        return painter.decode(painter.vary(self.network_, images, labels, self.evolution.narrowest, generator))

    def _state(self) -> dict[str, torch.Tensor]:
        learned = {"candidates": self.candidates_, "weights": self.weights_, "counts": self.counts_}
        return {**learned, **(self.network_.state_dict(prefix="network.") if self.adapt else {})}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.candidates_, self.weights_, self.counts_ = (state[name] for name in ("candidates", "weights", "counts"))
        painter = self._painter(public)
        self.network_ = painter.new_generator().requires_grad_(False).eval()
        if self.adapt:
            self.network_.load_state_dict(state_below(state, "network."))


class Votes:
    """Map embedded images [N, D], labels [N] and candidates [classes, M, D] to votes [N, M], non-negative, of sum 1."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def __call__(self, rows: torch.Tensor, labels: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        near = 2 * rows @ candidates.flatten(0, 1).T - candidates.flatten(0, 1).square().sum(1)
        own = functional.one_hot(labels, self._classes).to(near.dtype)
        near = (near.unflatten(1, candidates.shape[:2]) * own[:, :, None]).sum(1)
        return torch.softmax(near / TEMPERATURE, 1)


def chosen_weights(votes: torch.Tensor, least: float) -> torch.Tensor:
    """Return the probabilities [classes, M] to draw a candidate, from its noisy votes [classes, M].

    They are in proportion to the votes above `least`. Where there are none, to those above zero; where there are none
    either, all candidates are equal.
    """
    above, positive = (votes - least).clamp_min(0), votes.clamp_min(0)
    weights = torch.where(above.sum(1, keepdim=True) > 0, above, positive)
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, torch.ones_like(weights))
    return weights / weights.sum(1, keepdim=True)


def draw_parents(weights: torch.Tensor, each: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `each` parents for each class; return their places [classes * each], and which were drawn before."""
    drawn = torch.multinomial(weights, each, replacement=True, generator=generator).sort(1).values
    again = functional.pad(drawn[:, 1:] == drawn[:, :-1], (1, 0))
    offsets = torch.arange(len(weights), device=weights.device)[:, None] * weights.shape[1]
    return (drawn + offsets).flatten(), again.flatten()
