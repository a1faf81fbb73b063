"""Procedural images for pre-training: range, variation, smoothness, reproducibility."""

from __future__ import annotations

import pytest
import torch

from sfumato.data.procedural import random_pictures


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 20, 30)])
def test_images_vary_are_smooth_and_reproducible(shape: tuple[int, int, int]) -> None:
    images = random_pictures(200, shape, torch.Generator().manual_seed(0))
    assert images.shape == (200, *shape)
    assert -1 <= float(images.min()) < -0.9 < 0.9 < float(images.max()) <= 1
    assert torch.equal(images, random_pictures(200, shape, torch.Generator().manual_seed(0)))
    assert float(images.std(0).mean()) > 0.5  # variation between images
    neighbours = (images[..., 1:] - images[..., :-1]).abs().mean()
    assert float(neighbours) < 0.3 * float((images[1:] - images[:-1]).abs().mean())  # smooth within an image
