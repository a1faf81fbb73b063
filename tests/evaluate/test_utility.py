"""Downstream accuracy: training on real digits, agreement with scikit-learn, refusal of incompatible sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional

from sfumato.data import DataError, ImageSet, load_images
from sfumato.data.pixels import to_unit_range
from sfumato.evaluate import ANNEALED, CLASSIFIERS, Accuracy, Recipe, aligned, downstream_accuracy
from sfumato.evaluate.utility import _fit_logistic_regression


@pytest.fixture(scope="module")
def test_digits() -> ImageSet:
    return load_images("digits", split="test")


def test_classifiers_learn_real_digits(digits: ImageSet, test_digits: ImageSet) -> None:
    accuracy = downstream_accuracy(digits, test_digits, seeds=(0, 1))
    assert accuracy.mean > 93
    assert len(accuracy.values) == 2
    shuffled = ImageSet(digits.images, digits.labels.roll(7), digits.classes)  # type: ignore[union-attr]
    assert downstream_accuracy(shuffled, test_digits).mean < 40


SLOW = pytest.mark.slow  # the residual blocks of resnet18, too


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name == "resnet9" else ()) for name in CLASSIFIERS])
def test_every_classifier_learns(name: str, digits: ImageSet, test_digits: ImageSet) -> None:
    few, test = digits.subset(range(0, 1400, 2)), test_digits.subset(range(150))
    recipe = Recipe(epochs=2 if name in ("resnet18", "vgg11", "alexnet") else 6, batch_size=32)
    assert downstream_accuracy(few, test, name, recipe=recipe).mean > 45


def test_condensed_sets_learn_with_augmentation(digits: ImageSet, test_digits: ImageSet) -> None:
    assert digits.labels is not None
    index = torch.cat([(digits.labels == label).nonzero()[:10, 0] for label in range(10)])
    recipe = Recipe(epochs=150, condensed=True)
    assert downstream_accuracy(digits.subset(index), test_digits, "convnet", recipe=recipe).mean > 60


def test_the_annealed_recipe_follows_dp_mepf(digits: ImageSet, test_digits: ImageSet) -> None:
    """It has ten epochs with batches of 512, a triangular learning rate with a maximum of 0.5, and label smoothing."""
    assert (ANNEALED.epochs, ANNEALED.batch_size, ANNEALED.label_smoothing) == (10, 512, 0.1)
    assert [ANNEALED.annealed_rate(done) for done in (0.0, 0.25, 0.5, 0.9)] == pytest.approx([0.0, 0.25, 0.5, 0.1])
    few, test = digits.subset(range(0, 1400, 2)), test_digits.subset(range(150))
    assert downstream_accuracy(few, test, "resnet9", recipe=replace(ANNEALED, epochs=4, batch_size=64)).mean > 80


def test_logistic_regression_agrees_with_scikit_learn(digits: ImageSet, test_digits: ImageSet) -> None:
    few = digits.subset(range(0, len(digits), 3))
    assert few.labels is not None
    ours = _fit_logistic_regression(to_unit_range(few.images), few.labels, 10)
    pixels = (few.images.double() / 127.5 - 1).flatten(1).numpy()
    theirs = LogisticRegression(C=1.0, tol=1e-8, max_iter=5000).fit(pixels, few.labels.numpy())
    test_pixels = to_unit_range(test_digits.images)
    mine = ours(test_pixels).softmax(1).detach().double()
    reference = torch.from_numpy(theirs.predict_proba(test_pixels.double().flatten(1).numpy()))
    assert torch.allclose(mine, reference, atol=1e-4)
    assert downstream_accuracy(few, test_digits, "logistic", seeds=(0, 1, 2)).values == [
        pytest.approx(100 * float((reference.argmax(1) == test_digits.labels).double().mean()))
    ]


@pytest.mark.parametrize("name", ["logistic", "small_cnn"])
def test_classifiers_learn_from_soft_labels(name: str, digits: ImageSet, test_digits: ImageSet) -> None:
    """The labels are wrong and the soft labels are right."""
    assert digits.labels is not None
    soft_labels = 0.9 * functional.one_hot(digits.labels, 10) + 0.01
    both = ImageSet(digits.images, digits.labels.roll(7), digits.classes, soft_labels)
    assert downstream_accuracy(both, test_digits, name).mean > 88


def test_confusion_matrix_is_consistent(digits: ImageSet, test_digits: ImageSet) -> None:
    accuracy = downstream_accuracy(digits, test_digits, "logistic")
    confusion = torch.tensor(accuracy.confusion)
    assert confusion.sum() == len(test_digits)
    assert torch.equal(confusion.sum(1), torch.bincount(test_digits.labels))  # type: ignore[arg-type]
    assert 100 * float(confusion.diagonal().sum() / confusion.sum()) == pytest.approx(accuracy.mean)
    assert len(accuracy.per_class) == 10
    assert Accuracy([0.0], [[0, 0], [1, 1]]).per_class == [None, 50.0]


def test_seeds_are_reproducible_and_keep_the_global_generator(digits: ImageSet) -> None:
    few, before = digits.subset(range(200)), torch.get_rng_state()
    assert downstream_accuracy(few, few) == downstream_accuracy(few, few)
    assert torch.equal(before, torch.get_rng_state())


def test_classes_are_matched_by_name(digits: ImageSet) -> None:
    turned = ImageSet(digits.images, 9 - digits.labels, digits.classes[::-1])  # type: ignore[operator]
    assert torch.equal(aligned(turned, digits).labels, digits.labels)  # type: ignore[arg-type]


def test_incompatible_sets_are_refused(digits: ImageSet) -> None:
    assert digits.labels is not None
    with pytest.raises(DataError, match="labels"):
        aligned(ImageSet(digits.images), digits)
    with pytest.raises(DataError, match="same size"):
        aligned(ImageSet(digits.images[:, :, :6], digits.labels, digits.classes), digits)
    with pytest.raises(DataError, match="ten"):
        aligned(ImageSet(digits.images, digits.labels, [*digits.classes[:9], "ten"]), digits)
    few = digits.labels < 9
    nine = ImageSet(digits.images[few], digits.labels[few], digits.classes[:9])
    with pytest.raises(DataError, match="the test set does not have the classes 9"):
        aligned(nine, digits)
    three = digits.subset(digits.labels == 3)
    with pytest.raises(DataError, match="only one class"):
        downstream_accuracy(three, three)
    with pytest.raises(DataError, match="no classifier 'cnn'"):
        downstream_accuracy(digits, digits, "cnn")
    small = ImageSet(digits.images[:, :, :6, :6], digits.labels, digits.classes)
    with pytest.raises(DataError, match="at least 8×8 pixels"):
        downstream_accuracy(small, small)


def test_accuracy_as_text() -> None:
    assert str(Accuracy([80.0, 82.0], [])) == "81.0 ± 1.4 %"
    assert str(Accuracy([80.0], [])) == "80.0 %"
