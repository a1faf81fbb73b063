"""Distribution matching without privacy: it learns, and it says that it is not private."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.evaluate import downstream_accuracy
from sfumato.methods.base import Synthesizer
from sfumato.methods.dm import class_batches, initial_noise
from sfumato.testing import build

QUICK: dict[str, Any] = {"images_per_class": 10, "batch_size": 32, "width": 32, "device": "cpu"}


@pytest.fixture(scope="module")
def fitted(digits: ImageSet) -> Synthesizer:
    return build("dm", iterations=150, **QUICK).fit(digits)


@pytest.fixture(scope="module")
def noise(digits: ImageSet) -> torch.Tensor:
    """What `fitted` started from."""
    return initial_noise(digits.public(), 10, torch.Generator().manual_seed(0))


def test_it_starts_from_the_noise(digits: ImageSet, noise: torch.Tensor) -> None:
    model = build("dm", iterations=1, learning_rate=1e-9, **QUICK).fit(digits)
    assert torch.allclose(model.images_, noise.clamp(-1, 1), atol=1e-5)  # type: ignore[attr-defined]


def test_it_teaches_a_classifier(digits: ImageSet, fitted: Synthesizer) -> None:
    test = sf.load_images("digits", split="test")
    assert downstream_accuracy(fitted.sample(100), test, "logistic").mean > 80


def test_the_certificate_says_none(few_digits: ImageSet, tmp_path: Path) -> None:
    model = build("dm", iterations=2, **QUICK).fit(few_digits, run_dir=tmp_path)
    certificate = model.certificate_
    assert (certificate.guarantee, certificate.epsilon) == ("none", None)
    assert certificate.void is not None
    assert "raw images" in certificate.void
    assert certificate.claimed is not None
    assert "not so" in certificate.claimed["why"]
    assert not sf.verify(tmp_path / "certificate.json").ok
    verification = sf.verify(tmp_path / "certificate.json", allow_none=True)
    assert verification.ok
    assert verification.guarantee == "none"
    loaded = sf.load(tmp_path, device="cpu")
    assert torch.equal(loaded.sample(5).images, model.sample(5).images)


def test_a_budget_is_refused(few_digits: ImageSet) -> None:
    with pytest.raises(ValueError, match="cannot keep epsilon 1"):
        build("dm", epsilon=1.0)
    with pytest.raises(ValueError, match="cannot keep epsilon 3"):
        build("dm", **QUICK).set_params(epsilon=3.0).fit(few_digits)
    planned = sf.create("dm").plan(few_digits.public())
    assert planned.epsilon == math.inf
    assert [release.noise for release in planned.releases] == [0]


def test_unlabelled_images_are_one_class(digits: ImageSet) -> None:
    model = build("dm", iterations=2, **QUICK).fit(ImageSet(digits.images))
    sample = model.sample(10)
    assert sample.labels is None
    assert sample.shape == digits.shape


def test_batches_hold_each_class_alike(few_digits: ImageSet) -> None:
    """Without repetition; a class that is smaller than a batch is there as a whole."""
    assert few_digits.labels is not None
    numbered = torch.arange(61).byte().view(-1, 1, 1, 1)  # each image is its own number
    generator = torch.Generator().manual_seed(0)
    batches = class_batches(numbered, few_digits.labels, few_digits.public(), 15, generator)
    drawn = [next(batches) for _ in range(2)]
    for pixels, labels in drawn:
        numbers = ((pixels.flatten() + 1) * 127.5).round().long()
        assert torch.bincount(labels).tolist() == [15, 15, 15, 1]
        assert torch.equal(few_digits.labels[numbers], labels)
        assert len(numbers.unique()) == len(numbers)
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_an_empty_class_is_named(few_digits: ImageSet) -> None:
    absent = ImageSet(few_digits.images[:60], few_digits.labels[:60], few_digits.classes)  # type: ignore[index]
    with pytest.raises(DataError, match="no images of class '3'"):
        build("dm", **QUICK).fit(absent)
