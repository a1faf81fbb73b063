"""Real small images for all tests: scikit-learn's digits."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import ImageSet, load_images

torch.set_num_threads(1)  # the data are small: threads would only wait for each other


@pytest.fixture(scope="session")
def digits() -> ImageSet:
    return load_images("digits")


@pytest.fixture(scope="session")
def few_digits(digits: ImageSet) -> ImageSet:
    """Sixty images of three classes and one of a fourth, at the end."""
    assert digits.labels is not None
    index = torch.cat([(digits.labels == c).nonzero()[:n, 0] for c, n in enumerate((20, 20, 20, 1))])
    return ImageSet(digits.images[index], digits.labels[index], digits.classes[:4])
