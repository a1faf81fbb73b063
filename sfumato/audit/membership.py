"""Membership inference on released images, and a memorisation check. For the owner of the images only.

Attacks give each image a score, larger if it looks like a training image:

- `nearest`: minus the distance to the nearest synthetic image, in public features;
- `copies`: likeness to the most similar synthetic image by SSCD, a network for copy detection, where it is installed;
- `density`: density among synthetic images over density among reference images, in public features (DOMIAS, van
  Breugel et al. 2023);
- `loss`: minus the loss of a classifier that was trained on the synthetic images. With synthetic sets of shadow runs,
  `calibrated` compares it with its distribution over runs without the image (LiRA, Carlini et al. 2022).

Results describe private images: they belong into a folder `private/`, never into what is shared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import beta, norm, rankdata
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from sfumato.audit.lower_bounds import CONFIDENCE, Array
from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.atomic import write_json
from sfumato.data.pixels import to_unit_range
from sfumato.features import Scattering
from sfumato.features.copy_detector import MIN_SIDE, load_copy_detector

FALSE_POSITIVE_RATES = (0.001, 0.01)
COMPONENTS = 16  # of features, for densities
SHOWN_PAIRS = 12
BLOCK = 500  # images that are attacked at a time
MAX_SYNTHETIC, MAX_REFERENCE = 20_000, 2_000
TIMING_IMAGES, OPERATIONS_PER_SECOND = 32, 2e9  # images, and multiplications per second, for the estimate of the cost


@dataclass(frozen=True)
class Rate:
    """A rate with its exact confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Attack:
    """How well an attack tells members from others.

    - auroc: area under the ROC curve with its interval (DeLong); 0.5 is guessing.
    - tpr: true positive rate at each false positive rate; None where there are too few non-members to measure it.
    """

    name: str
    auroc: Rate
    tpr: dict[str, Rate | None]
    members: int
    others: int

    @property
    def detects(self) -> bool:
        """Whether the attack is better than guessing, at the confidence of its interval."""
        return self.auroc.low > 0.5

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Attacker:
    """The attacks on one set of synthetic images, prepared once, then asked for the scores of images.

    - synthetic: what the attacker has.
    - reference: images of the same kind that were not used, for `density`.
    - labelled: whether the attacked images have labels; `loss` needs them, and labels of synthetic images.
    """

    def __init__(self, synthetic: ImageSet, reference: ImageSet, *, labelled: bool) -> None:
        self.synthetic, self.reference = synthetic, reference
        self.names: tuple[str, ...] = ("nearest", "density")
        if min(synthetic.shape[1:]) >= MIN_SIDE and load_copy_detector() is not None:
            self.names += ("copies",)
        if labelled and synthetic.labelled:
            self.names += ("loss",)
        self._last: tuple[ImageSet, Array] | None = None

    def score(self, name: str, targets: ImageSet) -> Array:
        """Return the scores of images by one attack."""
        if name == "nearest":
            return np.asarray(-self.distances(targets).min(1))
        if name == "density":
            pca, made, real = self._densities
            wanted = pca.transform(self._embedded(targets))
            return _log_density(wanted, made) - _log_density(wanted, real)
        if name == "copies":
            return (_copies(targets) @ self._copied.T).amax(1).double().numpy()
        return self._loss(targets)

    def distances(self, targets: ImageSet) -> Array:
        """Return the distance of each target to each synthetic image, in features, [targets, synthetic]."""
        rows, among = (torch.from_numpy(part) for part in (self._embedded(targets), self._made))
        found: Array = torch.cdist(rows, among).numpy()
        return found

    def _embedded(self, targets: ImageSet) -> Array:
        """Return features; those of the last targets are kept, as several attacks need them."""
        if self._last is None or self._last[0] is not targets:
            self._last = targets, embed(targets)
        return self._last[1]

    @cached_property
    def _made(self) -> Array:
        return embed(self.synthetic)

    @cached_property
    def _densities(self) -> tuple[PCA, Array, Array]:
        real = embed(self.reference)
        pca = PCA(min(COMPONENTS, len(real) - 1), whiten=True).fit(real)
        return pca, pca.transform(self._made), pca.transform(real)

    @cached_property
    def _copied(self) -> torch.Tensor:
        return _copies(self.synthetic)

    @cached_property
    def _classifier(self) -> tuple[Array, Array, LogisticRegression | None]:
        """Return mean and scale of features, and a classifier of the synthetic images; None for one class."""
        assert self.synthetic.labels is not None
        labels = self.synthetic.labels.numpy()
        middle, scale = self._made.mean(0), self._made.std(0) + 1e-6
        if len(np.unique(labels)) < 2:
            return middle, scale, None
        return middle, scale, LogisticRegression(max_iter=300).fit((self._made - middle) / scale, labels)

    def _loss(self, targets: ImageSet) -> Array:
        """Return minus the cross-entropy of targets under a logistic regression on the synthetic images."""
        if targets.labels is None:
            raise DataError("the attack by classifier loss needs labels")
        middle, scale, model = self._classifier
        if model is None:
            return np.zeros(len(targets))
        chances = model.predict_log_proba((self._embedded(targets) - middle) / scale)
        column = {int(label): number for number, label in enumerate(model.classes_)}
        missing = float(np.log(1e-6))
        labels = targets.labels.tolist()
        return np.array([row[column[c]] if c in column else missing for row, c in zip(chances, labels, strict=True)])


