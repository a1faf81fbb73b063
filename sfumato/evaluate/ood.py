"""Out-of-distribution detection: which images are unlike those that a model was fitted on.

An image is flagged when its log-likelihood is below a threshold. The threshold is the quantile, at the chosen rate of
false alarms, of the scores of *synthetic* images: no image that the model was fitted on is looked at again, and the
detector, threshold included, is as public as the model. What is measured with labels (AUROC, rates) concerns the
images that are scored, and is theirs to protect.

The rate holds for synthetic images. Real ones of the same kind are somewhat less likely than what a model makes
itself, so that more of them are flagged; where labels are given, the rate among them is reported beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.metrics import roc_auc_score

from sfumato.data import DataError, ImageSet, contact_sheet
from sfumato.data.atomic import replacing
from sfumato.data.grid import _font
from sfumato.methods.base import Synthesizer

SAMPLES = 2000  # synthetic images that a threshold is taken from
SHOWN = 100  # least likely images
BINS = 60
WIDE, HIGH, EDGE = 720, 300, 40
COLOURS = {"images": "#4477aa", "inliers": "#4477aa", "outliers": "#ee6677", "synthetic": "#bbbbbb"}


@dataclass(frozen=True)
class Detection:
    """Scores of images, which of them are flagged, and how well that tells inliers from outliers where it is known."""

    scores: torch.Tensor
    synthetic: torch.Tensor
    threshold: float
    inliers: torch.Tensor | None

    @property
    def flagged(self) -> torch.Tensor:
        """Whether each image is less likely than the threshold."""
        return self.scores < self.threshold

    @property
    def auroc(self) -> float | None:
        """Probability that an inlier scores above an outlier; None without labels."""
        if self.inliers is None:
            return None
        return float(roc_auc_score(self.inliers.numpy(), self.scores.numpy()))

    def to_dict(self) -> dict[str, Any]:
        """All figures; scores one by one."""
        figures: dict[str, Any] = {
            "images": len(self.scores),
            "threshold": self.threshold,
            "flagged": int(self.flagged.sum()),
        }
        if self.inliers is not None:
            figures |= {
                "auroc": self.auroc,
                "flagged_inliers": float(self.flagged[self.inliers].double().mean()),
                "flagged_outliers": float(self.flagged[~self.inliers].double().mean()),
            }
        return {**figures, "scores": self.scores.tolist()}

    def histogram(self, path: str | Path) -> Path:
        """A picture of the scores, of the synthetic ones', and of the threshold."""
        parts = {"images": self.scores}
        if self.inliers is not None:
            parts = {"inliers": self.scores[self.inliers], "outliers": self.scores[~self.inliers]}
        return _draw({"synthetic": self.synthetic, **parts}, self.threshold, Path(path))


def detect(
    model: Synthesizer,
    images: ImageSet,
    *,
    label: int | str | None = None,
    inliers: Sequence[str] = (),
    false_alarms: float = 0.05,
    samples: int = SAMPLES,
    seed: int = 0,
    **options: Any,
) -> Detection:
    """Scores `images` with a fitted model, under one class or all, and flags the unlikely ones.

    `inliers` names the classes of `images` that belong; all others are outliers. Left out, it is `label`'s class where
    `images` are labelled and have one of that name. `false_alarms` is the share of synthetic images that are below the
    threshold.
    """
    if not 0 < false_alarms < 1:
        raise ValueError(f"the rate of false alarms must lie strictly between 0 and 1, got {false_alarms!r}")
    belongs = _belongs(images, inliers, label, model)
    scores = model.score(images, label=label, **options)
    drawn = model.sample(samples, labels=label, seed=seed, **options)
    synthetic = model.score(drawn, label=label, **options)
    return Detection(scores, synthetic, float(synthetic.quantile(false_alarms)), belongs)


