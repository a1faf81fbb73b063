"""Demo: run `synthesize` on public images with default settings."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from sfumato.data import find_named, load_images
from sfumato.methods.registry import create
from sfumato.synthesize import Synthesis, check_output, synthesize


def run_demo(folder: Path, epsilon: float | None = None) -> Synthesis:
    """Synthesize Fashion-MNIST if it is on this machine, or else scikit-learn's digits.

    This takes about 3 minutes on two cores. The default epsilon is 1 for Fashion-MNIST and 4 for the digits, because
    1,400 images need a larger one.
    """
    has_fashion = find_named("fashion-mnist") is not None
    name, number, default_epsilon = ("fashion-mnist", 10_000, 1.0) if has_fashion else ("digits", 5_000, 4.0)
    model = create("dp-merf", epsilon=default_epsilon if epsilon is None else epsilon, steps=1000)
    check_output(folder)
    test = load_images(name, split="test")
    return synthesize(model, load_images(name), folder, number=number, test=test, show_test=True)


def unused_folder() -> Path:
    """Return the first of demo, demo-2, demo-3, … that does not exist."""
    names = (Path("demo" if number == 1 else f"demo-{number}") for number in count(1))
    return next(path for path in names if not path.exists())
