"""tuned: the price of a choice, what is chosen, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch

import sfumato as sf
from sfumato.audit.small_settings import SMALL_SETTINGS
from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault
from sfumato.methods.tuned import SCORE_SHARE, Scores, ScoringSettings, Tuned
from sfumato.privacy.ledger import LedgerError
from sfumato.testing import UnsoundError, build, check_synthesizer

QUICK = {"features": 100, "steps": 2, "batch_size": 20}


def tuned(*candidates: dict[str, Any], base: str = "dp-merf", **settings: Any) -> Any:
    grid = json.dumps([{**(QUICK if base == "dp-merf" else {}), **each} for each in candidates])
    own = {"scoring": ScoringSettings(images=200, epochs=10, batch_size=32, learning_rate=3e-3)}
    return build("tuned", base=base, grid=grid, device="cpu", **{**own, **settings})


def test_the_certificate_states_the_price_of_the_choice(few_digits: ImageSet, tmp_path: Path) -> None:
    """The closed form of the docstring: all candidates and the scores together are one Gaussian release."""
    model = tuned({}, {"features": 60}, {"features": 30}, epsilon=2.0, public_size=True, secure=False)
    model.fit(few_digits, run_dir=tmp_path / "run")
    events = {event["name"]: event for event in model.certificate_.events}
    assert len(events) == 4
    alone = sf.create("dp-merf", epsilon=2.0, public_size=True, **QUICK).plan(few_digits.public(declare_size=True))
    (release,) = alone.releases
    for number in (1, 2, 3):
        factor = math.sqrt(3 / (1 - SCORE_SHARE))
        noise = events[f"try{number}-{release.name}"]["noise_multiplier"]
        assert noise == pytest.approx(release.noise * factor, rel=1e-3)
    precision = sum(event["times"] / event["noise_multiplier"] ** 2 for event in events.values())
    assert events["scores"]["noise_multiplier"] ** -2 == pytest.approx(SCORE_SHARE * precision, rel=1e-3)
    price = dp_accounting.get_epsilon_gaussian(precision**-0.5, 1e-5)
    assert model.certificate_.epsilon == pytest.approx(price, rel=1e-5)
    assert model.certificate_.epsilon == pytest.approx(2.0, rel=1e-3)
    assert sf.verify(tmp_path / "run" / "certificate.json")
    with sf.Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        assert all(ledger.charged(name) == event["times"] for name, event in events.items())  # the losers, too
    again = sf.load(tmp_path / "run")
    assert torch.equal(again.sample(9, seed=2).images, model.sample(9, seed=2).images)
    assert again.chosen_ == model.chosen_


def test_an_uncharged_choice_would_be_cheaper_than_it_is(few_digits: ImageSet) -> None:
    """What a plan without the losers would claim for the same noise is below what it costs."""
    plan = tuned({}, {"features": 60}, epsilon=1.0, public_size=True).plan(few_digits.public(declare_size=True))
    kept = [release for release in plan.releases if not release.name.startswith("try2")]
    claimed = dp_accounting.get_epsilon_gaussian(sum(r.times / r.noise**2 for r in kept) ** -0.5, 1e-5)
    assert claimed < 0.75 * plan.epsilon


def test_the_better_candidate_is_chosen(digits: ImageSet) -> None:
    """Without noise: a generator that was trained, beside one of a single step."""
    few = digits.subset(range(300))
    model = tuned({"steps": 1}, {"steps": 150}, {"steps": 2}, epsilon=math.inf, public_size=True).fit(few)
    assert model.chosen_ == 1
    assert model.model_.steps == 150
    assert float(model.scores_.max()) <= len(few)


def test_scores_have_norm_at_most_one() -> None:
    networks = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)) for _ in range(5)]
    with torch.no_grad():
        rows = Scores(networks)(100 * torch.randn(50, 1, 2, 2), torch.arange(50) % 3)
    assert rows.shape == (50, 5)
    assert float(rows.norm(dim=1).max()) <= 1
    assert bool((rows >= 0).all())


def test_a_candidate_without_scores_does_not_silence_the_others() -> None:
    """A CNN that diverged gives NaN. A row with a NaN counts as zero, so that noise alone would choose."""
    broken, fine = (torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)) for _ in range(2))
    with torch.no_grad():
        broken[1].weight.fill_(math.nan)
        rows = Scores([broken, fine])(torch.randn(50, 1, 2, 2), torch.arange(50) % 3)
        alone = Scores([fine])(torch.ones(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64))
    assert bool(rows.isfinite().all())
    assert float(rows[:, 0].abs().max()) == 0
    assert float(rows[:, 1].min()) > 0
    assert float(alone) > 0


def test_the_number_of_candidates_is_fixed_before_the_first_image(few_digits: ImageSet, tmp_path: Path) -> None:
    """A run that was stopped after it saw the scores cannot go on with other candidates, nor without the losers."""

    class Stopped(Tuned):
        def _classifier(self, *given: Any) -> Any:
            raise KeyboardInterrupt

    two, settings = json.dumps([QUICK, {**QUICK, "features": 60}]), {"device": "cpu", "epsilon": 2.0, "secure": False}
    with pytest.raises(KeyboardInterrupt):
        build(Stopped, grid=two, **settings).fit(few_digits, run_dir=tmp_path / "run")
    for other in ([QUICK, {**QUICK, "features": 30}, QUICK], [QUICK, {**QUICK, "steps": 3}]):
        changed = build("tuned", grid=json.dumps(other), **settings)
        with pytest.raises(LedgerError, match="opened with another"):
            changed.fit(few_digits, run_dir=tmp_path / "run", resume=True)


class FreeChoice(Tuned):
    """The author adds the scores without noise to those that were paid for."""

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        super()._fit(vault, public)
        assert vault._labels is not None
        images = to_unit_range(vault._images)
        networks = [self._classifier(each, public) for each in (self.model_,)]
        self.scores_ = self.scores_ + Scores(networks)(images, vault._labels).sum(0)


def test_a_choice_by_scores_without_noise_is_caught(fewer_digits: ImageSet) -> None:
    with pytest.raises(UnsoundError, match="depends on"):
        check_synthesizer(
            lambda **given: build(FreeChoice, device="cpu", **SMALL_SETTINGS["tuned"], **given), fewer_digits
        )


def test_candidates_of_several_releases(few_digits: ImageSet) -> None:
    """Counts and sums over samples: each candidate finds its own under its own names."""
    small = {"iterations": 2, "sampling_prob": 0.5, "images_per_class": 3}
    model = tuned(small, {**small, "iterations": 3}, base="ndpdc", epsilon=5.0, secure=False)
    names = [release.name for release in model.plan(few_digits.public()).releases]
    assert names == ["try1-counts", "try1-sums", "try2-counts", "try2-sums", "scores"]
    model.fit(few_digits)
    assert model.certificate_.epsilon == pytest.approx(5.0, rel=5e-3)
    assert len(model.sample(model.max_samples(few_digits.public()))) == 3 * len(few_digits.classes)


@pytest.mark.slow
def test_candidates_with_gradients(few_digits: ImageSet) -> None:
    small = {"steps": 2, "sampling_prob": 0.5, "warm": "none"}
    model = tuned(small, {**small, "steps": 3}, base="dp-lflow", epsilon=5.0).fit(few_digits)
    assert {"try1-gradients", "try2-gradients"} <= {event["name"] for event in model.certificate_.events}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": "[{}]"}, "2 to 50"),
        ({"grid": "{}"}, "JSON list"),
        ({"grid": "no JSON"}, "JSON list"),
        ({"grid": '[{"epsilon": 1}, {"epsilon": 2}]'}, "the same for all"),
        ({"grid": '[{"step": 1}, {"steps": 2}]'}, "did you mean 'steps'"),
        ({"base": "dm", "grid": "[{}, {}]"}, "not private"),
        ({"base": "tuned", "grid": "[{}, {}]"}, "cannot be tuned"),
    ],
)
def test_bad_grids_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("tuned", **settings).validate()


def test_images_without_classes_are_refused(few_digits: ImageSet) -> None:
    with pytest.raises(DataError, match="at least two classes"):
        tuned({}, {"features": 60}).plan(ImageSet(few_digits.images).public())
