"""Attacks find copies, find nothing in fresh images, and their intervals are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from sfumato.audit import membership as module
from sfumato.audit.membership import attack, attacks, auroc, calibrated, interval, memorisation, write_private
from sfumato.data import DataError, ImageSet


@pytest.fixture(scope="module")
def thirds(digits: ImageSet) -> list[ImageSet]:
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(0))
    return [digits.subset(order[start : start + 400]) for start in (0, 400, 800)]


def test_auroc_is_that_of_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 10, 200) + 2, rng.integers(0, 10, 300)
    wanted = roc_auc_score([1] * 200 + [0] * 300, np.concatenate([members, others]))
    assert auroc(members, others).value == pytest.approx(wanted)


def test_the_interval_of_the_auroc_covers_the_truth() -> None:
    """In 95 % of 300 draws; fewer than 270 has a probability below 1e-3."""
    from scipy.stats import norm

    rng, truth, covered = np.random.default_rng(0), norm.cdf(1 / np.sqrt(2)), 0
    for _ in range(300):
        found = auroc(rng.standard_normal(100) + 1, rng.standard_normal(80))
        covered += found.low <= truth <= found.high
    assert 270 <= covered < 300


def test_rates_and_intervals() -> None:
    members, others = np.arange(100.0) + 50, np.arange(100.0)
    found = attack("ranks", members, others)
    assert found.tpr["0.001"] is None  # a hundred images cannot show one in a thousand
    rate = found.tpr["0.01"]
    assert rate is not None
    assert rate.value == pytest.approx((members > 98).mean())
    assert rate.low < rate.value < rate.high
    assert interval(0, 10).low == 0.0
    assert interval(10, 10).high == 1.0
    assert found.to_dict()["auroc"]["value"] == found.auroc.value


def test_copies_are_found_by_every_attack(thirds: list[ImageSet]) -> None:
    used, held_out, _ = thirds
    found = {each.name: each for each in attacks(used, used, held_out)}
    assert found.keys() == {"nearest", "density", "loss"}
    assert found["nearest"].auroc.value == 1.0
    assert all(each.detects for each in found.values())


def test_fresh_images_reveal_no_members(thirds: list[ImageSet]) -> None:
    used, held_out, fresh = thirds
    for each in attacks(fresh, used, held_out, reference=fresh):
        assert each.auroc.low < 0.53


def test_unlabelled_images_are_attacked_without_the_classifier(thirds: list[ImageSet]) -> None:
    bare = [ImageSet(part.images) for part in thirds]
    assert [each.name for each in attacks(bare[0], bare[0], bare[1])] == ["nearest", "density"]
    with pytest.raises(DataError, match="needs labels"):
        module.loss(bare[0], bare[1])


def test_calibration_removes_the_difficulty_of_an_image() -> None:
    """Members score 1 higher than without them; the difficulty of images varies by 10."""
    rng = np.random.default_rng(0)
    difficulty, used = 10 * rng.standard_normal(400), np.arange(400) < 200
    shadows = []
    for _ in range(6):
        run = difficulty + 0.3 * rng.standard_normal(400)
        run[rng.random(400) < 0.5] = np.nan
        shadows.append(run)
    scores = difficulty + used + 0.3 * rng.standard_normal(400)
    plain, better = (auroc(s[used], s[~used]).value for s in (scores, calibrated(scores, shadows)))
    assert plain < 0.6
    assert better > 0.85
    assert calibrated(scores, [np.full(400, np.nan)] * 3).tolist() == [0.0] * 400


def test_memorisation_is_found_in_copies_only(thirds: list[ImageSet]) -> None:
    used, held_out, fresh = thirds
    copied = memorisation(used.subset(range(50)), used, held_out)
    assert copied["memorises"]
    assert copied["copies"] == 50
    pairs = zip(copied["most_similar"], copied["their_neighbours"], strict=True)
    assert all(torch.equal(used.images[i], used.images[n]) for i, n in pairs)
    clean = memorisation(fresh, used, held_out)
    assert not clean["memorises"]
    assert clean["copies"] == 0


def test_memorisation_is_not_found_by_chance() -> None:
    """Few images and many synthetic ones near them: 2.5 % of 200 sets may be suspected; 15 has a probability of 1e-4.

    Synthetic images that share a neighbour are not independent; a binomial interval would suspect a third of the sets.
    """
    rng, suspected, binomial = np.random.default_rng(0), 0, 0
    for _ in range(200):
        real, made = rng.standard_normal(60), 0.5 * rng.standard_normal(600)
        neighbours = np.abs(made[:, None] - real).argmin(1)
        of_training = neighbours < 30
        suspected += module._share(neighbours, of_training, 60, 0.95).low > 0.5
        binomial += interval(int(of_training.sum()), 600).low > 0.5
    assert suspected < 15
    assert binomial > 40


def test_results_are_written_for_the_owner_only(tmp_path: Path, thirds: list[ImageSet]) -> None:
    used, held_out, fresh = thirds
    memory = memorisation(fresh, used, held_out)
    path = write_private(tmp_path / "private", attacks(fresh, used, held_out), memory, "shared")
    content = json.loads(path.read_text())
    assert content["memorisation"]["closer_to_training"]["value"] == memory["closer_to_training"]["value"]
    assert (tmp_path / "private" / "most_similar.png").exists()
    (tmp_path / "certificate.json").write_text("{}")
    with pytest.raises(DataError, match="meant to be shared"):
        write_private(tmp_path / "private", [], memory, "shared")
