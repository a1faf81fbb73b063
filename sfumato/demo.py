"""The embedded default: a whole `synth` on real images that are at hand."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from sfumato.data import find_named, load_images
from sfumato.methods.registry import create
from sfumato.synth import Synthesis, check_output, synthesize


def run_demo(folder: Path, epsilon: float | None = None) -> Synthesis:
    """Fashion-MNIST where it is found, else scikit-learn's digits; at most 3 minutes on two cores.

    The digits are some 1,400 images: to hide one among so few and leave anything to see takes a larger epsilon.
    """
    large = find_named("fashion-mnist") is not None
    name, number = ("fashion-mnist", 10_000) if large else ("digits", 5_000)
    model = create("dp-merf", epsilon=epsilon if epsilon is not None else (1.0 if large else 4.0), steps=1000)
    check_output(folder)
    return synthesize(model, load_images(name), folder, number=number, test=load_images(name, split="test"))


def free_folder() -> Path:
    """demo, or the first of demo-2, demo-3, … that is not there yet: a second run takes nothing from the first."""
    names = (Path("demo" if number == 1 else f"demo-{number}") for number in count(1))
    return next(path for path in names if not path.exists())
