"""tuned: several settings of a method, of which a noisy score chooses one. `sfumato tune` is this.

Whoever fits a method n times on private images and keeps the best fit has released n fits, also if the others are
deleted: which one is kept depends on all of them. Here everything is one plan, and everything is charged:

1. Fit each candidate, with its own releases.
2. Draw images from each, and train a small CNN on them. This is post-processing.
3. Release the noisy sum, over the private images, of each CNN's probability of the true class. Keep the candidate with
   the largest sum; that is post-processing, too ("report noisy max" with Gaussian noise).

Proof of the price. All releases are fixed before the first image is read, so the adaptive composition of the
Gaussian mechanisms in the plan bounds everything that is learned (`privacy/accounting.py`): the releases of all n
candidates, and one release of scores. A row of scores has n entries in [0, 1], divided by sqrt(n), so its norm is
at most 1. The kept model and the choice are functions of these releases. With releases on all images the price has a
closed form: a candidate that alone would have noise z has z sqrt(n / (1 - s)), where s = `SCORE_SHARE` is the part of
the scores; then the sum of 1 / noise² over the plan is that of one candidate alone. Randomising the number of trials
(Papernot and Steinke 2022) would cost less from about five candidates on; its guarantee is not a composition of
Gaussian releases, which is all that a certificate states.

Probabilities are continuous in the image; whether a prediction is right is not, and rounding could flip it (proof 4 of
docs/proofs.md).

Released: what each candidate releases; the noisy sum of scores, once.
Public: what the candidates take as public; the candidates, which the certificate lists.
Events: those of the candidates, and a Gaussian sum over all images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn
from torch.nn import functional

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault, calibrate
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.registry import create
from sfumato.nets.classifiers import small_cnn
from sfumato.nets.training import state_below
from sfumato.privacy import Release

SHARED_PARAMETERS = ("epsilon", "delta", "adjacency", "public_size", "secure", "device", "seed")
SCORE_SHARE = 0.05  # of 1 / noise², for the scores
MAX_CANDIDATES = 50
PREFIX = "try{}-"


@dataclass(frozen=True)
class ScoringSettings:
    """Settings of the CNN that scores a candidate.

    - images: drawn from the candidate, at most.
    - epochs: epochs of its training, by Adam.
    - batch_size: images in a step.
    - learning_rate: learning rate of Adam.
    """

    images: int = 10_000
    epochs: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3


@dataclass(kw_only=True, eq=False)
class Tuned(Synthesizer):
    """A method whose parameters are chosen by noisy scores.

    - base: text, `dp-merf`; key of the method.
    - grid: text; JSON list of the candidates, each an object of parameters of the method.

    Presets: `cpu`.
    """

    key: ClassVar[str] = "tuned"
    paper: ClassVar[str] = "Dwork and Roth, 2014 (report noisy max)"
    summary: ClassVar[str] = "run another method with parameters that are chosen privately: sfumato tune"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"cpu": {"scoring": ScoringSettings(images=3000)}}

    base: str = "dp-merf"
    grid: str = '[{"learning_rate": 0.001}, {"learning_rate": 0.01}]'
    scoring: ScoringSettings = constant(ScoringSettings())

    def candidates(self) -> list[Synthesizer]:
        """Return the methods to choose from, with the budget of this one."""
        try:
            listed = json.loads(self.grid)
        except json.JSONDecodeError as error:
            raise ValueError(f"grid must be a JSON list of objects: {error}") from None
        if not (isinstance(listed, list) and all(isinstance(each, dict) for each in listed)):
            raise ValueError("grid must be a JSON list of objects")
        if not 2 <= len(listed) <= MAX_CANDIDATES:
            raise ValueError(f"grid must list 2 to {MAX_CANDIDATES} candidates, not {len(listed)}")
        if fixed := sorted({name for each in listed for name in each} & {*SHARED_PARAMETERS, "preset"}):
            raise ValueError(f"{fixed[0]} is the same for all candidates; set it beside the grid")
        shared = {name: getattr(self, name) for name in SHARED_PARAMETERS}
        return [create(self.base, **shared, **each) for each in listed]

    def validate(self) -> Self:
        super().validate()
        for candidate in self.candidates():
            candidate.validate()
            if not candidate._protected or candidate.key == self.key:
                raise ValueError(f"{candidate.key} cannot be tuned: it gives no guarantee, or is tuned itself")
        return self

    def _resolved_candidates(self, public: PublicFacts) -> list[Synthesizer]:
        if len(public.classes) < 2:
            raise DataError("candidates are scored by a classifier, which needs at least two classes")
        return [candidate._resolved(public) for candidate in self.candidates()]

    def explain_plan(self, public: PublicFacts) -> list[str]:
        count = len(self.candidates())
        factor = math.sqrt(count / (1 - SCORE_SHARE))
        return [
            f"{count} candidates share the budget: about {factor:.1f} times the noise of a single run",
            *self._resolved_candidates(public)[0].explain_plan(public),
        ]

    def _releases(self, public: PublicFacts) -> list[Release]:
        """Return the releases of all candidates, with noise in proportion to what each would have alone."""
        budget, found = self._budget(public.unit), []
        candidates = self._resolved_candidates(public)
        for number, candidate in enumerate(candidates, 1):
            own = candidate._releases(public)
            for release, alone in zip(own, calibrate(own, budget).releases, strict=True):
                weight = release.weight if release.noise_multiplier is not None else alone.noise or 1.0
                found.append(replace(release, name=PREFIX.format(number) + release.name, weight=weight))
        scores = Release("scores", nonnegative=True)
        single = calibrate([scores], budget).releases[0].noise or 1.0
        weight = single * math.sqrt((1 - SCORE_SHARE) / (SCORE_SHARE * len(candidates)))
        return [*found, replace(scores, weight=weight)]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for candidate in self._resolved_candidates(public):
            for name, fact in candidate._facts(public).items():
                if facts.setdefault(name, fact) != fact:
                    raise DataError(f"the candidates differ in a public fact, {name!r}; choose it on public images")
        return facts

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        candidates, networks = self._resolved_candidates(public), []
        for number, candidate in enumerate(candidates, 1):
            name = f"try {number}: "
            candidate._checkpoints = cast(Checkpoints, NamedCheckpoints(self._checkpoints, name))
            candidate._fit(cast(GradientVault, NamedVault(vault, PREFIX.format(number))), public)
            del candidate._checkpoints
            candidate._learned(candidate)
            candidate.public_ = public
            networks.append(self._classifier(candidate, public))
        sums = vault.sum(Scores(networks), release="scores", bound=1.0, with_labels=True)
        self.scores_ = sums * math.sqrt(len(candidates))
        self.chosen_ = int(self.scores_.argmax())
        self.model_ = candidates[self.chosen_]

    def _classifier(self, candidate: Synthesizer, public: PublicFacts) -> nn.Module:
        """Train a CNN on images of a candidate."""
        count = min(self.scoring.images, candidate.max_samples(public) or self.scoring.images)
        drawn, device = candidate.sample(count, seed=self.seed), self.torch_device
        targets = drawn.labels if drawn.soft_labels is None else drawn.soft_labels
        assert targets is not None
        pixels, targets = drawn.images.to(device), targets.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = small_cnn(public.shape, len(public.classes)).to(device)
        optimizer = torch.optim.Adam(network.parameters(), self.scoring.learning_rate)
        generator = torch.Generator(device).manual_seed(self.seed)
        for _ in range(self.scoring.epochs):
            for index in torch.randperm(count, generator=generator, device=device).split(self.scoring.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(network(to_unit_range(pixels[index])), targets[index]).backward()
                optimizer.step()
        return network.requires_grad_(False).eval()

    def max_samples(self, public: PublicFacts) -> int | None:
        limits = [candidate.max_samples(public) for candidate in self._resolved_candidates(public)]
        return min((limit for limit in limits if limit is not None), default=None)

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        self._fitted()
        return self.model_.sample(n, labels=labels, seed=seed, **options)

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self.model_._sample(labels, generator)

    def _proportions(self) -> torch.Tensor:
        return self.model_._proportions()

    def _log_likelihood(self, images: torch.Tensor, label: int) -> torch.Tensor:
        return self.model_._log_likelihood(images, label)

    def _state(self) -> dict[str, torch.Tensor]:
        own = {"chosen": torch.tensor(self.chosen_), "scores": self.scores_}
        return {**own, **{f"model.{name}": value for name, value in self.model_._state().items()}}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.chosen_, self.scores_ = int(state["chosen"]), state["scores"]
        self.model_ = self._resolved_candidates(public)[self.chosen_]
        self.model_._learned(self.model_)
        self.model_.public_ = public
        self.model_._restore(public, state_below(state, "model."))


class Scores:
    """Map images and labels to the probability of the label under each network, over the root of their number.

    A network that gives no number scores 0. Otherwise its NaN would make the whole row zero, for every candidate.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        self._networks = networks

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = [network(images).softmax(1).gather(1, labels[:, None]) for network in self._networks]
        return torch.cat(each, 1).nan_to_num(0.0) / math.sqrt(len(each))


