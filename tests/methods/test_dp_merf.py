"""DP-MERF: its features, its release, and that a generator learns from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet, PublicFacts, load_images
from sfumato.evaluate import downstream_accuracy
from sfumato.methods.dp_merf import CORRELATION_LENGTH, PIXEL_VARIANCE, MeanEmbedding, _fourier

FACTS = PublicFacts((1, 12, 10), ("a", "b"), True)


def test_features_have_norm_one_whatever_the_image() -> None:
    model = MeanEmbedding(features=300)
    frequencies = model._spectrum(FACTS.shape).frequencies(300, 120, torch.Generator().manual_seed(0))
    rows = _fourier(torch.rand(50, *FACTS.shape) * 2 - 1, frequencies) / math.sqrt(300)
    assert torch.allclose(rows.norm(dim=1), torch.ones(50), atol=1e-5)


def test_phases_vary_as_the_public_image_model_says() -> None:
    """Images drawn from the model itself: the standard deviation of w . x lies within the amplitude's range."""
    model = MeanEmbedding(features=200)
    frequencies = model._spectrum(FACTS.shape).frequencies(300, 120, torch.Generator().manual_seed(0))

    def root(size: int) -> torch.Tensor:
        place = torch.arange(size)
        return torch.linalg.cholesky(torch.exp(-(place[:, None] - place).abs() / (CORRELATION_LENGTH * 11)))

    noise = torch.randn(4000, 12, 10, generator=torch.Generator().manual_seed(1))
    images = math.sqrt(PIXEL_VARIANCE) * (root(12) @ noise @ root(10).T)
    spread = (images.flatten(1) @ frequencies.T).std(0)
    assert spread.min() > 0.7 * 0.93
    assert spread.max() < 2.8 * 1.07
    assert spread.log().std() > 0.2  # and fills it


def test_the_release_is_the_class_means_of_the_features(few_digits: ImageSet) -> None:
    """Without noise, means released equal means computed by hand."""
    seen: dict[str, torch.Tensor] = {}

    class Listening(MeanEmbedding):
        def _fit_generator(self, public: Any, means: torch.Tensor, frequencies: torch.Tensor, generator: Any) -> None:
            seen.update(means=means, frequencies=frequencies)
            self.generator_ = self._new_generator(public).eval()

    Listening(epsilon=math.inf, features=50, device="cpu").fit(few_digits)
    pixels = few_digits.images.float() / 127.5 - 1
    for label in range(4):
        chosen = pixels[few_digits.labels == label]
        assert torch.allclose(seen["means"][label], _fourier(chosen, seen["frequencies"]).mean(0), atol=2e-3)


def test_public_sizes_save_a_release() -> None:
    assert [release.name for release in MeanEmbedding()._releases(FACTS)] == ["counts", "embedding"]
    declared = PublicFacts(FACTS.shape, FACTS.classes, True, (30, 40))
    assert [release.name for release in MeanEmbedding()._releases(declared)] == ["embedding"]


def test_declared_sizes_are_in_the_certificate(few_digits: ImageSet) -> None:
    model = sf.create("dp-merf", epsilon=3.0, public_size=True, features=50, steps=2, batch_size=20, device="cpu")
    model.fit(few_digits)
    assert model.certificate_.public_facts["sizes"] == [20, 20, 20, 1]
    assert [event["name"] for event in model.certificate_.events] == ["embedding"]
    hidden = sf.create("dp-merf", epsilon=3.0, features=50, steps=2, batch_size=20, device="cpu").fit(few_digits)
    assert hidden.certificate_.public_facts["sizes"] is None


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (1, 28, 28), (3, 33, 20)])
@pytest.mark.parametrize("classes", [1, 3])
def test_every_shape_and_number_of_classes(shape: tuple[int, int, int], classes: int) -> None:
    pixels = torch.randint(0, 256, (12, *shape), generator=torch.Generator().manual_seed(0)).byte()
    labels = None if classes == 1 else torch.arange(12) % classes
    images = ImageSet(pixels, labels, ("all",) if classes == 1 else ("a", "b", "c"))
    model = sf.create("dp-merf", epsilon=5.0, features=40, steps=2, batch_size=20, device="cpu").fit(images)
    sample = model.sample(10)
    assert sample.shape == shape
    assert sample.labelled == (classes > 1)


def test_many_classes_take_turns() -> None:
    """More classes than a batch has room for: each step takes some of them."""
    images = ImageSet(torch.zeros(80, 1, 8, 8).byte(), torch.arange(80) % 40, [str(c) for c in range(40)])
    model = sf.create("dp-merf", epsilon=5.0, features=40, steps=3, batch_size=32, device="cpu").fit(images)
    assert len(torch.unique(model.sample(400).labels)) > 30  # type: ignore[arg-type]


def test_large_images_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(DataError, match="--size"):
        MeanEmbedding().plan(PublicFacts((1, 300, 300), ("a", "b"), True))


def test_samples_follow_the_released_proportions(few_digits: ImageSet) -> None:
    model = sf.create("dp-merf", epsilon=math.inf, features=50, steps=2, batch_size=20, device="cpu").fit(few_digits)
    labels = model.sample(61).labels
    assert labels is not None
    assert torch.bincount(labels).tolist() == [20, 20, 20, 1]


def test_it_learns_digits() -> None:
    """A second's training at a moderate budget: a classifier taught by the samples knows most real digits."""
    train, test = load_images("digits"), load_images("digits", split="test")
    model = sf.create("dp-merf", epsilon=10.0, features=1000, steps=150, batch_size=200, device="cpu").fit(train)
    assert downstream_accuracy(model.sample(2000), test).mean > 75
