"""Augmentation: in range, differentiable, repeatable, shared when asked for."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.nets.augmentation import OPERATIONS, Augmentation, draw_augmentation, moved

SIZE = (32, 24)
REST = [0.0, 1, 1, 1, 0, 0, 0, 1, 0, -999, -999]


@pytest.fixture
def images(few_digits: ImageSet) -> torch.Tensor:
    tall = (few_digits.images[:8].float() / 127.5 - 1).repeat(1, 3, 4, 3)
    return tall + torch.tensor([0.0, -0.1, 0.1]).view(3, 1, 1) * (tall > 0)


def strengths(count: int, **columns: float) -> Augmentation:
    """At rest, but for some columns (by number, after a letter)."""
    table = torch.tensor(REST).repeat(count, 1)
    for name, value in columns.items():
        table[:, int(name[1:])] = value
    return Augmentation(table)


CHANGES = {
    "brightness": {"c0": 0.3}, "saturation": {"c1": 0.2}, "contrast": {"c2": 1.4}, "scale": {"c3": 1.15, "c7": 1.15},
    "mirror": {"c3": -1.0}, "shift": {"c5": 4 / 24}, "cutout": {"c9": 16, "c10": 12},
    "rotation": {"c3": math.cos(0.2), "c4": -math.sin(0.2), "c6": math.sin(0.2), "c7": math.cos(0.2)},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_operation_changes_images_and_passes_gradients(name: str, images: torch.Tensor) -> None:
    pixels = images.clone().requires_grad_(True)
    changed = strengths(len(images), **CHANGES[name])(pixels)
    assert changed.shape == images.shape
    assert (changed - images).abs().max() > 0.05
    changed.sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.abs().sum() > 0
    if name not in ("brightness", "contrast", "saturation"):
        assert changed.min() >= -1 - 1e-5
        assert changed.max() <= images.max() + 1e-5


def test_operations_at_rest_change_nothing(images: torch.Tensor) -> None:
    assert torch.allclose(strengths(len(images))(images), images, atol=1e-5)


def test_mirror_shift_and_cutout_do_what_they_say(images: torch.Tensor) -> None:
    height, width = SIZE
    assert torch.allclose(strengths(len(images), c3=-1)(images), images.flip(3), atol=1e-5)
    shifted = strengths(len(images), c8=4 / height)(images)
    assert torch.allclose(shifted[:, :, :-2], images[:, :, 2:], atol=1e-5)
    assert (shifted[:, :, -2:] == -1).all()
    cut = strengths(len(images), c9=height // 2, c10=width // 2)(images)
    assert (cut[:, :, height // 2, width // 2] == -1).all()
    assert (cut[:, :, height // 4, width // 4] == -1).all()
    assert torch.allclose(cut[:, :, 0], images[:, :, 0], atol=1e-5)


def operations(drawn: Augmentation) -> torch.Tensor:
    """Which of the operations each row has: [operations, n]."""
    table = drawn.table
    turned = table[:, 4] != 0
    return torch.stack(
        [
            (table[:, :3] != torch.tensor(REST[:3])).any(1),
            (table[:, [5, 8]] != 0).any(1),
            (table[:, 9:] >= 0).all(1),
            (table[:, 7] != 1) & ~turned,
            turned,
            table[:, 3] < 0,
        ]
    )


def test_every_image_gets_one_operation_and_every_operation_occurs() -> None:
    count = 600
    drawn = draw_augmentation(count, SIZE, torch.Generator().manual_seed(0))
    active = operations(drawn)
    assert (active.sum(0) <= 1).all()
    assert (active.sum(1) > count / len(OPERATIONS) / 4).all()
    assert (active.sum(0) == 0).sum() < count / 6  # half of the mirrored ones stay as they are
    assert (drawn.table[:, [5, 8]].abs() / 2 <= 0.125).all()
    assert (drawn.table[:, 9] < SIZE[0]).all()
    assert (drawn.table[:, 10] < SIZE[1]).all()


def test_one_operation_for_a_whole_batch() -> None:
    for seed in range(12):
        drawn = draw_augmentation(50, SIZE, torch.Generator().manual_seed(seed), together=True)
        assert operations(drawn).any(1).sum() == 1


def test_turning_keeps_shapes_of_images_that_are_not_square() -> None:
    """A disc stays one."""
    rows, columns = (torch.arange(size) - (size - 1) / 2 for size in SIZE)
    disc = torch.sigmoid(9 - torch.hypot(rows[:, None], columns)).repeat(200, 1, 1, 1) * 2 - 1
    drawn = draw_augmentation(200, SIZE, torch.Generator().manual_seed(0))
    turned = operations(drawn)[4]
    assert turned.sum() > 10
    assert (drawn(disc)[turned] - disc[turned]).abs().mean() < 0.01  # .03 if it were turned in PyTorch's coordinates


def test_images_of_a_class_are_treated_alike(images: torch.Tensor) -> None:
    """As condensation needs it: one operation per class, for real and synthetic images."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    by_class = draw_augmentation(3, SIZE, torch.Generator().manual_seed(1))
    whole = by_class[labels](images)
    for index in range(len(images)):
        alone = by_class[labels[index : index + 1]](images[index : index + 1])
        assert torch.allclose(whole[index : index + 1], alone, atol=1e-5)


def test_digits_need_not_be_flipped() -> None:
    drawn = draw_augmentation(500, SIZE, torch.Generator().manual_seed(0), flip=False)
    assert not operations(drawn)[5].any()


def test_images_are_moved_a_little_each_in_its_own_way() -> None:
    disc = -torch.ones(200, 1, 24, 40)
    disc[:, :, 8:16, 16:24] = 1.0
    disc[:, :, :, :6] = 0.5  # a border that goes on outside
    generator = torch.Generator().manual_seed(0)
    assert torch.allclose(moved(disc, generator, 0.0), disc, atol=1e-5)
    made = moved(disc, generator)
    assert made.shape == disc.shape
    assert made.abs().max() <= 1
    assert len(made.unique(dim=0)) == len(made)
    ink = (made[:, 0, :, 12:] + 1) / 2
    place = (ink.sum(1) * torch.arange(28)).sum(1) / ink.sum((1, 2))
    assert 0.5 < float((place - place.mean()).abs().max()) < 0.05 * 40 + 2.5, "shifts, and turns about the middle"
    assert (made[:, 0, 12, 0] > 0.3).all(), "no black comes in where the border is bright"
