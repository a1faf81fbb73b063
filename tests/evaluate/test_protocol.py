"""The protocol: content of a result, and separation of private measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet, load_images
from sfumato.evaluate import PROFILES, PrivateMeasurementWarning, compare, protocol, summary
from sfumato.evaluate.protocol import nearest_neighbours


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the quick profile."""
    quick = PROFILES["quick"]
    monkeypatch.setitem(PROFILES, "quick", replace(quick, classifiers=("logistic", "small_cnn"), seeds=(0, 1)))


@pytest.fixture(scope="module")
def sets() -> tuple[ImageSet, ImageSet]:
    return load_images("digits").subset(range(0, 1400, 3)), load_images("digits", split="test")


def test_a_result_describes_the_protocol(sets: tuple[ImageSet, ImageSet]) -> None:
    synthetic, test = sets
    metrics = sf.evaluate(synthetic, test=test, network=None)
    assert metrics["protocol"]["synthetic_images"] == len(synthetic)
    utility = metrics["utility"]
    assert set(utility) == {"logistic", "small_cnn", "convolutional"}
    assert utility["convolutional"]["values"] == utility["small_cnn"]["values"]
    assert len(utility["small_cnn"]["confusion"]) == 10
    assert "fidelity" not in metrics
    json.dumps(metrics)
    assert set(summary(metrics)) == {"logistic", "small_cnn"}
    assert "±" in summary(metrics)["small_cnn"]


def test_unlabelled_sets_have_only_fidelity(sets: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "fidelity", lambda *_, **__: {"fd_x": 1.0})
    metrics = sf.evaluate(ImageSet(sets[0].images), test=ImageSet(sets[1].images))
    assert "utility" not in metrics
    assert metrics["fidelity"] == {"fd_x": 1.0}


def test_several_sets_share_one_pass_over_the_test_images(
    sets: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    monkeypatch.setattr(protocol, "load_feature_network", lambda name: name)
    monkeypatch.setattr(protocol, "features", lambda images, *_, **__: passes.append(len(images)) or "real")
    monkeypatch.setattr(protocol, "fidelity", lambda images, real, *_, **__: {"fd": float(real == "real")})
    found = compare({"a": sets[0], "b": sets[1]}, test=sets[1], network="effnet_lite0")
    assert passes == [len(sets[1])]
    assert [entry["fidelity"]["fd"] for entry in found.values()] == [1.0, 1.0]


def test_several_networks_give_all_their_measures(
    sets: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "load_feature_network", lambda name: name)
    monkeypatch.setattr(protocol, "features", lambda _, network, **__: network)
    monkeypatch.setattr(protocol, "fidelity", lambda _, real, network, **__: {f"fd_{network}": float(real == network)})
    networks = ["effnet_lite0", "inception"]
    found = compare({"a": ImageSet(sets[0].images)}, test=ImageSet(sets[1].images), network=networks)
    assert found["a"]["fidelity"] == {"fd_effnet_lite0": 1.0, "fd_inception": 1.0}
    assert "fidelity" not in compare({"a": ImageSet(sets[0].images)}, test=ImageSet(sets[1].images), network=[])["a"]


def test_private_measurements_are_kept_separate(sets: tuple[ImageSet, ImageSet], tmp_path: Path) -> None:
    synthetic, test = sets
    with pytest.raises(DataError, match="private_dir"):
        sf.evaluate(synthetic, test=test, train=synthetic, network=None)
    with pytest.warns(PrivateMeasurementWarning, match="do not share it"):
        metrics = sf.evaluate(synthetic, test=test, train=synthetic, network=None, private_dir=tmp_path / "private")
    assert "private" not in json.dumps(metrics)
    (tmp_path / "certificate.json").write_text("{}")
    with pytest.warns(PrivateMeasurementWarning), pytest.raises(DataError, match="meant to be shared"):
        sf.evaluate(synthetic, test=test, train=synthetic, network=None, private_dir=tmp_path / "private")
    assert {path.name for path in (tmp_path / "private").iterdir()} == {"neighbours.png", "neighbours.json"}
    distances = json.loads((tmp_path / "private" / "neighbours.json").read_text())["distance"]
    assert all(row[0] == 0 for row in distances)  # each image is its own nearest neighbour here


def test_nearest_neighbours_agree_with_a_full_search(
    sets: tuple[ImageSet, ImageSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "BLOCK", 7)
    some, among = sets[0].images[:5], sets[1].images[:60]
    distance, index = nearest_neighbours(some, among, 3)
    full = (some[:, None].double() - among[None].double()).square().flatten(2).mean(2).sqrt()
    expected, order = full.topk(3, largest=False)
    assert torch.allclose(distance.double(), expected, atol=1e-3)
    assert torch.equal(full.gather(1, index), full.gather(1, order))
    with pytest.raises(DataError, match="3 neighbours"):
        nearest_neighbours(some, among[:2], 3)


def test_unknown_profiles_are_refused(sets: tuple[ImageSet, ImageSet]) -> None:
    with pytest.raises(DataError, match="no profile 'fast'"):
        sf.evaluate(sets[0], test=sets[1], profile="fast")
