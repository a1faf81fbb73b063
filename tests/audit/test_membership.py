"""Attacks find copies, find nothing in fresh images, and their intervals are right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from sfumato.audit import membership as module
from sfumato.audit.membership import (
    Attacker,
    attack,
    audit_release,
    auroc,
    calibrated,
    estimate_release_seconds,
    interval,
    write_private,
)
from sfumato.data import DataError, ImageSet
from sfumato.features.copy_detector import load_copy_detector


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
    audit = audit_release(used, used, held_out)
    found = {each.name: each for each in audit.attacks}
    assert found.keys() == {"nearest", "density", "loss"}
    assert found["nearest"].auroc.value == 1.0
    assert all(each.detects for each in found.values())
    assert audit.suspicious
    assert (audit.members, audit.others, audit.attacked) == (400, 400, (400, 300))


def test_fresh_images_reveal_no_members(thirds: list[ImageSet]) -> None:
    used, held_out, fresh = thirds
    found = audit_release(fresh, used, held_out)
    assert all(each.auroc.low < 0.53 for each in found.attacks)
    assert not found.interrupted


def test_unlabelled_images_are_attacked_without_the_classifier(thirds: list[ImageSet]) -> None:
    bare = [ImageSet(part.images) for part in thirds]
    assert [each.name for each in audit_release(bare[0], bare[0], bare[1]).attacks] == ["nearest", "density"]
    with pytest.raises(DataError, match="needs labels"):
        Attacker(thirds[0], thirds[1], labelled=True).score("loss", bare[1])


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
    copied = audit_release(used.subset(range(50)), used.subset(range(150)), held_out).memory
    assert copied["memorises"]
    assert (copied["copies"], copied["compared_with"]) == (50, 150)
    made, neighbours = copied["pairs"].images.split(module.SHOWN_PAIRS)
    assert torch.equal(made, neighbours)
    clean = audit_release(fresh, used, held_out).memory
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
    found = audit_release(fresh, used, held_out)
    path = write_private(tmp_path / "private", found, "shared")
    content = json.loads(path.read_text())
    assert content["memorisation"]["closer_to_training"] == found.memory["closer_to_training"]
    assert (tmp_path / "private" / "most_similar.png").exists()
    (tmp_path / "certificate.json").write_text("{}")
    with pytest.raises(DataError, match="meant to be shared"):
        write_private(tmp_path / "private", found, "shared")


def test_blocks_count_the_same_as_the_whole(thirds: list[ImageSet], monkeypatch: pytest.MonkeyPatch) -> None:
    used, held_out, fresh = thirds
    whole = audit_release(fresh, used, held_out)
    monkeypatch.setattr(module, "BLOCK", 70)
    parts = audit_release(fresh, used, held_out)
    assert [each.auroc.value for each in parts.attacks] == pytest.approx([each.auroc.value for each in whole.attacks])
    assert parts.memory["closer_to_training"] == pytest.approx(whole.memory["closer_to_training"])


def test_ctrl_c_and_time_keep_the_blocks_that_are_done(thirds: list[ImageSet], monkeypatch: pytest.MonkeyPatch) -> None:
    used, held_out, fresh = thirds
    monkeypatch.setattr(module, "BLOCK", 50)
    late = audit_release(fresh, used, held_out, seconds=0)
    assert late.interrupted
    assert late.attacked == (50, 50)
    original, calls = Attacker.distances, list[int]()

    def interrupted(self: Attacker, targets: ImageSet) -> np.ndarray:
        calls.append(1)
        if len(calls) == 6:  # between the two halves of the third block
            raise KeyboardInterrupt
        return original(self, targets)

    monkeypatch.setattr(Attacker, "distances", interrupted)
    stopped = audit_release(fresh, used, held_out)
    assert stopped.interrupted
    assert stopped.attacked == (100, 100)
    calls[:] = [1] * 5
    with pytest.raises(KeyboardInterrupt):  # nothing was counted
        audit_release(fresh, used, held_out)


def test_the_cost_grows_with_the_images(thirds: list[ImageSet]) -> None:
    used, held_out, fresh = thirds
    few = used.subset(range(10))
    assert estimate_release_seconds(fresh, used, held_out) > estimate_release_seconds(few, few, few) > 0


def test_too_few_images_are_refused(thirds: list[ImageSet]) -> None:
    with pytest.raises(DataError, match="at least 2 training and 4 held-out"):
        audit_release(thirds[0], thirds[0], thirds[1].subset(range(3)))


def test_sscd_recognises_changed_copies() -> None:
    """A mirrored, noisy copy, which distances in features do not recognise."""
    detector = load_copy_detector()
    if detector is None:
        pytest.skip("SSCD is not installed (sfumato[copies])")
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(256, (12, 3, 5, 5), generator=generator).float()
    scenes = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 255)
    changed = (scenes.flip(3) + 6 * torch.randn(scenes.shape, generator=generator)).clamp(0, 255)
    used, shown = scenes.byte()[:6], changed.byte()[:6]
    alike = detector.embed(scenes.byte()) @ detector.embed(shown).T
    assert (alike[:6].diagonal() > alike[6:].max()).all()
    attacker = Attacker(ImageSet(shown), ImageSet(scenes.byte()[6:9]), labelled=False)
    assert "copies" in attacker.names
    inside, outside = (attacker.score("copies", ImageSet(part)) for part in (used, scenes.byte()[9:]))
    assert inside.min() > outside.max()
    assert detector.embed(scenes.byte()[:, :1]).shape == (12, 512)  # grey images, too
