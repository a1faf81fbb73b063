"""Black-box audits: the attacker sees synthetic images only.

`distinguish` repeats whole runs on two neighbouring sets and asks the images which set it was. `audit_one_run` hides
many canaries in one set of the auditor's own images, each by a fair coin, and asks the images of a single run which
ones were used. A canary is an ordinary image with a rare, learnable detail (or a person's worth of them); without
details, the canaries are a random part of the images.

We know of no published audit of synthetic images alone. These attacks are simple, and private methods blur single
images, so their lower bounds are small: read `power`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from sfumato.audit.lower_bounds import CONFIDENCE, Array, LowerBounds, lower_bounds, one_run, one_run_gaussian, selected
from sfumato.audit.membership import Attack, Attacker, attack, calibrated
from sfumato.audit.neighbours import Neighbours
from sfumato.audit.small_settings import Make
from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.methods.base import Synthesizer
from sfumato.privacy import Plan

SAMPLES = 32  # synthetic images of each class that the attacker sees of a run
RIDGE = 0.3  # of the linear discriminant, for features of variance 1
MIN_RUNS = 8  # runs in each world for a bound
DETAIL_SIDE = 3  # side of the detail, in pixels

Advance = Callable[[int, int], None]


@dataclass
class Runs:
    """Summaries of the images of whole runs in both worlds, [3] each, and the plan of the method.

    - certified: whether the method has a guarantee: its noise is that of the plan, and is not drawn from its seed.
    """

    plan: Plan
    certified: bool
    present: list[Array] = field(default_factory=list)
    absent: list[Array] = field(default_factory=list)
    interrupted: bool = False

    def scores(self) -> tuple[Array, Array]:
        """Return a score of each run in each world: a linear discriminant of the first runs, which are not counted."""
        rows = [np.stack(part) for part in (self.present, self.absent)]
        first = [part[: selected(len(part))] for part in rows]
        middle, scale = np.concatenate(first).mean(0), np.concatenate(first).std(0) + 1e-9
        means = [((part - middle) / scale).mean(0) for part in first]
        within = np.concatenate([(part - middle) / scale - mean for part, mean in zip(first, means, strict=True)])
        covariance = within.T @ within / len(within) + RIDGE * np.eye(len(middle))
        direction = np.linalg.solve(covariance, means[0] - means[1]) / scale
        return rows[0] @ direction, rows[1] @ direction

    def bounds(self, confidence: float = CONFIDENCE) -> LowerBounds:
        """Return lower bounds on epsilon; `gaussian` for methods with noised releases only."""
        releases = self.plan.releases if self.certified and self.plan.budget.private else None
        delta, adjacency = self.plan.budget.delta, self.plan.budget.adjacency
        return lower_bounds(*self.scores(), delta=delta, confidence=confidence, releases=releases, adjacency=adjacency)


def distinguish(
    make: Make,
    pair: Neighbours,
    *,
    runs: int = 100,
    seconds: float = math.inf,
    advance: Advance = lambda *_: None,
) -> Runs:
    """Fit a method `runs` times on each of two neighbouring sets, and summarise its images.

    The attacker knows the seed, which is public, so it is the same in all runs; the noise is not drawn from it. Forms
    that draw their noise from the seed (those without a guarantee) get another one in each run.

    - seconds: no further run is started after this time. Ctrl-C ends the audit and keeps what was counted.
    """
    model, canaries, started = make(), pair.canaries, time.monotonic()
    found = Runs(model.plan(model.public_facts(pair.with_unit)), model.guarantee != "none")
    try:
        for number in range(runs):
            if len(found.absent) >= MIN_RUNS and time.monotonic() - started > seconds:
                found.interrupted = True
                break
            worlds = [
                summary(make(seed=0 if found.certified else 2 * number + world).fit(part), canaries)
                for world, part in enumerate((pair.with_unit, pair.without))
            ]
            found.present.append(worlds[0])
            found.absent.append(worlds[1])
            advance(number + 1, runs)
    except KeyboardInterrupt:
        if len(found.absent) < MIN_RUNS:
            raise
        found.interrupted = True
    return found


def summary(model: Synthesizer, canaries: ImageSet) -> Array:
    """Return what synthetic images say about the canary, [3].

    How close the mean image of its class is to it, the projection of the mean of all images on it, and the contrast of
    the mean image of its class.
    """
    classes, label = len(model.public_.classes), 0 if canaries.labels is None else int(canaries.labels[0])
    if (most := model.max_samples(model.public_)) is None:
        labels = None if classes == 1 else [c for c in range(classes) for _ in range(SAMPLES)]
        synthetic = model.sample(SAMPLES * classes, labels=labels, seed=0)
    else:  # a condensed set
        synthetic = model.sample(most, seed=0)
    pixels = to_unit_range(synthetic.images).flatten(1).double()
    own = pixels if synthetic.labels is None else pixels[synthetic.labels == label]
    mean = (own if len(own) else pixels).mean(0)
    wanted = to_unit_range(canaries.images).flatten(1).double().mean(0)
    centred = wanted - wanted.mean()
    found = -(mean - wanted).norm(), pixels.mean(0) @ centred, (mean - mean.mean()).norm()
    return torch.stack(found).numpy()


@dataclass(frozen=True)
class Game:
    """A set of the auditor's own images in which some units are canaries.

    - images: all of them, with persons if a canary has several images.
    - unit_of: canary of each image, or -1 for background.
    - included: the coin of each canary.
    - corners: place of each canary's detail, [canaries, 2], or None.
    """

    images: ImageSet
    unit_of: torch.Tensor
    included: torch.Tensor
    corners: torch.Tensor | None = None

    @property
    def training(self) -> ImageSet:
        """The images that the method may use: background, and canaries whose coin says so."""
        return self.images.subset((self.unit_of < 0) | self.included[self.unit_of.clamp_min(0)])

    def per_canary(self, scores: Array) -> Array:
        """Return the mean score of each canary's images."""
        of = self.unit_of[self.unit_of >= 0].numpy()
        return np.bincount(of, weights=scores) / np.bincount(of)

    @property
    def canaries(self) -> ImageSet:
        return self.images.subset(self.unit_of >= 0)


