"""Measures of a synthetic set: what a classifier learns from it."""

from sfumato.evaluate.classifiers import Accuracy, aligned, downstream_accuracy

__all__ = ["Accuracy", "aligned", "downstream_accuracy"]
