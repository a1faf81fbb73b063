"""Evaluate synthetic images: utility for classifiers, fidelity to real images, out-of-distribution detection."""

from sfumato.evaluate.dpimagebench import bench_accuracy
from sfumato.evaluate.fidelity import fidelity
from sfumato.evaluate.ood import Detection, detect, detect_each, least_likely, write_detections
from sfumato.evaluate.protocol import (
    PROFILES,
    PrivateMeasurementWarning,
    compare,
    evaluate,
    measure_private,
    summary,
)
from sfumato.evaluate.utility import (
    ANNEALED,
    CLASSIFIERS,
    Accuracy,
    Recipe,
    aligned,
    check_comparable,
    downstream_accuracy,
)

__all__ = [
    "ANNEALED",
    "CLASSIFIERS",
    "PROFILES",
    "Accuracy",
    "Detection",
    "PrivateMeasurementWarning",
    "Recipe",
    "aligned",
    "bench_accuracy",
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
    "write_detections",
]