def new_game(images: ImageSet, *, canaries: int, per_person: int = 1, detail: bool = True, seed: int = 0) -> Game:
    """Return a game on the auditor's images.

    - canaries: number of canary units.
    - per_person: images of each, default 1; more make persons the unit.
    - detail: paint a small random pattern, the same on all images of a canary; default True.
    """
    generator = torch.Generator().manual_seed(seed)
    used = canaries * per_person
    if used > len(images) // 2:
        raise ValueError(f"{canaries} canaries of {per_person} images need at least {2 * used} images")
    unit_of = torch.full((len(images),), -1)
    unit_of[torch.randperm(len(images), generator=generator)[:used]] = torch.arange(used) // per_person
    pixels = images.images.clone()
    corners = torch.stack(
        [torch.randint(side - DETAIL_SIDE + 1, (canaries,), generator=generator) for side in images.shape[1:]], 1
    )
    for number, (top, left) in enumerate(corners.tolist() if detail else []):
        mark = (torch.randint(2, (DETAIL_SIDE, DETAIL_SIDE), generator=generator) * 255).byte()
        pixels[unit_of == number, :, top : top + DETAIL_SIDE, left : left + DETAIL_SIDE] = mark
    persons = None
    if per_person > 1:
        persons = torch.where(unit_of < 0, canaries + torch.arange(len(images)), unit_of)
    whole = ImageSet(pixels, images.labels, images.classes, persons=persons)
    coins = torch.rand(canaries, generator=generator) < 0.5
    return Game(whole, unit_of, coins, corners if detail else None)


@dataclass(frozen=True)
class OneRun:
    """The result of a one-run audit by one attack: two lower bounds on epsilon, and how well the attack works.

    - one_run_gaussian: None where the releases are not plain Gaussian ones (Poisson samples, no guarantee).
    """

    attack: Attack
    one_run: float
    one_run_gaussian: float | None

    @property
    def bound(self) -> float:
        """The bound to report: `one_run_gaussian` where it applies."""
        return self.one_run if self.one_run_gaussian is None else self.one_run_gaussian

    @property
    def power(self) -> str:
        """What a small bound means here."""
        if self.attack.detects:
            return "the attack is better than guessing"
        return "the attack is not better than guessing: its bound says nothing about privacy"

    def to_dict(self) -> dict[str, Any]:
        gaussian = None if self.one_run_gaussian is None else round(self.one_run_gaussian, 4)
        bounds = {"one_run": round(self.one_run, 4), "one_run_gaussian": gaussian}
        return {**self.attack.to_dict(), **bounds, "power": self.power}


