"""Black-box audits and the attacked steps of the published forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.audit import black_box as module
from sfumato.audit.black_box import audit_one_run, distinguish, new_game, resemblance
from sfumato.audit.neighbours import digits_of, neighbours
from sfumato.audit.published import STEPS, audit_published
from sfumato.audit.small_settings import small
from sfumato.data import ImageSet
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.registry import METHODS


class Copies(MeanEmbedding):
    """Hands out its training images, of the class that is asked for where there are some."""

    def _fit(self, vault: Any, public: Any) -> None:
        super()._fit(vault, public)
        self.kept_ = vault._pixels(torch.arange(len(vault._images)))
        self.labels_ = vault._labels

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        images = ImageSet(((self.kept_ + 1) * 127.5).round().byte(), self.labels_, self.public_.classes)
        wanted = images.labels == labels
        return images.subset(wanted) if labels is not None and bool(wanted.any()) else images


@pytest.mark.parametrize(
    ("key", "least", "trials"), [("dp-kernel-as-published", 1.0, 1000), ("pge-as-published", 2.0, 200)]
)
def test_one_step_of_a_published_form_violates_its_claim(key: str, least: float, trials: int) -> None:
    """At epsilon 1 and without an assumption. In `pge` one image is replaced: twice the claim for one added image."""
    found = audit_published(key, epsilon=1.0, trials=trials)
    assert found.clopper_pearson > least
    assert found.gaussian is None


def test_the_attacker_of_a_published_step_does_not_know_the_sample() -> None:
    """A step without the unit looks the same in both worlds: what sampling hides is not counted as leaked."""
    kernel = STEPS["dp-kernel-as-published"](1.0, 1e-5)
    assert 5 < sum(kernel(True) for _ in range(300)) < 75  # 30 expected
    assert {kernel(False) for _ in range(50)} == {0.0}
    pge = STEPS["pge-as-published"](1.0, 1e-5)
    present, absent = ([pge(world) for _ in range(100)] for world in (True, False))
    assert set(present) == {0.0, 1.0}
    assert set(absent) == {0.0, -1.0}
    assert 5 < present.count(0.0) < 55  # 25 expected


def test_every_published_form_has_its_step() -> None:
    assert set(STEPS) == {key for key in METHODS if key.endswith("as-published")}
    with pytest.raises(ValueError, match="no published step of 'dp-merf'"):
        audit_published("dp-merf")


def test_the_noise_of_the_published_kernel_is_real() -> None:
    """The attack does not profit from missing noise: the loss changes from trial to trial, the line does not."""
    from sfumato.methods.as_published.published_dp_kernel import published_loss

    images, labels = torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64)
    fakes = torch.rand(6, 1, 8, 8, requires_grad=True)
    lines, losses = [], []
    for seed in range(5):
        loss = published_loss(images, labels, fakes, labels, 10.0, torch.Generator().manual_seed(seed))
        lines.append(torch.nn.functional.normalize(torch.autograd.grad(loss, fakes)[0].flatten(), dim=0))
        losses.append(loss.item())
    assert np.std(losses) > 0.1 * np.mean(losses)
    assert all(float((line @ lines[0]).abs()) > 1 - 1e-5 for line in lines)


def test_copies_are_distinguished_and_a_private_method_is_not() -> None:
    pair = neighbours("outlier")
    copies = distinguish(small(Copies, secure=False), pair, runs=20)
    assert copies.bounds().clopper_pearson > 1.0
    private = distinguish(small("dp-merf", secure=False), pair, runs=20)
    assert private.bounds(confidence=0.999).bound < 1.0
    assert len(private.present) == len(private.absent) == 20


def test_resemblance_is_a_correlation() -> None:
    pair = neighbours("outlier")
    model = small(Copies, secure=False)().fit(pair.with_unit)
    assert resemblance(model, pair.canaries) == pytest.approx(1.0)


def test_resemblance_works_for_condensed_sets() -> None:
    pair = neighbours("outlier")
    assert -1 <= resemblance(small("dpmix", secure=False)().fit(pair.with_unit), pair.canaries) <= 1


def test_ctrl_c_keeps_whole_pairs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(*_: Any, **__: Any) -> float:
        calls.append(1)
        if len(calls) > 19:
            raise KeyboardInterrupt
        return float(len(calls) % 2)

    monkeypatch.setattr(module, "resemblance", interrupted)
    found = distinguish(small("dp-merf", secure=False), neighbours("outlier"), runs=30)
    assert found.interrupted
    assert (len(found.present), len(found.absent)) == (9, 9)
    found.bounds()
    calls.clear()
    calls.extend([1] * 10)
    with pytest.raises(KeyboardInterrupt):  # too little to count
        distinguish(small("dp-merf", secure=False), neighbours("outlier"), runs=30)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return digits_of(100, 100, 100)


def test_a_game_includes_canaries_by_fair_coins(images: ImageSet) -> None:
    game = new_game(images, canaries=100)
    assert 30 < int(game.included.sum()) < 70
    assert len(game.training) == 200 + int(game.included.sum())
    assert len(game.canaries) == 100
    assert game.images.persons is None
    changed = (game.images.images != images.images).flatten(1).any(1)
    assert bool((~changed[game.unit_of < 0]).all())
    assert int(changed[game.unit_of >= 0].sum()) > 95  # a mark may equal what is there
    plain = new_game(images, canaries=100, detail=False)
    assert torch.equal(plain.images.images, images.images)
    with pytest.raises(ValueError, match="need at least 400 images"):
        new_game(images, canaries=200)


def test_a_canary_may_be_a_person(images: ImageSet) -> None:
    game = new_game(images, canaries=30, per_person=4)
    assert game.images.persons is not None
    assert len(game.images.persons.unique()) == 30 + len(images) - 120
    assert game.training.public().unit == "person"
    assert game.per_canary(np.ones(120)).tolist() == [1.0] * 30


def test_copies_are_found_in_one_run_and_nothing_is_found_in_private_images(images: ImageSet) -> None:
    game = new_game(images, canaries=100)
    found = {each.attack.name: each for each in audit_one_run(small(Copies, secure=False), game)}
    for name in ("nearest", "detail"):
        assert found[name].attack.auroc.low > 0.8
        assert found[name].one_run > 1.0
        assert found[name].one_run_gaussian > 1.0
        assert "better than guessing" in found[name].to_dict()["power"]
    private = audit_one_run(small("dp-merf", secure=False), game, shadows=3)
    assert {each.attack.name for each in private} == {"nearest", "density", "loss", "detail", "calibrated loss"}
    for each in private:
        assert each.one_run < 1.0  # the claim
        assert each.attack.detects or "says nothing about privacy" in each.power


def test_the_gaussian_form_is_left_out_for_sampled_releases(images: ImageSet) -> None:
    """A Poisson-sampled Gaussian has another trade-off curve: the f-DP form for Gaussians would not be valid."""
    game = new_game(images, canaries=100)
    for each in audit_one_run(small("dpmix", secure=False), game):
        assert each.one_run_gaussian is None
        assert each.to_dict()["one_run_gaussian"] is None
