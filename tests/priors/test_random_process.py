"""Procedural images: all processes, sizes, seeds, and nothing degenerate."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.priors import random_process as module
from sfumato.priors.random_process import PROCESSES, SHARES, random_process


@pytest.fixture(scope="module")
def drawn() -> ImageSet:
    return random_process(80, 16, seed=0)


@pytest.mark.parametrize("size", [16, 28, 33, 64])
def test_images_are_bytes_in_colour_of_the_asked_size(size: int) -> None:
    images = random_process(12, size, seed=1)
    assert images.images.dtype == torch.uint8
    assert images.images.shape == (12, 3, size, size)
    assert images.classes == PROCESSES
    assert images.labels is not None
    assert images.labels.shape == (12,)


def test_the_seed_decides(drawn: ImageSet) -> None:
    state = torch.get_rng_state()
    again, other = random_process(80, 16, seed=0), random_process(80, 16, seed=1)
    assert drawn.labels is not None
    assert again.labels is not None
    assert torch.equal(again.images, drawn.images)
    assert torch.equal(again.labels, drawn.labels)
    assert not torch.equal(other.images, drawn.images)
    assert torch.equal(torch.get_rng_state(), state)


def test_all_processes_are_present_in_their_shares(drawn: ImageSet) -> None:
    """Of 80 images, each count is within 5 standard deviations: fails with probability below one in 100,000."""
    assert drawn.labels is not None
    counts = drawn.labels.bincount(minlength=len(PROCESSES))
    assert sum(SHARES) == pytest.approx(1)
    for count, share in zip(counts.tolist(), SHARES, strict=True):
        assert count > 0
        assert abs(count - 80 * share) < 5 * math.sqrt(80 * share * (1 - share))


def test_images_differ_and_have_contrast_and_colour(drawn: ImageSet) -> None:
    assert len({image.numpy().tobytes() for image in drawn.images}) == 80
    assert drawn.labels is not None
    for process in range(len(PROCESSES)):
        images = drawn.images[drawn.labels == process].float()
        assert images.std((1, 2, 3)).median() > 10, PROCESSES[process]
        assert images.mean((1, 2, 3)).std() > 10, PROCESSES[process]  # any brightness
        assert (images - images.mean(1, keepdim=True)).abs().mean() > 2, PROCESSES[process]  # colour
        assert (images.diff(dim=3).abs().mean() < 0.8 * white_noise(images)).all(), PROCESSES[process]  # structure


def white_noise(images: torch.Tensor) -> torch.Tensor:
    """Return the mean difference of neighbouring pixels, were these in random order."""
    order = torch.randperm(images[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    return images.flatten(2)[:, :, order].view_as(images).diff(dim=3).abs().mean()


@pytest.mark.parametrize("process", range(len(PROCESSES)))
def test_each_process_draws_finite_images(process: int) -> None:
    drawn = module._DRAW[process](6, 20, torch.Generator().manual_seed(0))
    assert drawn.shape == (6, 3, 20, 20)
    assert drawn.isfinite().all()
    assert torch.pdist(drawn.flatten(1)).min() > 0.1


def test_blocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    images = random_process(20, 16, seed=0)
    assert len(images) == 20
    assert len({image.numpy().tobytes() for image in images.images}) == 20
