"""Out-of-distribution detection: find images that differ from those that a model was fitted on.

An image is flagged if its log-likelihood is below a threshold. The threshold is a quantile of the scores of *synthetic*
images, at the chosen false alarm rate. No private image is used again, so the detector and its threshold are as public
as the model. Scores, AUROC and rates describe the scored images, which may be private themselves.

The false alarm rate holds for synthetic images. Real inliers are somewhat less likely than synthetic images, so more of
them are flagged. If labels are given, the rate among real inliers is reported.
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
from sfumato.data.atomic import replacing, write_json
from sfumato.data.grid import load_font
from sfumato.methods.base import Synthesizer

SAMPLES = 2000  # synthetic images that define the threshold
MAX_SHOWN = 100  # images on the contact sheet of the least likely
BINS = 60
PLOT_WIDTH, PLOT_HEIGHT, MARGIN = 720, 300, 40  # pixels
COLOURS = {"images": "#4477aa", "inliers": "#4477aa", "outliers": "#ee6677", "synthetic": "#bbbbbb"}


@dataclass(frozen=True)
class Detection:
    """Result of out-of-distribution detection.

    - scores: log-likelihood of each image.
    - synthetic: log-likelihood of each synthetic image.
    - threshold: images with a lower score are flagged.
    - inliers: whether each image is an inlier; None if unknown.
    """

    scores: torch.Tensor
    synthetic: torch.Tensor
    threshold: float
    inliers: torch.Tensor | None

    @property
    def flagged(self) -> torch.Tensor:
        """Whether the score of each image is below the threshold."""
        return self.scores < self.threshold

    @property
    def auroc(self) -> float | None:
        """Probability that an inlier scores higher than an outlier; None if the inliers are unknown."""
        if self.inliers is None:
            return None
        return float(roc_auc_score(self.inliers.numpy(), self.scores.numpy()))

    def to_dict(self) -> dict[str, Any]:
        """Return all results and the score of each image, ready for JSON."""
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
        """Draw a histogram of the scores of real and synthetic images, with the threshold, as PNG."""
        parts = {"images": self.scores}
        if self.inliers is not None:
            parts = {"inliers": self.scores[self.inliers], "outliers": self.scores[~self.inliers]}
        return _draw_histograms({"synthetic": self.synthetic, **parts}, self.threshold, Path(path))


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
    """Score `images` with a fitted model and flag the unlikely ones.

    - label: score as images of this class; None: of all classes, weighted by their shares.
    - inliers: classes of `images` that are inliers; all others are outliers. Default: the class of `label`, if
      `images` have it.
    - false_alarms: share of synthetic images below the threshold, between 0 and 1.
    - samples: number of synthetic images that define the threshold.
    - seed: seed of the synthetic images.
    - options: parameters of the model that may change after `fit`.
    """
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must lie strictly between 0 and 1, got {false_alarms!r}")
    mask = _inlier_mask(images, inliers, label, model)
    scores = model.score(images, label=label, **options)
    drawn = model.sample(samples, labels=label, seed=seed, **options)
    synthetic = model.score(drawn, label=label, **options)
    return Detection(scores, synthetic, float(synthetic.quantile(false_alarms)), mask)


def detect_each(model: Synthesizer, images: ImageSet, **options: Any) -> dict[str, Detection]:
    """Run `detect` for each class of the model, with all other classes as outliers (DP-LFlow, Table 3)."""
    classes = model._fitted().classes
    if not images.labelled or (missing := sorted(set(classes) - set(images.classes))):
        raise DataError(
            "detection of each class needs images with labels of the model's classes"
            + (f"; {missing[0]!r} is not among them" if images.labelled else "")
        )
    return {name: detect(model, images, label=name, **options) for name in classes}


def write_detections(images: ImageSet, found: dict[str, Detection], folder: Path) -> None:
    """Write scores.json, and a histogram and a contact sheet of the least likely images for each detection."""
    for number, detection in enumerate(found.values(), 1):
        suffix = f"_{number}" if len(found) > 1 else ""
        detection.histogram(folder / f"scores{suffix}.png")
        least_likely(images, detection.scores, folder / f"least_likely{suffix}.png")
    write_json(folder / "scores.json", {name: detection.to_dict() for name, detection in found.items()})


def least_likely(images: ImageSet, scores: torch.Tensor, path: str | Path) -> Path:
    """Draw a contact sheet of the images with the lowest scores, in ascending order."""
    order = scores.argsort()[:MAX_SHOWN]
    return contact_sheet(ImageSet(images.images[order]), path)


def _inlier_mask(
    images: ImageSet, inliers: Sequence[str], label: int | str | None, model: Synthesizer
) -> torch.Tensor | None:
    """Return whether each image is an inlier, or None if that is unknown."""
    names = list(inliers)
    if not names and label is not None and images.labelled:
        name = label if isinstance(label, str) else model._fitted().classes[label]
        names = [name] if name in images.classes else []
    if not names:
        return None
    if images.labels is None:
        raise DataError("inliers are given as classes, but these images have no labels")
    for name in names:
        if name not in images.classes:
            raise DataError(f"the images have no class {name!r}; there are {', '.join(images.classes)}")
    mask = torch.isin(images.labels, torch.tensor([list(images.classes).index(name) for name in names]))
    if mask.all() or not mask.any():
        raise DataError("AUROC needs both inliers and outliers; leave out the inliers or add images of other classes")
    return mask


def _draw_histograms(parts: dict[str, torch.Tensor], threshold: float, path: Path) -> Path:
    """Draw normalised histograms over one axis, which starts at the 1 % quantile because outliers can be far away."""
    all_scores = torch.cat(list(parts.values()))
    low, high = float(all_scores.quantile(0.01)), float(all_scores.max())
    edges = np.linspace(min(low, threshold), max(high, low + 1e-6, threshold + 1e-6), BINS + 1)
    heights = {
        name: np.histogram(np.clip(scores.numpy(), edges[0], None), edges)[0] / max(1, len(scores))
        for name, scores in parts.items()
    }
    highest = max(float(values.max()) for values in heights.values())
    picture = Image.new("RGB", (PLOT_WIDTH + 2 * MARGIN, PLOT_HEIGHT + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    font, _ = load_font()
    step = PLOT_WIDTH / BINS
    for number, (name, values) in enumerate(heights.items()):
        outline = [(MARGIN, MARGIN + PLOT_HEIGHT)]
        for place, value in enumerate(values):
            level = MARGIN + PLOT_HEIGHT - PLOT_HEIGHT * float(value) / highest
            outline += [(MARGIN + int(place * step), int(level)), (MARGIN + int((place + 1) * step), int(level))]
        outline.append((MARGIN + PLOT_WIDTH, MARGIN + PLOT_HEIGHT))
        if name == "synthetic":
            draw.polygon(outline, fill=COLOURS[name])
        else:
            draw.line(outline, fill=COLOURS[name], width=2)
        draw.text((MARGIN + 6, MARGIN + 18 * number), name, fill=COLOURS[name], font=font)
    threshold_x = MARGIN + int(PLOT_WIDTH * (threshold - edges[0]) / (edges[-1] - edges[0]))
    draw.line([(threshold_x, MARGIN), (threshold_x, MARGIN + PLOT_HEIGHT)], fill="black", width=2)
    draw.text((threshold_x + 5, MARGIN // 2), f"threshold {threshold:.4g}", fill="black", font=font)
    for place, anchor in ((MARGIN, "lt"), (MARGIN + PLOT_WIDTH, "rt")):
        value = edges[0] if place == MARGIN else edges[-1]
        draw.text((place, MARGIN + PLOT_HEIGHT + 6), f"{value:.4g}", fill="black", font=font, anchor=anchor)
    with replacing(path, overwrite=True) as partial:
        picture.save(partial, "png")
    return path
