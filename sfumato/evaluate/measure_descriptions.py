"""Describe each measure in words; compare a value with guessing and with real images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CLASSIFIER_NAMES = {
    "logistic": "logistic regression",
    "mlp": "MLP",
    "small_cnn": "small CNN",
    "convnet": "ConvNet",
    "resnet18": "ResNet-18",
    "convolutional": "convolutional classifiers",
}
HARDLY, PARTLY, MOSTLY = 0.1, 0.5, 0.8  # shares of the way from chance to real images


@dataclass(frozen=True)
class Description:
    """Describes a measure: its name, what it says, and which values are good."""

    title: str
    text: str
    good: str


ACCURACY = Description(
    "accuracy",
    "Share of real test images that a classifier recognises after training on the synthetic images only.",
    "near that of real images; at chance level nothing was learned",
)
FIDELITY = {
    "precision": Description(
        "precision", "Share of synthetic images that lie among real ones.", "near 1; 0: no image looks real"
    ),
    "recall": Description(
        "recall", "Share of real images that lie among synthetic ones.", "near 1; 0: the variety of real images is lost"
    ),
    "density": Description(
        "density", "How densely real images surround a synthetic one.", "near 1; 0: no image looks real"
    ),
    "coverage": Description(
        "coverage", "Share of real images with a synthetic one nearby.", "near 1; 0: the variety is lost"
    ),
    "fd": Description(
        "Fréchet distance", "Distance between the feature statistics of synthetic and real images.", "lower; 0 is equal"
    ),
    "fid": Description("FID", "Fréchet distance in features of the 2015 Inception network.", "lower; 0 is equal"),
    "kd": Description(
        "kernel distance", "Distance between the feature distributions, without bias.", "lower; about 0 is equal"
    ),
    "kid": Description("KID", "Kernel distance in features of the 2015 Inception network.", "lower; about 0 is equal"),
    "inception": Description(
        "Inception Score", "How distinct and varied the images are for a photo classifier.", "higher; compare with real"
    ),
}


def description_of(measure: str) -> Description:
    """Return the description of a measure by its name in a result: a classifier, or a measure of fidelity."""
    return FIDELITY.get(measure.split("_")[0], ACCURACY)


def chance_level(confusion: list[list[int]]) -> float:
    """Return the accuracy in percent of always guessing the most frequent class of the test images."""
    rows = [sum(row) for row in confusion]
    return 100 * max(rows) / max(sum(rows), 1)


def chance_of(metrics: dict[str, Any]) -> float | None:
    """Return the chance level of a result, or None without a classifier."""
    found = (entry["confusion"] for entry in metrics.get("utility", {}).values() if "confusion" in entry)
    return next((chance_level(confusion) for confusion in found), None)


def judge_accuracy(accuracy: float, chance: float, real: float | None = None) -> str:
    """Say in a few words how good an accuracy is. `real`: accuracy with real training images, if it is known."""
    best = 100.0 if real is None else real
    share = (accuracy - chance) / max(best - chance, 1e-9)
    if share < HARDLY:
        return "hardly better than guessing"
    if share < PARTLY:
        return "a part of the signal is there"
    if share < MOSTLY:
        return "useful, with a clear loss" if real is not None else "useful"
    return "close to real images" if real is not None else "good"