def embed(images: ImageSet) -> Array:
    """Return public features: scattering coefficients, [N, features]. They have no trained weights."""
    scattering = Scattering((images.shape[1], images.shape[2]))
    with torch.no_grad():
        parts = [scattering(to_unit_range(part)).flatten(1) for part in images.images.split(BLOCK)]
    return torch.cat(parts).numpy()


def _copies(images: ImageSet) -> torch.Tensor:
    detector = load_copy_detector()
    assert detector is not None
    return detector.embed(images.images)


def calibrated(scores: Array, shadows: Sequence[Array]) -> Array:
    """Return how far scores lie above those of shadow runs without the image, in their standard deviations.

    - shadows: scores of the same images from other runs, NaN where an image was part of that run. An image without two
      such runs keeps a score of 0. The deviation is pooled over images, as shadow runs are few.
    """
    others = np.stack(shadows)
    known = np.isfinite(others).sum(0) >= 2
    mean, variance = (np.where(known, stat, 0.0) for stat in _moments(others, known))
    spread = math.sqrt(float(variance[known].mean())) if known.any() else 1.0
    return np.where(known, (scores - mean) / max(spread, 1e-12), 0.0)


def attack(name: str, members: Array, others: Array, confidence: float = CONFIDENCE) -> Attack:
    """Return the AUROC and the true positive rates of scores of members and non-members."""
    rates = {f"{fpr:g}": _tpr(members, others, fpr, confidence) for fpr in FALSE_POSITIVE_RATES}
    return Attack(name, auroc(members, others, confidence), rates, len(members), len(others))


@dataclass
class ReleaseAudit:
    """What attacks found in released images. All intervals hold together with the confidence.

    - attacks: results by the name of the attack.
    - memory: the memorisation check, with the most suspicious pairs of images.
    - members, others: how many there are that could be attacked.
    - attacked: how many of each were.
    """

    attacks: list[Attack]
    memory: dict[str, Any]
    members: int
    others: int
    attacked: tuple[int, int]
    interrupted: bool

    @property
    def suspicious(self) -> bool:
        """Whether training images can be told from others."""
        return bool(self.memory["memorises"]) or any(each.detects for each in self.attacks)

    def to_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in self.memory.items() if key != "pairs"}
        return {
            "attacks": [each.to_dict() for each in self.attacks],
            "memorisation": plain,
            "members": self.members,
            "others": self.others,
            "attacked": list(self.attacked),
            "interrupted": self.interrupted,
        }


def estimate_release_seconds(synthetic: ImageSet, members: ImageSet, others: ImageSet) -> float:
    """Return about how long `audit_release` takes, from a few images."""
    few, started = synthetic.subset(range(min(len(synthetic), TIMING_IMAGES))), time.monotonic()
    small = Attacker(few, few, labelled=False)
    for name in small.names:
        small.score(name, few)
    each = (time.monotonic() - started) / (2 * len(few))
    made = min(len(synthetic), MAX_SYNTHETIC)
    pairs = made * (len(members) + len(others)) * embed(few).shape[1]
    return float(each * (made + len(members) + len(others)) + pairs / OPERATIONS_PER_SECOND)


