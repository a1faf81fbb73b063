"""Out-of-distribution detection: log-likelihood scores, and thresholds from synthetic images only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data import DataError, ImageSet
from sfumato.evaluate import Detection, detect, detect_each, least_likely
from sfumato.methods.dp_lflow import LatentFlow
from sfumato.methods.dp_merf import MeanEmbedding

SMALL: dict[str, Any] = {"procedural_batches": 300, "code": 6, "width": 8, "couplings": 2, "hidden": 16}


@pytest.fixture(scope="module")
def model(digits: ImageSet) -> LatentFlow:
    """Fit a model on the digits 0, 1 and 2 without noise."""
    assert digits.labels is not None
    some = digits.subset(digits.labels < 3)
    model = LatentFlow(epsilon=math.inf, warm="none", steps=150, sampling_prob=0.5, device="cpu")
    return model.with_constants(**SMALL).fit(ImageSet(some.images, some.labels, digits.classes[:3]))


def test_each_class_is_distinguished_from_the_others(model: LatentFlow, digits: ImageSet) -> None:
    found = detect_each(model, digits)
    assert list(found) == ["0", "1", "2"]
    for name, detection in found.items():
        assert detection.auroc is not None
        assert detection.auroc > 0.6, name  # 0.5 without learning
        assert detection.inliers is not None
        assert int(detection.inliers.sum()) == int((digits.labels == int(name)).sum())
    assert sum(detection.auroc or 0 for detection in found.values()) / 3 > 0.78  # usually 0.86 to 0.89


def test_the_threshold_is_a_quantile_of_synthetic_scores(model: LatentFlow, digits: ImageSet) -> None:
    for rate in (0.05, 0.2):
        detection = detect(model, digits, label="0", false_alarms=rate, samples=500)
        assert float((detection.synthetic < detection.threshold).double().mean()) == pytest.approx(rate, abs=0.004)
    # The threshold does not depend on the scored images.
    fewer = detect(model, digits.subset(range(40)), label="0", false_alarms=0.2, samples=500)
    assert fewer.threshold == detection.threshold
    assert torch.allclose(fewer.scores, detection.scores[:40], atol=1e-4)


def test_rates_and_auroc_of_known_scores(tmp_path: Path) -> None:
    scores = torch.tensor([5.0, 4.0, 1.0, 3.0, 0.0, -9.0], dtype=torch.float64)
    inliers = torch.tensor([True, True, True, False, False, False])
    detection = Detection(scores, torch.linspace(0, 5, 101, dtype=torch.float64), 2.0, inliers)
    assert detection.auroc == pytest.approx(8 / 9)
    assert detection.flagged.tolist() == [False, False, True, False, True, True]
    content = detection.to_dict()
    assert (content["flagged"], content["flagged_inliers"]) == (3, pytest.approx(1 / 3))
    assert content["flagged_outliers"] == pytest.approx(2 / 3)
    assert json.loads(json.dumps(content))["scores"] == scores.tolist()
    with Image.open(detection.histogram(tmp_path / "scores.png")) as picture:
        assert picture.size == (800, 380)
        colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
        assert len(colours) > 4  # three series and the threshold
    unknown = Detection(scores, scores, 2.0, None)
    assert unknown.auroc is None
    assert "auroc" not in unknown.to_dict()


def test_the_least_likely_images_come_first(digits: ImageSet, tmp_path: Path) -> None:
    few = digits.subset(range(9))
    scores = torch.arange(9.0)
    scores[4] = -1
    with Image.open(least_likely(few, scores, tmp_path / "sheet.png")) as picture:
        corner = picture.convert("L").crop((2, 2, 2 + 56, 2 + 56)).resize((8, 8), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(corner), few.images[4, 0].numpy())


def test_scores_of_all_classes_are_a_mixture(model: LatentFlow, digits: ImageSet) -> None:
    few = digits.subset(range(30))
    shares = model.counts_.double() / model.counts_.sum().double()
    each = torch.stack([model.score(few, label=label) for label in range(3)])
    assert torch.allclose(model.score(few), (each + shares.log()[:, None]).logsumexp(0))
    whole = model.score(few, label=0, likelihood="image")
    assert not torch.allclose(whole, each[0])
    assert model.likelihood == "code"  # an option of the call, not of the model
    assert torch.equal(model.score(few, label="0"), each[0])


def test_invalid_arguments_are_refused(model: LatentFlow, digits: ImageSet, few_digits: ImageSet) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        detect(model, digits, false_alarms=1.0)
    with pytest.raises(ValueError, match="there is no class 'nine'"):
        detect(model, digits, label="nine")
    with pytest.raises(DataError, match="no class 'nine'"):
        detect(model, digits, inliers=["nine"])
    with pytest.raises(DataError, match="have no labels"):
        detect(model, ImageSet(digits.images), inliers=["0"])
    with pytest.raises(DataError, match="needs both inliers and outliers"):
        detect(model, digits, inliers=digits.classes)
    with pytest.raises(DataError, match="needs images with labels of the model's classes"):
        detect_each(model, ImageSet(digits.images))
    with pytest.raises(DataError, match="must have the model's shape"):
        model.score(ImageSet(torch.zeros(1, 1, 9, 9, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="steps cannot change after fit"):
        model.score(digits, steps=3)
    with pytest.raises(ValueError, match="did you mean 'likelihood'"):
        model.score(digits, likelyhood="code")
    other = MeanEmbedding(features=20, steps=1, batch_size=10, device="cpu").fit(few_digits)
    with pytest.raises(ValueError, match="dp-merf has no likelihood"):
        other.score(few_digits)
