"""Downstream accuracy: learns from real digits, refuses sets that cannot be compared."""

from __future__ import annotations

import pytest
import torch

from sfumato.data import DataError, ImageSet, load_images
from sfumato.evaluate import Accuracy, aligned, downstream_accuracy


def test_real_digits_teach_real_digits(digits: ImageSet) -> None:
    test = load_images("digits", split="test")
    accuracy = downstream_accuracy(digits, test, seeds=(0, 1))
    assert accuracy.mean > 93
    assert len(set(accuracy.values)) > 1 or accuracy.sd == 0
    shuffled = ImageSet(digits.images, digits.labels.roll(7), digits.classes)  # type: ignore[union-attr]
    assert downstream_accuracy(shuffled, test).mean < 40


def test_seeds_repeat_and_leave_the_users_generator_alone(digits: ImageSet) -> None:
    few, before = digits.subset(range(200)), torch.get_rng_state()
    assert downstream_accuracy(few, few) == downstream_accuracy(few, few)
    assert torch.equal(before, torch.get_rng_state())


def test_classes_are_matched_by_name(digits: ImageSet) -> None:
    turned = ImageSet(digits.images, 9 - digits.labels, digits.classes[::-1])  # type: ignore[operator]
    assert torch.equal(aligned(turned, digits).labels, digits.labels)  # type: ignore[arg-type]


def test_sets_that_cannot_be_compared_are_refused(digits: ImageSet) -> None:
    with pytest.raises(DataError, match="labels"):
        aligned(ImageSet(digits.images), digits)
    with pytest.raises(DataError, match="same size"):
        aligned(ImageSet(digits.images[:, :, :6], digits.labels, digits.classes), digits)
    with pytest.raises(DataError, match="ten"):
        aligned(ImageSet(digits.images, digits.labels, [*digits.classes[:9], "ten"]), digits)
    with pytest.raises(DataError, match="one class only"):
        downstream_accuracy(digits.subset(digits.labels == 3), digits)  # type: ignore[arg-type]


def test_accuracy_prints() -> None:
    assert str(Accuracy([80.0, 82.0])) == "81.0 ± 1.4 %"
    assert str(Accuracy([80.0])) == "80.0 %"
