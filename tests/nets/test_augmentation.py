"""Augmentation: each operation, its range, gradients, and parameters per class."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.nets.augmentation import OPERATIONS, Augmentation, draw_augmentation, small_affine_warp

SIZE = (32, 24)
IDENTITY = [0.0, 1, 1, 1, 0, 0, 0, 1, 0, -999, -999]


@pytest.fixture
def images(few_digits: ImageSet) -> torch.Tensor:
    tall = (few_digits.images[:8].float() / 127.5 - 1).repeat(1, 3, 4, 3)
    return tall + torch.tensor([0.0, -0.1, 0.1]).view(3, 1, 1) * (tall > 0)


def parameters(count: int, **columns: float) -> Augmentation:
    """Return the identity with some columns replaced; the keys are c0, c1, …"""
    table = torch.tensor(IDENTITY).repeat(count, 1)
    for name, value in columns.items():
        table[:, int(name[1:])] = value
    return Augmentation(table)


CHANGES = {
    "brightness": {"c0": 0.3}, "saturation": {"c1": 0.2}, "contrast": {"c2": 1.4}, "scale": {"c3": 1.15, "c7": 1.15},
    "mirror": {"c3": -1.0}, "shift": {"c5": 4 / 24}, "cutout": {"c9": 16, "c10": 12},
    "rotation": {"c3": math.cos(0.2), "c4": -math.sin(0.2), "c6": math.sin(0.2), "c7": math.cos(0.2)},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_operation_changes_images_and_has_gradients(name: str, images: torch.Tensor) -> None:
    pixels = images.clone().requires_grad_(True)
    changed = parameters(len(images), **CHANGES[name])(pixels)
    assert changed.shape == images.shape
    assert (changed - images).abs().max() > 0.05
    changed.sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.abs().sum() > 0
    if name not in ("brightness", "contrast", "saturation"):
        assert changed.min() >= -1 - 1e-5
        assert changed.max() <= images.max() + 1e-5


def test_identity_preserves_images(images: torch.Tensor) -> None:
    assert torch.allclose(parameters(len(images))(images), images, atol=1e-5)


def test_mirror_shift_and_cutout(images: torch.Tensor) -> None:
    height, width = SIZE
    assert torch.allclose(parameters(len(images), c3=-1)(images), images.flip(3), atol=1e-5)
    shifted = parameters(len(images), c8=4 / height)(images)
    assert torch.allclose(shifted[:, :, :-2], images[:, :, 2:], atol=1e-5)
    assert (shifted[:, :, -2:] == -1).all()
    cut = parameters(len(images), c9=height // 2, c10=width // 2)(images)
    assert (cut[:, :, height // 2, width // 2] == -1).all()
    assert (cut[:, :, height // 4, width // 4] == -1).all()
    assert torch.allclose(cut[:, :, 0], images[:, :, 0], atol=1e-5)


def operations(drawn: Augmentation) -> torch.Tensor:
    """Return which operation each row contains, [operations, n]."""
    table = drawn.table
    rotated = table[:, 4] != 0
    return torch.stack(
        [
            (table[:, :3] != torch.tensor(IDENTITY[:3])).any(1),
            (table[:, [5, 8]] != 0).any(1),
            (table[:, 9:] >= 0).all(1),
            (table[:, 7] != 1) & ~rotated,
            rotated,
            table[:, 3] < 0,
        ]
    )


def test_every_image_has_at_most_one_operation_and_all_operations_occur() -> None:
    count = 600
    drawn = draw_augmentation(count, SIZE, torch.Generator().manual_seed(0))
    active = operations(drawn)
    assert (active.sum(0) <= 1).all()
    assert (active.sum(1) > count / len(OPERATIONS) / 4).all()
    assert (active.sum(0) == 0).sum() < count / 6  # mirroring is applied to half of the images that draw it
    assert (drawn.table[:, [5, 8]].abs() / 2 <= 0.125).all()
    assert (drawn.table[:, 9] < SIZE[0]).all()
    assert (drawn.table[:, 10] < SIZE[1]).all()


def test_same_operation() -> None:
    for seed in range(12):
        drawn = draw_augmentation(50, SIZE, torch.Generator().manual_seed(seed), same_operation=True)
        assert operations(drawn).any(1).sum() == 1


def test_rotation_preserves_a_disc_in_rectangular_images() -> None:
    rows, columns = (torch.arange(size) - (size - 1) / 2 for size in SIZE)
    disc = torch.sigmoid(9 - torch.hypot(rows[:, None], columns)).repeat(200, 1, 1, 1) * 2 - 1
    drawn = draw_augmentation(200, SIZE, torch.Generator().manual_seed(0))
    rotated = operations(drawn)[4]
    assert rotated.sum() > 10
    assert (drawn(disc)[rotated] - disc[rotated]).abs().mean() < 0.01  # 0.03 without the correction of the aspect ratio


def test_images_of_a_class_share_parameters(images: torch.Tensor) -> None:
    """Condensation uses the same operation for the real and the synthetic images of a class."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    by_class = draw_augmentation(3, SIZE, torch.Generator().manual_seed(1))
    batch = by_class[labels](images)
    for index in range(len(images)):
        single = by_class[labels[index : index + 1]](images[index : index + 1])
        assert torch.allclose(batch[index : index + 1], single, atol=1e-5)


def test_no_mirroring_without_flip() -> None:
    drawn = draw_augmentation(500, SIZE, torch.Generator().manual_seed(0), flip=False)
    assert not operations(drawn)[5].any()


def test_small_affine_warp() -> None:
    square = -torch.ones(200, 1, 24, 40)
    square[:, :, 8:16, 16:24] = 1.0
    square[:, :, :, :6] = 0.5  # a border, which is repeated outside
    generator = torch.Generator().manual_seed(0)
    assert torch.allclose(small_affine_warp(square, generator, 0.0), square, atol=1e-5)
    warped = small_affine_warp(square, generator)
    assert warped.shape == square.shape
    assert warped.abs().max() <= 1
    assert len(warped.unique(dim=0)) == len(warped)
    ink = (warped[:, 0, :, 12:] + 1) / 2
    centre = (ink.sum(1) * torch.arange(28)).sum(1) / ink.sum((1, 2))
    assert 0.5 < float((centre - centre.mean()).abs().max()) < 0.05 * 40 + 2.5  # shift, and rotation about the centre
    assert (warped[:, 0, 12, 0] > 0.3).all()  # the bright border is repeated; no black enters