@dataclass
class OneRunAudit:
    """What all attacks found in the images of one run.

    - planned: attacks that were meant to be made; fixed before, so that the bounds of all hold together.
    - ceiling: what `one_run` would give if every guess were right.
    """

    results: list[OneRun]
    planned: tuple[str, ...]
    certified: float | None
    confidence: float
    ceiling: float
    interrupted: bool = False

    @property
    def bound(self) -> float:
        """The largest bound. All hold together with `confidence`, so this one does."""
        return max((each.bound for each in self.results), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "certified": self.certified,
            "bound": round(self.bound, 4),
            "ceiling": round(self.ceiling, 4),
            "confidence": self.confidence,
            "attacks": [each.to_dict() for each in self.results],
            "interrupted": self.interrupted,
        }


def audit_one_run(
    make: Make,
    game: Game,
    *,
    shadows: int = 0,
    seconds: float = math.inf,
    confidence: float = CONFIDENCE,
    advance: Advance = lambda *_: None,
) -> OneRunAudit:
    """Fit a method once on a game, draw images, and let each attack guess which canaries were used.

    - shadows: further runs with fresh coins, which calibrate the classifier's loss (LiRA); default 0.
    - seconds: no attack and no shadow run is started after this time. Ctrl-C, too, keeps the attacks that are done.

    The bounds and intervals of all attacks hold together with `confidence` (Bonferroni).
    """
    if shadows and not game.images.labelled:
        raise ValueError("shadow runs calibrate the loss of a classifier, which needs labels")
    started = time.monotonic()
    model = make().fit(game.training)
    attacker = _attacker(model, game)
    names = (*attacker.names, *(("detail",) if game.corners is not None else ()))
    planned = (*names, *(("calibrated loss",) if shadows else ()))
    total, each = len(planned) + shadows, 1 - (1 - confidence) / len(planned)
    used, plan = game.included.numpy(), model.plan(model.public_)
    # A Poisson-sampled Gaussian has another trade-off curve, for which this form is not valid.
    sound = model.guarantee != "none" and plan.budget.private
    gaussian = sound and all(release.sampling_prob == 1 for release in plan.releases)
    certified = plan.epsilon if sound else None
    perfect = one_run(used.astype(float), used, delta=model.delta, confidence=each)
    found, targets, scores = OneRunAudit([], planned, certified, confidence, perfect), game.canaries, dict[str, Array]()

    def keep(name: str, scores: Array) -> None:
        found.results.append(
            OneRun(
                attack(name, scores[used], scores[~used], each),
                one_run(scores, used, delta=model.delta, confidence=each),
                one_run_gaussian(scores, used, delta=model.delta, confidence=each) if gaussian else None,
            )
        )
        advance(len(found.results), total)

    try:
        for name in names:
            if found.results and time.monotonic() - started > seconds:
                found.interrupted = True
                return found
            if name == "detail":
                keep(name, game.per_canary(_show_detail(attacker.synthetic, game)))
            else:
                scores[name] = game.per_canary(attacker.score(name, targets))
                keep(name, scores[name])
        runs: list[Array] = []
        for number in range(1000, 1000 + shadows):
            if time.monotonic() - started > seconds:
                found.interrupted = True
                return found
            coins = torch.rand(len(used), generator=torch.Generator().manual_seed(number)) < 0.5
            shadow = make(seed=number).fit(replace(game, included=coins).training)
            without = game.per_canary(_attacker(shadow, game).score("loss", targets))
            runs.append(np.where(coins.numpy(), np.nan, without))
            advance(len(names) + len(runs), total)
        if runs:
            keep("calibrated loss", calibrated(scores["loss"], runs))
    except KeyboardInterrupt:
        if not found.results:
            raise
        found.interrupted = True
    return found


def _attacker(model: Synthesizer, game: Game) -> Attacker:
    """Return the attacks on as many synthetic images as the game has images, or on a whole condensed set."""
    count = model.max_samples(model.public_) or len(game.images)
    background = game.images.subset(game.unit_of < 0)
    return Attacker(model.sample(count, seed=1), background, labelled=game.images.labelled)


def _show_detail(synthetic: ImageSet, game: Game) -> Array:
    """Return how clearly each canary's detail shows in some synthetic image, at its place (a matched filter)."""
    assert game.corners is not None
    found = []
    for image, unit in zip(game.canaries.images, game.unit_of[game.unit_of >= 0].tolist(), strict=True):
        top, left = game.corners[unit].tolist()
        window = (slice(None), slice(top, top + DETAIL_SIDE), slice(left, left + DETAIL_SIDE))
        mark = image[window].float().flatten()
        shown = synthetic.images[:, *window].float().flatten(1) @ (mark - mark.mean())
        found.append(float(shown.max() / (mark - mark.mean()).norm().clamp_min(1e-6)))
    return np.array(found)
