"""Fixtures of small real images: scikit-learn's digits as arrays, as a set and as a folder of PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from sfumato.data import ImageSet

_BUNCH = load_digits()
_PIXELS = np.round(_BUNCH.images[:60] * (255 / 16)).astype(np.uint8)
_LABELS = _BUNCH.target[:60].astype(np.int64)


@pytest.fixture
def pixels() -> np.ndarray:
    """Sixty digits, uint8 [60, 8, 8]."""
    return _PIXELS.copy()


@pytest.fixture
def targets() -> np.ndarray:
    return _LABELS.copy()


@pytest.fixture
def digits(pixels: np.ndarray, targets: np.ndarray) -> ImageSet:
    return ImageSet.from_arrays(pixels, targets, 10)


@pytest.fixture
def class_folder(tmp_path: Path, pixels: np.ndarray) -> Path:
    """Two classes, two images each: a/0.png, a/1.png, b/0.png, b/1.png hold digits 0, 1, 2, 3."""
    folder = tmp_path / "scans"
    for index, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index]).save(path)
    return folder
