"""Black-box audits and the attacked steps of the published forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sfumato.audit import black_box as module
from sfumato.audit.black_box import audit_one_run, distinguish, new_game, summary
from sfumato.audit.faults import NoNoise, PrivateMean
from sfumato.audit.neighbours import digits_of, neighbours
from sfumato.audit.published import STEPS, audit_published
from sfumato.audit.small_settings import small, with_vault
from sfumato.data import ImageSet
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.registry import METHODS


class Copies(MeanEmbedding):
    """Hands out its training images."""

    def _fit(self, vault: Any, public: Any) -> None:
        super()._fit(vault, public)
        self.kept_ = vault._pixels(torch.arange(len(vault._images)))
        self.labels_ = vault._labels

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        images = ImageSet(((self.kept_ + 1) * 127.5).round().byte(), self.labels_, self.public_.classes)
        return images


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


@pytest.mark.parametrize(("key", "vault"), [("ldpdc", NoNoise), ("dpmix", PrivateMean)])
def test_a_planted_fault_is_seen_in_images_alone(key: str, vault: Any) -> None:
    """Without an assumption, beyond the claim of 1."""
    make = small(key, epsilon=1.0, secure=False, images_per_class=1, sampling_prob=1.0)
    assert distinguish(with_vault(make, vault), neighbours("outlier"), runs=24).bounds().clopper_pearson > 1.0


def test_runs_of_a_private_method_have_one_seed_and_others_do_not() -> None:
    """The attacker knows the seed, which is public; but forms without a guarantee draw their noise from it."""
    seeds: dict[str, list[int]] = {"ldpdc": [], "dm": []}
    for key, found in seeds.items():

        def make(key: str = key, found: list[int] = found, **params: Any) -> Any:
            found.append(params.get("seed", -1))
            return small(key, secure=False)(**params)

        distinguish(make, neighbours("duplicate"), runs=2)
    assert seeds == {"ldpdc": [-1, 0, 0, 0, 0], "dm": [-1, 0, 1, 2, 3]}


def test_the_score_is_learned_from_runs_that_are_not_counted() -> None:
    """Only one of three features tells; and what the counted runs look like does not change the score."""
    rng = np.random.default_rng(0)
    model = small("ldpdc", secure=False)()
    runs = module.Runs(model.plan(model.public_facts(neighbours("outlier").with_unit)), True)
    runs.present = list(rng.standard_normal((400, 3)) * [1, 5, 100] + [0, 10, 0])
    runs.absent = list(rng.standard_normal((400, 3)) * [1, 5, 100])
    present, absent = runs.scores()
    assert np.mean(present[100:, None] > absent[None, 100:]) > 0.85  # 0.92 for the feature itself
    runs.present[200:] = list(rng.standard_normal((200, 3)))
    again, _ = runs.scores()
    assert np.array_equal(again[:200], present[:200])


def test_the_images_of_a_run_are_summarised() -> None:
    pair = neighbours("outlier")
    model = small(Copies, secure=False)().fit(pair.with_unit)
    close, projection, contrast = summary(model, pair.canaries)
    assert close == pytest.approx(0.0, abs=1e-9)
    assert projection > 0
    assert contrast == pytest.approx(8.0, rel=0.01)  # 64 pixels of -1 and 1
    condensed = small("dpmix", secure=False)().fit(pair.with_unit)
    assert np.isfinite(summary(condensed, pair.canaries)).all()


def test_ctrl_c_keeps_whole_pairs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def interrupted(*_: Any, **__: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) > 19:
            raise KeyboardInterrupt
        return np.full(3, float(len(calls) % 2))

    monkeypatch.setattr(module, "summary", interrupted)
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
    audit = audit_one_run(small(Copies, secure=False), game)
    found = {each.attack.name: each for each in audit.results}
    assert audit.bound == max(each.one_run_gaussian or 0 for each in audit.results) > 1
    assert all(each.one_run <= audit.ceiling for each in audit.results)
    for name in ("nearest", "detail"):
        assert found[name].attack.auroc.low > 0.8
        assert found[name].one_run > 1.0
        assert found[name].one_run_gaussian > 1.0
        assert "better than guessing" in found[name].to_dict()["power"]
    private = audit_one_run(small("dp-merf", secure=False), game, shadows=3)
    assert [each.attack.name for each in private.results] == list(private.planned)
    assert set(private.planned) == {"nearest", "density", "loss", "detail", "calibrated loss"}
    assert not private.interrupted
    for each in private.results:
        assert each.one_run < 1.0  # the claim
        assert each.attack.detects or "says nothing about privacy" in each.power


def test_the_gaussian_form_is_left_out_for_sampled_releases(images: ImageSet) -> None:
    """A Poisson-sampled Gaussian has another trade-off curve: the f-DP form for Gaussians would not be valid."""
    game = new_game(images, canaries=100)
    for each in audit_one_run(small("dpmix", secure=False), game).results:
        assert each.one_run_gaussian is None
        assert each.to_dict()["one_run_gaussian"] is None


def test_a_planted_fault_is_found_in_one_run() -> None:
    """Mixtures of about one image, without noise, show the details of those that were used."""
    game = new_game(digits_of(*[150] * 4), canaries=250)
    settings = {"epsilon": 1.0, "secure": False, "images_per_class": 400, "sampling_prob": 0.002}
    found = audit_one_run(with_vault(small("dpmix", **settings), NoNoise), game)
    assert found.bound > 1.0
    assert found.certified is not None


def test_ctrl_c_and_time_keep_the_attacks_that_are_done(images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(images, canaries=60)
    make = small("ldpdc", secure=False)
    late = audit_one_run(make, game, shadows=1, seconds=0)
    assert late.interrupted
    assert [each.attack.name for each in late.results] == ["nearest"]
    fits: list[int] = []

    def interrupted(**params: Any) -> Any:
        fits.append(1)
        if len(fits) > 1:
            raise KeyboardInterrupt
        return make(**params)

    stopped = audit_one_run(interrupted, game, shadows=2)
    assert stopped.interrupted
    assert len(stopped.results) == len(stopped.planned) - 1
    assert stopped.to_dict()["interrupted"]
    monkeypatch.setattr(module.Attacker, "score", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # nothing was counted
        audit_one_run(make, game)
