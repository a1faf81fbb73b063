"""Measures of a synthetic set: what a classifier learns from it, and how close it is to real images."""

from sfumato.evaluate.classifiers import (
    ANNEALED,
    CLASSIFIERS,
    Accuracy,
    Recipe,
    aligned,
    check_comparable,
    downstream_accuracy,
)
from sfumato.evaluate.evaluation import (
    PROFILES,
    PrivateMeasurementWarning,
    compare,
    evaluate,
    measure_private,
    summary,
)
from sfumato.evaluate.fidelity import fidelity
from sfumato.evaluate.ood import Detection, detect, detect_each, least_likely

__all__ = [
    "ANNEALED",
    "CLASSIFIERS",
    "PROFILES",
    "Accuracy",
    "Detection",
    "PrivateMeasurementWarning",
    "Recipe",
    "aligned",
    "check_comparable",
    "compare",
    "detect",
    "detect_each",
    "downstream_accuracy",
    "evaluate",
    "fidelity",
    "least_likely",
    "measure_private",
    "summary",
]
