"""Augmentation: in range, differentiable, repeatable, shared when asked for."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.nets import augmentation
from sfumato.nets.augmentation import augment


@pytest.fixture
def images(few_digits: ImageSet) -> torch.Tensor:
    return (few_digits.images[:8].float() / 127.5 - 1).repeat(1, 3, 4, 4)


@pytest.mark.parametrize("name", ["colour", "crop", "cutout", "mirror", "scale", "rotate"])
def test_each_operation_changes_images_and_passes_gradients(name: str, images: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = images.clone().requires_grad_(True)
    changed = getattr(augmentation, name)(pixels, lambda: torch.rand(len(images), generator=generator))
    assert changed.shape == images.shape
    assert not torch.equal(changed, images)
    changed.sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.abs().sum() > 0
    if name != "colour":
        assert changed.min() >= -1 - 1e-5
        assert changed.max() <= 1 + 1e-5


def test_operations_at_rest_change_nothing(images: torch.Tensor) -> None:
    half = torch.full((len(images),), 0.5)
    for name in ("crop", "scale", "rotate"):
        assert torch.allclose(getattr(augmentation, name)(images, lambda: half), images, atol=1e-5)
    assert torch.equal(augmentation.mirror(images, lambda: half), images)


def test_the_same_state_gives_the_same_parameters(images: torch.Tensor) -> None:
    """As condensation needs it: real and synthetic images are treated alike."""
    for seed in range(12):
        one = augment(images, torch.Generator().manual_seed(seed), shared=True)
        other = augment(images[:3], torch.Generator().manual_seed(seed), shared=True)
        assert torch.allclose(one[:3], other, atol=1e-5)


def test_digits_need_not_be_flipped(images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("flipped")

    monkeypatch.setattr(augmentation, "mirror", refuse)
    for seed in range(30):
        augment(images, torch.Generator().manual_seed(seed), flip=False)