def audit_release(
    synthetic: ImageSet,
    members: ImageSet,
    others: ImageSet,
    *,
    seconds: float = math.inf,
    confidence: float = CONFIDENCE,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> ReleaseAudit:
    """Attack released images with all attacks, and check whether they remember their training images.

    - members: images that were used.
    - others: images of the same kind that were not. A quarter of these, at most 2,000, are the reference of `density`
      and are not attacked.
    - seconds: no further block of images is attacked after this time. Ctrl-C, too, keeps what was counted: images are
      attacked in random order, so what was counted is a random part.

    Of more than 20,000 synthetic images, a random part is attacked.
    """
    generator, started = torch.Generator().manual_seed(0), time.monotonic()
    made, used, rest = (
        part.subset(torch.randperm(len(part), generator=generator)[:most])
        for part, most in ((synthetic, MAX_SYNTHETIC), (members, None), (others, None))
    )
    kept = max(2, min(MAX_REFERENCE, len(rest) // 4))
    if len(rest) - kept < 2 or len(used) < 2:
        raise DataError(f"an audit needs at least 2 training and 4 held-out images, got {len(used)} and {len(rest)}")
    reference, rest = rest.subset(range(kept)), rest.subset(range(kept, len(rest)))
    attacker = Attacker(made, reference, labelled=members.labelled and others.labelled)
    worlds = _World(attacker, used), _World(attacker, rest)
    interrupted = False
    try:
        for start in range(0, max(len(used), len(rest)), BLOCK):
            if start and time.monotonic() - started > seconds:
                interrupted = True
                break
            paired = min(BLOCK, max(0, min(len(used), len(rest)) - start))
            blocks = [world.attack(start, paired) for world in worlds]
            for world, block in zip(worlds, blocks, strict=True):  # both or none, if Ctrl-C comes in between
                world.blocks += [block] if block is not None else []
            advance(min(start + BLOCK, max(len(used), len(rest))), max(len(used), len(rest)))
    except KeyboardInterrupt:
        if not worlds[0].blocks:
            raise
        interrupted = True
    each = 1 - (1 - confidence) / (len(attacker.names) + 1)
    found = [attack(name, worlds[0].scores(name), worlds[1].scores(name), each) for name in attacker.names]
    memory = _memorisation(made, worlds, each)
    attacked = len(worlds[0].scores("nearest")), len(worlds[1].scores("nearest"))
    return ReleaseAudit(found, memory, len(members), len(others), attacked, interrupted)


@dataclass
class _Scored:
    """Scores of some images by attack; for each synthetic image the nearest of the first `paired`: distance, index."""

    scores: dict[str, Array]
    near: tuple[Array, Array]
    paired: int


@dataclass
class _World:
    """Members or others: their blocks so far."""

    attacker: Attacker
    images: ImageSet
    blocks: list[_Scored] = field(default_factory=list)

    def attack(self, start: int, paired: int) -> _Scored | None:
        """Return the scores of a block of images, None after the last; `paired` is how many of both worlds it has."""
        if start >= len(self.images):
            return None
        targets = self.images.subset(range(start, min(start + BLOCK, len(self.images))))
        distances = self.attacker.distances(targets)
        scores = {name: self.attacker.score(name, targets) for name in self.attacker.names if name != "nearest"}
        first = distances[: max(paired, 1)]
        return _Scored({"nearest": -distances.min(1), **scores}, (first.min(0), start + first.argmin(0)), paired)

    def scores(self, name: str) -> Array:
        return np.concatenate([block.scores[name] for block in self.blocks])


def auroc(members: Array, others: Array, confidence: float = CONFIDENCE) -> Rate:
    """Return the area under the ROC curve with DeLong's interval."""
    m, n = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))
    above = (ranks[:m] - rankdata(members)) / n  # share of others below each member
    below = 1 - (ranks[m:] - rankdata(others)) / m
    area = float(above.mean())
    sd = math.sqrt(above.var(ddof=1) / m + below.var(ddof=1) / n)
    margin = float(norm.ppf((1 + confidence) / 2)) * sd
    return Rate(area, max(0.0, area - margin), min(1.0, area + margin))


def interval(events: int, trials: int, confidence: float = CONFIDENCE) -> Rate:
    """Return a rate with its two-sided Clopper-Pearson interval."""
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, events, trials - events + 1)) if events else 0.0
    high = float(beta.ppf(1 - tail, events + 1, trials - events)) if events < trials else 1.0
    return Rate(events / trials, low, high)


