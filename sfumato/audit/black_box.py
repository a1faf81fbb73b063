"""Black-box audits: the attacker sees synthetic images only.

`distinguish` repeats whole runs on two neighbouring sets and asks the images which set it was. `one_run` hides many
canaries in one set of the auditor's own images, each by a fair coin, and asks the images of a single run which ones
were used. A canary is an ordinary image with a rare, learnable detail (or a person's worth of them); without details,
the canaries are a random half of the images.

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

from sfumato.audit import membership
from sfumato.audit.lower_bounds import CONFIDENCE, Array, LowerBounds, lower_bounds, one_run, one_run_gaussian
from sfumato.audit.membership import Attack, attack
from sfumato.audit.neighbours import Neighbours
from sfumato.audit.small_settings import Make
from sfumato.data import ImageSet
from sfumato.methods.base import Synthesizer
from sfumato.privacy import Plan

SAMPLES = 64  # synthetic images of a run that the attacker sees, of the class of the canary
MARK = 3  # side of the detail, in pixels

Advance = Callable[[int, int], None]


@dataclass
class Runs:
    """Scores of whole runs in both worlds, and the plan of the method."""

    plan: Plan
    present: list[float] = field(default_factory=list)
    absent: list[float] = field(default_factory=list)
    interrupted: bool = False

    def bounds(self, confidence: float = CONFIDENCE) -> LowerBounds:
        """Return lower bounds on epsilon; `gaussian` for methods with noised releases only."""
        releases = self.plan.releases if self.plan.budget.private else None
        delta, adjacency = self.plan.budget.delta, self.plan.budget.adjacency
        return lower_bounds(
            self.present, self.absent, delta=delta, confidence=confidence, releases=releases, adjacency=adjacency
        )


def distinguish(
    make: Make,
    pair: Neighbours,
    *,
    runs: int = 100,
    seconds: float = math.inf,
    advance: Advance = lambda *_: None,
) -> Runs:
    """Fit a method `runs` times on each of two neighbouring sets, each time with another seed, and score its images.

    - seconds: no further run is started after this time. Ctrl-C ends the audit and keeps what was counted.
    """
    model, canaries, started = make(), pair.canaries, time.monotonic()
    found = Runs(model.plan(model.public_facts(pair.with_unit)))
    try:
        for number in range(runs):
            if len(found.absent) >= 8 and time.monotonic() - started > seconds:
                found.interrupted = True
                break
            scores = [
                resemblance(make(seed=2 * number + world).fit(part), canaries, seed=number)
                for world, part in enumerate((pair.with_unit, pair.without))
            ]
            found.present.append(scores[0])
            found.absent.append(scores[1])
            advance(number + 1, runs)
    except KeyboardInterrupt:
        if len(found.absent) < 8:
            raise
        found.interrupted = True
    return found


def resemblance(model: Synthesizer, canaries: ImageSet, *, seed: int = 0) -> float:
    """Return the mean correlation of synthetic images with the canary, in the class of the canary."""
    label = None if canaries.labels is None else int(canaries.labels[0])
    if (most := model.max_samples(model.public_)) is None:
        synthetic = model.sample(SAMPLES, labels=label, seed=seed)
    else:  # a condensed set
        synthetic = model.sample(most, seed=seed)
        if label is not None and synthetic.labels is not None and bool((synthetic.labels == label).any()):
            synthetic = synthetic.subset(synthetic.labels == label)
    made = synthetic.images.double().flatten(1).mean(0)
    wanted = canaries.images.double().flatten(1).mean(0)
    made, wanted = made - made.mean(), wanted - wanted.mean()
    return float(made @ wanted / (made.norm() * wanted.norm()).clamp_min(1e-9))


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

    - canaries: number of canary units. per_person: images of each, default 1; more make persons the unit.
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
        [torch.randint(side - MARK + 1, (canaries,), generator=generator) for side in images.shape[1:]], 1
    )
    for number, (top, left) in enumerate(corners.tolist() if detail else []):
        mark = (torch.randint(2, (MARK, MARK), generator=generator) * 255).byte()
        pixels[unit_of == number, :, top : top + MARK, left : left + MARK] = mark
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
    def power(self) -> str:
        """What a small bound means here."""
        if self.attack.detects:
            return "the attack is better than guessing"
        return "the attack is not better than guessing: its bound says nothing about privacy"

    def to_dict(self) -> dict[str, Any]:
        gaussian = None if self.one_run_gaussian is None else round(self.one_run_gaussian, 4)
        bounds = {"one_run": round(self.one_run, 4), "one_run_gaussian": gaussian}
        return {**self.attack.to_dict(), **bounds, "power": self.power}


def audit_one_run(
    make: Make, game: Game, *, shadows: int = 0, confidence: float = CONFIDENCE, advance: Advance = lambda *_: None
) -> list[OneRun]:
    """Fit a method once on a game, draw images, and let each attack guess which canaries were used.

    - shadows: further runs with fresh coins, which calibrate the classifier's loss (LiRA); default 0.

    The bounds are valid one by one at `confidence`; do not report the largest of several attacks.
    """
    if shadows and not game.images.labelled:
        raise ValueError("shadow runs calibrate the loss of a classifier, which needs labels")
    model = make().fit(game.training)
    advance(1, 1 + shadows)
    found = _scores(model, game)
    runs = []
    for number in range(1000, 1000 + shadows):
        coins = torch.rand(len(game.included), generator=torch.Generator().manual_seed(number)) < 0.5
        shadow = make(seed=number).fit(replace(game, included=coins).training)
        runs.append(np.where(coins.numpy(), np.nan, _scores(shadow, game)["loss"]))
        advance(len(runs) + 1, 1 + shadows)
    if runs:
        found["calibrated loss"] = membership.calibrated(found["loss"], runs)
    used, plan = game.included.numpy(), model.plan(model.public_)
    # A Poisson-sampled Gaussian has another trade-off curve, for which this form is not valid.
    gaussian = plan.budget.private and all(release.sampling_prob == 1 for release in plan.releases)
    return [
        OneRun(
            attack(name, each[used], each[~used], confidence),
            one_run(each, used, delta=model.delta, confidence=confidence),
            one_run_gaussian(each, used, delta=model.delta, confidence=confidence) if gaussian else None,
        )
        for name, each in found.items()
    ]


def _scores(model: Synthesizer, game: Game) -> dict[str, Array]:
    """Return the scores of each canary by each attack on the images of a model."""
    count = min(len(game.images), model.max_samples(model.public_) or len(game.images))
    synthetic, targets = model.sample(count, seed=1), game.canaries
    found = {
        "nearest": membership.nearest(synthetic, targets),
        "density": membership.density(synthetic, targets, game.images.subset(game.unit_of < 0)),
    }
    if targets.labelled:
        found["loss"] = membership.loss(synthetic, targets)
    if game.corners is not None:
        found["detail"] = _show_detail(synthetic, game)
    return {name: game.per_canary(scores) for name, scores in found.items()}


def _show_detail(synthetic: ImageSet, game: Game) -> Array:
    """Return minus the distance of each canary's detail to the same place in the most similar synthetic image."""
    assert game.corners is not None
    found = []
    for image, unit in zip(game.canaries.images, game.unit_of[game.unit_of >= 0].tolist(), strict=True):
        top, left = game.corners[unit].tolist()
        window = (slice(None), slice(top, top + MARK), slice(left, left + MARK))
        found.append(
            -float((synthetic.images[:, *window].float() - image[window].float()).flatten(1).norm(dim=1).min())
        )
    return np.array(found)
