"""Membership inference on released images, and a memorisation check. For the owner of the images only.

Attacks give each image a score, larger if it looks like a training image:

- `nearest`: minus the distance to the nearest synthetic image, in public features (copy detection);
- `density`: density among synthetic images over density among reference images, in public features (DOMIAS, van
  Breugel et al. 2023);
- `loss`: minus the loss of a classifier that was trained on the synthetic images. With synthetic sets of shadow runs,
  `calibrated` compares it with its distribution over runs without the image (LiRA, Carlini et al. 2022).

Results describe private images: they belong into a folder `private/`, never into what is shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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

FALSE_POSITIVE_RATES = (0.001, 0.01)
COMPONENTS = 16  # of features, for densities
SHOWN = 12
BLOCK = 1000


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


def embed(images: ImageSet) -> Array:
    """Return public features: scattering coefficients, [N, features]. They have no trained weights."""
    scattering = Scattering((images.shape[1], images.shape[2]))
    with torch.no_grad():
        parts = [scattering(to_unit_range(part)).flatten(1) for part in images.images.split(BLOCK)]
    return torch.cat(parts).double().numpy()


def nearest(synthetic: ImageSet, targets: ImageSet) -> Array:
    """Return minus the distance of each target to the nearest synthetic image, in features."""
    return -_distances(embed(targets), embed(synthetic))[0]


def density(synthetic: ImageSet, targets: ImageSet, reference: ImageSet) -> Array:
    """Return log density among synthetic images minus that among reference images (Gaussian kernels)."""
    pca = PCA(min(COMPONENTS, len(reference) - 1), whiten=True).fit(embed(reference))
    wanted, made, real = (pca.transform(embed(part)) for part in (targets, synthetic, reference))
    return _log_density(wanted, made) - _log_density(wanted, real)


def loss(synthetic: ImageSet, targets: ImageSet) -> Array:
    """Return minus the cross-entropy of targets under a logistic regression on features of the synthetic images."""
    if synthetic.labels is None or targets.labels is None:
        raise DataError("the attack by classifier loss needs labels")
    made = embed(synthetic)
    scale = made.std(0) + 1e-6
    if len(synthetic.labels.unique()) < 2:
        return np.zeros(len(targets))
    model = LogisticRegression(max_iter=300).fit((made - made.mean(0)) / scale, synthetic.labels.numpy())
    chances = model.predict_log_proba((embed(targets) - made.mean(0)) / scale)
    column = {int(label): number for number, label in enumerate(model.classes_)}
    missing = float(np.log(1e-6))
    return np.array(
        [row[column[c]] if c in column else missing for row, c in zip(chances, targets.labels.tolist(), strict=True)]
    )


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


def attacks(
    synthetic: ImageSet, members: ImageSet, others: ImageSet, reference: ImageSet | None = None
) -> list[Attack]:
    """Return all attacks on released images.

    - members: images that were used; others: images of the same kind that were not.
    - reference: public images for `density`, default: half of `others`, which are then not attacked.
    """
    found = [attack("nearest", nearest(synthetic, members), nearest(synthetic, others))]
    rest = others
    if reference is None:
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(0))
        reference, rest = others.subset(order[::2]), others.subset(order[1::2])
    found.append(attack("density", density(synthetic, members, reference), density(synthetic, rest, reference)))
    if synthetic.labelled and members.labelled and others.labelled:
        found.append(attack("loss", loss(synthetic, members), loss(synthetic, others)))
    return found


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


def memorisation(
    synthetic: ImageSet, train: ImageSet, held_out: ImageSet, confidence: float = CONFIDENCE
) -> dict[str, Any]:
    """Compare the distances of synthetic images to training images with those to held-out images.

    A generator that copies is closer to its training images. Both sets are cut to the same size, so that a synthetic
    image without memory is closer to either with probability 1/2. Many synthetic images may share a neighbour, so they
    are not independent: the interval has the variance over random exchanges of training and held-out images.
    """
    size = min(len(train), len(held_out))
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(len(part), generator=generator)[:size] for part in (train, held_out)]
    made = embed(synthetic)
    (to_train, index), (to_held_out, other) = (
        _distances(made, embed(part.subset(order))) for part, order in zip((train, held_out), chosen, strict=True)
    )
    neighbour = chosen[0].numpy()[index]
    nearer = to_train < to_held_out
    closer = _share(np.where(nearer, index, size + other), nearer, 2 * size, confidence)
    order = np.argsort(to_train / np.maximum(to_held_out, 1e-12))[:SHOWN]
    return {
        "closer_to_training": asdict(closer),
        "memorises": closer.low > 0.5,
        "compared_with": size,
        "copies": int((to_train < 1e-6).sum()),
        "most_similar": [int(i) for i in order],
        "their_neighbours": [int(neighbour[i]) for i in order],
        "pairs": ImageSet(torch.cat([synthetic.images[order], train.images[neighbour[order]]])),
    }


def write_private(folder: Path, found: Sequence[Attack], memory: dict[str, Any], synthetic: str) -> Path:
    """Write results about private images to `folder`, which must not be part of a folder that is shared."""
    if any((parent / "certificate.json").exists() for parent in folder.resolve().parents):
        raise DataError(f"{folder} lies in a folder that is meant to be shared; choose another one (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    contact_sheet(memory["pairs"], folder / "most_similar.png", per_class=2 * SHOWN)
    plain = {key: value for key, value in memory.items() if key != "pairs"}
    results = {"synthetic": synthetic, "attacks": [each.to_dict() for each in found], "memorisation": plain}
    write_json(folder / "membership.json", results)
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


def _distances(queries: Array, among: Array) -> tuple[Array, Array]:
    """Return the distance of each query to its nearest row, and the index of that row."""
    best = [torch.cdist(torch.from_numpy(part), torch.from_numpy(among)).min(1) for part in _blocks(queries)]
    return torch.cat([each.values for each in best]).numpy(), torch.cat([each.indices for each in best]).numpy()


def _log_density(queries: Array, centres: Array) -> Array:
    """Return the log density of Gaussian kernels around the centres, with Scott's bandwidth."""
    dimension = queries.shape[1]
    width = len(centres) ** (-1 / (dimension + 4))
    squares = [torch.cdist(torch.from_numpy(part), torch.from_numpy(centres)).square() for part in _blocks(queries)]
    return np.asarray(logsumexp(-torch.cat(squares).numpy() / (2 * width**2), axis=1) - math.log(len(centres)))


def _blocks(rows: Array) -> list[Array]:
    return [rows[start : start + BLOCK] for start in range(0, len(rows), BLOCK)]


def _moments(values: Array, known: Array) -> tuple[Array, Array]:
    """Return mean and variance over runs, ignoring NaN."""
    some = np.where(known, values, 0.0)
    return np.nanmean(some, 0), np.nanvar(some, 0, ddof=1) if len(some) > 1 else np.zeros(some.shape[1])
