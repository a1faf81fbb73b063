"""ImageSet: accepted input, refused input, and public facts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sfumato.data import DataError, ImageSet, PublicFacts


def test_public_facts_hold_no_size_unless_declared(digits):
    assert digits.public() == PublicFacts((1, 8, 8), tuple("0123456789"), True, None)
    counts = tuple(digits.labels.tolist().count(label) for label in range(10))
    assert digits.public(declare_size=True).sizes == counts
    assert ImageSet(digits.images).public(declare_size=True).sizes == (60,)
    assert {field.name for field in dataclasses.fields(PublicFacts)} == {
        "shape",
        "classes",
        "labelled",
        "sizes",
        "unit",
    }


def test_repr_does_not_contain_the_size(digits):
    assert "60" not in repr(digits)
    assert "tensor" not in repr(digits)


def test_layouts_agree(pixels, targets):
    colour = np.stack([pixels, pixels // 2, pixels // 3], axis=-1)
    last = ImageSet.from_arrays(colour, targets, 10)
    first = ImageSet.from_arrays(colour.transpose(0, 3, 1, 2), targets, 10)
    assert last.shape == (3, 8, 8)
    assert torch.equal(last.images, first.images)
    assert np.array_equal(last.images[:, 1].numpy(), pixels // 2)
    assert np.array_equal(ImageSet.from_arrays(pixels).images[:, 0].numpy(), pixels)
    assert np.array_equal(ImageSet.from_arrays(pixels[..., None]).images[:, 0].numpy(), pixels)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", ">f4"])
def test_floats_in_unit_range_round_to_the_same_bytes(pixels, kind):
    assert np.array_equal(ImageSet.from_arrays((pixels / 255).astype(kind)).images[:, 0].numpy(), pixels)


def test_torch_and_read_only_arrays_are_accepted(pixels):
    pixels.flags.writeable = False
    assert np.array_equal(ImageSet.from_arrays(pixels).images[:, 0].numpy(), pixels)
    assert ImageSet.from_arrays(torch.rand(4, 3, 8, 8)).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.full((4, 8, 8), np.nan), "NaN"),
        (np.full((4, 8, 8), np.inf), "infinite"),
        (np.full((4, 8, 8), -0.5), "below 0"),
        (np.full((4, 8, 8), 200.0), "above 1"),
        (np.zeros((4, 8, 8), np.int64), "int64"),
        (np.zeros((4, 8, 8), np.uint16), "uint16"),
        (np.array([[["x"]]], dtype=object), "object"),
        (np.zeros((4, 8, 8, 4), np.uint8), "no axis of 1"),
        (np.zeros((4, 3, 8, 3), np.uint8), r"\(4, 3, 8, 3\) may be"),
        (np.zeros((32, 32, 3), np.uint8), "one image or many"),
        (np.zeros((3, 32, 32), np.uint8), "one image or many"),
        (np.zeros((8, 8), np.uint8), r"shape \(8, 8\)"),
        (np.zeros((0, 8, 8), np.uint8), "no images"),
        (np.zeros((0, 8, 8)), "no images"),
    ],
)
def test_bad_images_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        ImageSet.from_arrays(values)


def test_labels_of_every_kind(pixels):
    four = pixels[:4]
    column = ImageSet.from_arrays(four, np.array([[2], [0], [1], [0]], np.uint8), 3)
    assert column.labels.tolist() == [2, 0, 1, 0]
    assert column.classes == ("0", "1", "2")
    assert ImageSet.from_arrays(four, [2.0, 0.0, 1.0, 0.0], 3).labels.tolist() == [2, 0, 1, 0]
    assert ImageSet.from_arrays(four, np.array([True, False, True, True]), 2).labels.tolist() == [1, 0, 1, 1]
    names = ImageSet.from_arrays(four, ["zebra", "ant", "zebra", "ant"], ("ant", "zebra"))
    assert names.labels.tolist() == [1, 0, 1, 0]
    assert names.classes == ("ant", "zebra")
    ordered = ImageSet.from_arrays(four, np.array([b"x", b"y", b"y", b"x"]), classes=["y", "x", "z"])
    assert ordered.labels.tolist() == [1, 0, 0, 1]
    assert ordered.classes == ("y", "x", "z")


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 1, 2], 3, "4 images but 3 labels"),
        ([0, 1, -1, 0], None, "label -1 is negative"),
        ([0, 1, 1, 0.5], None, "fractions"),
        ([0, 1, 1, np.nan], None, "NaN"),
        ([0, 1, 1, 5], ["a", "b"], "label 5 has no class name"),
        (["a", "b", "c", "a"], ["a", "b"], "'c'"),
        ([0, 1, 1, 10**9], None, "identifier"),
        ([[0, 1], [1, 0], [0, 1], [1, 0]], None, "shape"),
        ([0, 1, 1, 0], ["a", "a"], "'a' appears twice"),
        ([0, 1, 1, 0], ["a", "\udc80"], "UTF-8"),
        ([0, 1, 1, 0], ["a", 3], "not 3"),
        (np.array([0, None, 1, 0], dtype=object), None, "object"),
        (None, ["a", "b"], "without labels"),
        ([0, 1, 1, 0], "ab", "expected a list of names"),
        ([0, 1, 1, 0], 0, "expected a list of names, or their number"),
        ([0, 1, 1, 0], True, "expected a list of names"),
        ([0.0, 1.0, 1.0, 1e300], 2, "has no class name"),
        ([0, 2, 1, 0], None, r"does not declare its classes, and labels must not .*pass classes=3 "),
        (["b", "a", "b", "a"], None, r"pass classes=\['a', 'b'\] \(--classes a,b\)"),
        (["10", "9", "2", "9"], None, r"--classes 2,9,10"),
        (["1", "0", "2", "2"], None, r"--classes 3\)"),
        (["my cat", "dog", "dog", "dog"], None, r"--classes 'dog,my cat'\)"),
    ],
)
def test_bad_labels_are_refused(pixels, labels, classes, message):
    with pytest.raises(DataError, match=message):
        ImageSet.from_arrays(pixels[:4], labels, classes)


def test_constructor_checks_types(pixels):
    with pytest.raises(DataError, match="uint8 tensor, not float32"):
        ImageSet(torch.zeros(4, 1, 8, 8))
    with pytest.raises(DataError, match="ndarray"):
        ImageSet(pixels)
    with pytest.raises(DataError, match="shape"):
        ImageSet(torch.zeros(4, 2, 8, 8, dtype=torch.uint8))
    with pytest.raises(DataError, match="int64"):
        ImageSet(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32), ("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ImageSet(torch.zeros(4, 1, 8, 8, dtype=torch.uint8)).labels = None


def soft(digits, certainty=0.9):
    """Return soft labels: `certainty` for the label, and the rest spread evenly."""
    return torch.nn.functional.one_hot(digits.labels, 10) * (certainty - (1 - certainty) / 9) + (1 - certainty) / 9


def test_soft_labels_accompany_labels(digits):
    both = ImageSet(digits.images, digits.labels, digits.classes, soft(digits))
    assert torch.equal(both.subset([5, 2]).soft_labels, soft(digits)[[5, 2]])
    assert digits.subset([5, 2]).soft_labels is None
    halves = soft(digits).half().numpy()
    again = ImageSet.from_arrays(digits.images, digits.labels, digits.classes, halves)
    assert torch.allclose(again.soft_labels, both.soft_labels, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.double(), "float32"),
        (lambda values: values[:, :9], r"shape \[60, 10\], not \[60, 9\]"),
        (lambda values: values[:9], r"not \[9, 10\]"),
        (lambda values: values * 2, "a sum of 1"),
        (lambda values: 1.2 * values - 0.02, "at least 0"),
        (lambda values: values * float("nan"), "probabilities"),
    ],
)
def test_bad_soft_labels_are_refused(digits, change, message):
    with pytest.raises(DataError, match=message):
        ImageSet(digits.images, digits.labels, digits.classes, change(soft(digits)))


def test_soft_labels_need_labels_and_numbers(digits):
    with pytest.raises(DataError, match="without labels"):
        ImageSet(digits.images, soft_labels=torch.ones(60, 1))
    with pytest.raises(DataError, match="not a numeric array"):
        ImageSet.from_arrays(digits.images, digits.labels, classes=10, soft_labels=[[0.5, 0.5], [1.0]])


def test_subset_keeps_order_and_classes(digits):
    part = digits.subset([5, 2])
    assert part.labels.tolist() == [digits.labels[5], digits.labels[2]]
    assert torch.equal(part.images[0], digits.images[5])
    assert part.classes == digits.classes
    assert len(digits.subset(digits.labels == 3)) == int((digits.labels == 3).sum())
    with pytest.raises(DataError, match="no images"):
        digits.subset([])