def _memorisation(synthetic: ImageSet, worlds: tuple[_World, _World], confidence: float) -> dict[str, Any]:
    """Compare the distances of synthetic images to training images with those to held-out images.

    A generator that copies is closer to its training images. As many of both are compared, so that a synthetic image
    without memory is closer to either with probability 1/2. Many synthetic images may share a neighbour, so they are
    not independent: the interval has the variance over random exchanges of training and held-out images.
    """
    paired = [pair for pair in zip(*(world.blocks for world in worlds), strict=False) if pair[0].paired]
    size = sum(train.paired for train, _ in paired)
    nearest = []
    for side in (0, 1):
        distances, indices = (np.stack([pair[side].near[part] for pair in paired]) for part in (0, 1))
        best = distances.argmin(0)[None]
        nearest.append((np.take_along_axis(distances, best, 0)[0], np.take_along_axis(indices, best, 0)[0]))
    (to_train, index), (to_held_out, other) = nearest
    nearer = to_train < to_held_out
    closer = _share(np.where(nearer, index, size + other), nearer, 2 * size, confidence)
    order = np.argsort(to_train / np.maximum(to_held_out, 1e-12))[:SHOWN_PAIRS]
    train = worlds[0].images
    known = {image.numpy().tobytes() for image in train.images[: len(worlds[0].scores("nearest"))]}
    return {
        "closer_to_training": asdict(closer),
        "memorises": closer.low > 0.5,
        "compared_with": size,
        "copies": sum(image.numpy().tobytes() in known for image in synthetic.images),
        "pairs": ImageSet(torch.cat([synthetic.images[order], train.images[index[order]]])),
    }


def check_private(folder: Path) -> None:
    """Raise if results about private images would be part of a folder that is shared."""
    if any((parent / "certificate.json").exists() for parent in folder.resolve().parents):
        raise DataError(f"{folder} lies in a folder that is meant to be shared; choose another one (--out)")


def write_private(folder: Path, found: ReleaseAudit, synthetic: str) -> Path:
    """Write results about private images to `folder`, which must not be part of a folder that is shared."""
    check_private(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contact_sheet(found.memory["pairs"], folder / "most_similar.png", per_class=2 * SHOWN_PAIRS)
    write_json(folder / "membership.json", {"synthetic": synthetic, **found.to_dict()})
    return folder / "membership.json"


def _tpr(members: Array, others: Array, fpr: float, confidence: float) -> Rate | None:
    """Return the share of members above all but a share `fpr` of the others; the interval is given this threshold."""
    allowed = int(fpr * len(others) + 1e-9)
    if allowed < 1:
        return None
    threshold = np.sort(others)[len(others) - allowed - 1]
    return interval(int((members > threshold).sum()), len(members), confidence)


def _share(neighbours: Array, of_training: Array, images: int, confidence: float) -> Rate:
    """Return the share of nearest neighbours that are training images, with an interval.

    - neighbours: index of the nearest of all `images`, half of which are training images.

    Without memory, each image is a training image by chance, so the share is a sum of the numbers of neighbours over a
    random half of the images, of known variance (permutation test, normal approximation).
    """
    counts, share = np.bincount(neighbours, minlength=images), float(of_training.mean())
    variance = images / (4 * (images - 1)) * float(np.square(counts - counts.mean()).sum()) / len(neighbours) ** 2
    margin = float(norm.ppf((1 + confidence) / 2)) * math.sqrt(variance)
    return Rate(share, max(0.0, share - margin), min(1.0, share + margin))


def _log_density(queries: Array, centres: Array) -> Array:
    """Return the log density of Gaussian kernels around the centres, with Scott's bandwidth."""
    dimension = queries.shape[1]
    width = len(centres) ** (-1 / (dimension + 4))
    squares = torch.cdist(torch.from_numpy(queries), torch.from_numpy(centres)).square().double().numpy()
    return np.asarray(logsumexp(-squares / (2 * width**2), axis=1) - math.log(len(centres)))


def _moments(values: Array, known: Array) -> tuple[Array, Array]:
    """Return mean and variance over runs, ignoring NaN."""
    some = np.where(known, values, 0.0)
    return np.nanmean(some, 0), np.nanvar(some, 0, ddof=1) if len(some) > 1 else np.zeros(some.shape[1])