class NamedVault:
    """A vault for one candidate: its releases have a prefix in the plan. All else is the vault's."""

    def __init__(self, vault: GradientVault, prefix: str) -> None:
        self._vault, self._prefix = vault, prefix

    @property
    def plan(self) -> dict[str, Release]:
        """The releases of the candidate, by their own names."""
        mine = (release for release in self._vault.plan.releases if release.name.startswith(self._prefix))
        return {release.name.removeprefix(self._prefix): release for release in mine}

    def counts(self, *, release: str = "counts") -> torch.Tensor:
        return self._vault.counts(release=self._prefix + release)

    def map(self, transform: Callable[..., Any]) -> NamedVault:
        return NamedVault(self._vault.map(transform), self._prefix)

    def unprotected(self, reason: str) -> None:
        raise ValueError(f"a candidate must not take raw images: {reason}")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._vault, name)
        if name not in ("sum", "vectors", "gradient"):
            return found
        return lambda *given, release, **options: found(*given, release=self._prefix + release, **options)


class NamedCheckpoints:
    """Checkpoints for one candidate: its loops have a prefix."""

    def __init__(self, checkpoints: Checkpoints, prefix: str) -> None:
        self._checkpoints, self._prefix = checkpoints, prefix

    def loop(self, name: str, total: int, **parts: Any) -> Iterator[int]:
        return self._checkpoints.loop(self._prefix + name, total, **parts)

    def once(self, name: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return self._checkpoints.once(self._prefix + name, make)

    def saved(self, name: str) -> dict[str, torch.Tensor] | None:
        return self._checkpoints.saved(self._prefix + name)

    def keep(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self._checkpoints.keep(self._prefix + name, tensors)