def detect_each(model: Synthesizer, images: ImageSet, **options: Any) -> dict[str, Detection]:
    """Each class of the model in turn as what belongs, the rest of `images` as outliers (DP-LFlow, Table 3)."""
    classes = model._fitted().classes
    if not images.labelled or (missing := sorted(set(classes) - set(images.classes))):
        raise DataError(
            "to try each class, the images need labels with the model's classes"
            + (f"; {missing[0]!r} is not among them" if images.labelled else "")
        )
    return {name: detect(model, images, label=name, **options) for name in classes}


def least_likely(images: ImageSet, scores: torch.Tensor, path: str | Path) -> Path:
    """A contact sheet of the least likely images, the unlikeliest first."""
    order = scores.argsort()[: min(SHOWN, len(scores))]
    return contact_sheet(ImageSet(images.images[order]), path)


def _belongs(
    images: ImageSet, inliers: Sequence[str], label: int | str | None, model: Synthesizer
) -> torch.Tensor | None:
    """Which images are inliers; None where that is not known."""
    names = list(inliers)
    if not names and label is not None and images.labelled:
        name = label if isinstance(label, str) else model._fitted().classes[label]
        names = [name] if name in images.classes else []
    if not names:
        return None
    if images.labels is None:
        raise DataError("inliers are classes, and these images have no labels")
    for name in names:
        if name not in images.classes:
            raise DataError(f"the images have no class {name!r}; there are {', '.join(images.classes)}")
    belongs = torch.isin(images.labels, torch.tensor([list(images.classes).index(name) for name in names]))
    if belongs.all() or not belongs.any():
        raise DataError("AUROC needs inliers and outliers, and all images are of one kind; leave out the inliers")
    return belongs


def _draw(parts: dict[str, torch.Tensor], threshold: float, path: Path) -> Path:
    """Histograms of equal area over one axis. Its left end leaves out the unlikeliest hundredth, which may be far."""
    everything = torch.cat(list(parts.values()))
    low, high = float(everything.quantile(0.01)), float(everything.max())
    edges = np.linspace(min(low, threshold), max(high, low + 1e-6, threshold + 1e-6), BINS + 1)
    heights = {
        name: np.histogram(np.clip(scores.numpy(), edges[0], None), edges)[0] / max(1, len(scores))
        for name, scores in parts.items()
    }
    most = max(float(values.max()) for values in heights.values())
    picture = Image.new("RGB", (WIDE + 2 * EDGE, HIGH + 2 * EDGE), "white")
    draw = ImageDraw.Draw(picture)
    font, _ = _font()
    step = WIDE / BINS
    for number, (name, values) in enumerate(heights.items()):
        corners = [(EDGE, EDGE + HIGH)]
        for place, value in enumerate(values):
            level = EDGE + HIGH - HIGH * float(value) / most
            corners += [(EDGE + int(place * step), int(level)), (EDGE + int((place + 1) * step), int(level))]
        corners.append((EDGE + WIDE, EDGE + HIGH))
        if name == "synthetic":
            draw.polygon(corners, fill=COLOURS[name])
        else:
            draw.line(corners, fill=COLOURS[name], width=2)
        draw.text((EDGE + 6, EDGE + 18 * number), name, fill=COLOURS[name], font=font)
    at = EDGE + int(WIDE * (threshold - edges[0]) / (edges[-1] - edges[0]))
    draw.line([(at, EDGE), (at, EDGE + HIGH)], fill="black", width=2)
    draw.text((at + 5, EDGE // 2), f"threshold {threshold:.4g}", fill="black", font=font)
    for place, anchor in ((EDGE, "lt"), (EDGE + WIDE, "rt")):
        value = edges[0] if place == EDGE else edges[-1]
        draw.text((place, EDGE + HIGH + 6), f"{value:.4g}", fill="black", font=font, anchor=anchor)
    with replacing(path, overwrite=True) as partial:
        picture.save(partial, "png")
    return path
