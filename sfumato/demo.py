"""The embedded default: a whole `synth` on real images that are at hand."""

from __future__ import annotations

from pathlib import Path

from sfumato.data import find_named, load_images
from sfumato.methods.registry import create
from sfumato.synth import Synthesis, check_output, synthesize


def run_demo(folder: Path, epsilon: float | None = None) -> Synthesis:
    """Fashion-MNIST where it is found, else scikit-learn's digits; at most 3 minutes on two cores.

    The digits are 1,437 images: one image in so few needs a larger epsilon to leave anything to see.
    """
    large = find_named("fashion-mnist") is not None
    name = "fashion-mnist" if large else "digits"
    budget = epsilon if epsilon is not None else (1.0 if large else 4.0)
    model = create("dp-merf", epsilon=budget)
    check_output(folder)
    return synthesize(
        model, load_images(name), folder, number=10_000 if large else 5_000, test=load_images(name, split="test")
    )
