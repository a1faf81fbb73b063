"""dp-diffusion and atelier with a prior: what is planned, what the certificate says, what the curriculum learns."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.methods.atelier import PRIOR_TEACHER_SHARE
from sfumato.methods.curriculum_painter import CurriculumPainter, _draw_rows
from sfumato.methods.embedding_painter import EmbeddingPainter
from sfumato.methods.prior_painter import PainterTraining, PriorPainter
from sfumato.methods.teacher import TeacherSettings
from sfumato.priors import PriorCard, load_prior, save_prior
from sfumato.testing import build

PRIOR = Path(__file__).parents[1] / "priors" / "tiny.safetensors"  # without an embedding
CONDITIONED = PRIOR.with_name("conditioned.safetensors")
ADAPTATION = PainterTraining(pool=40, rounds=2, practice_steps=2, practice_batch=8, levels=2)
QUICK: dict[str, Any] = {
    "prior": str(PRIOR),
    "steps": 2,
    "sampling_prob": 0.5,
    "adaptation": ADAPTATION,
    "device": "cpu",
    "epsilon": 20.0,
    "public_size": True,
}


def quick(key: str, **settings: Any) -> Any:
    own = {"teacher": TeacherSettings(steps=5)} if key == "atelier" else {}
    return build(key, **{**QUICK, **own, **settings})


def test_atelier_takes_the_painter_that_the_prior_is_made_for(few_digits: ImageSet) -> None:
    public = few_digits.public()
    for key, prior, kind in (
        ("atelier", PRIOR, CurriculumPainter),
        ("atelier", CONDITIONED, EmbeddingPainter),
        ("dp-diffusion", PRIOR, CurriculumPainter),
        ("dp-diffusion", CONDITIONED, CurriculumPainter),
    ):
        model = quick(key, prior=str(prior))
        assert type(model._painter(public)) is kind
        names = [release.name for release in model.plan(public).releases]
        assert ("moments" in names, "means" in names) == (kind is EmbeddingPainter, kind is CurriculumPainter)


@pytest.mark.parametrize(("key", "prior"), [("dp-diffusion", PRIOR), ("dp-diffusion", CONDITIONED), ("atelier", PRIOR)])
def test_the_certificate_names_the_prior_and_what_it_was_trained_on(
    key: str, prior: Path, few_digits: ImageSet, tmp_path: Path
) -> None:
    model = quick(key, prior=str(prior)).fit(few_digits, run_dir=tmp_path / "run")
    stated = model.certificate_.public_facts["prior"]
    assert stated == load_prior(prior).facts
    assert (stated["trained_on"], stated["taken_as"]) == ("random weights, for tests", "public")
    assert sf.verify(tmp_path / "run" / "certificate.json")
    again = sf.load(tmp_path / "run")
    assert torch.equal(model.sample(12, seed=3).images, again.sample(12, seed=3).images)


@pytest.mark.parametrize(("prior", "name"), [(PRIOR, "means"), (CONDITIONED, "moments")])
@pytest.mark.parametrize("declared", [True, False])
def test_the_budget_of_atelier_is_shared_as_it_says(
    few_digits: ImageSet, declared: bool, prior: Path, name: str
) -> None:
    model = quick("atelier", prior=str(prior), public_size=declared, epsilon=1.0, preset="prior", steps=50)
    plan = model.plan(few_digits.public(declare_size=declared))
    alone = sf.noise_multiplier(epsilon=1.0) ** -2
    shares = {r.name: r.times / r.noise**2 / alone for r in plan.releases}
    moments = 0.3 if prior == PRIOR else 0.5
    total = PRIOR_TEACHER_SHARE + moments
    counts = shares.pop("counts", 0.0)
    assert counts == pytest.approx(0.0 if declared else total / 17, rel=1e-2)
    assert shares["teacher"] == pytest.approx(PRIOR_TEACHER_SHARE * (total - counts) / total, rel=1e-2)
    found = sum(share for key, share in shares.items() if key.endswith(name))
    assert found == pytest.approx(moments * (total - counts) / total, rel=1e-2)
    assert plan.epsilon == pytest.approx(1.0, rel=1e-3)


def test_the_forms_release_what_they_say(few_digits: ImageSet) -> None:
    public = few_digits.public(declare_size=False)

    def names(**settings: Any) -> list[str]:
        return [release.name for release in quick("dp-diffusion", **settings).plan(public).releases]

    assert names() == ["counts", "means", "gradients"]
    assert names(curriculum=False) == ["counts", "gradients"]
    assert names(steps=0) == ["counts", "means"]
    assert names(curriculum=False, steps=0) == ["counts"]
    without = quick("atelier", steps=0).plan(public).releases
    assert [release.name for release in without] == ["counts", "means", "teacher"]


def test_images_without_classes(few_digits: ImageSet) -> None:
    plain = ImageSet(few_digits.images)
    for key in ("dp-diffusion", "atelier"):
        model = quick(key).fit(plain)
        assert model.sample(5).images.shape == (5, 1, 8, 8)
        assert "teacher" not in [release.name for release in model.plan(plain.public()).releases]


def test_without_noise_the_curriculum_follows_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes, bright and dark: what is drawn for the bright one is brighter. Shuffled labels teach nothing."""
    generator = torch.Generator().manual_seed(0)
    level = torch.arange(80) % 2
    noise = torch.randint(-20, 21, (80, 1, 8, 8), generator=generator)
    images = (60 + 140 * level[:, None, None, None] + noise).clamp(0, 255).byte()
    training = replace(
        ADAPTATION, rounds=1, practice_steps=100, practice_batch=16, practice_rate=1e-2, practice_ema=0.9
    )
    training = replace(training, practice_ema=0.9, strength=1000.0, levels=6)
    brightness = torch.randint(20, 236, (200, 1, 1, 1), generator=generator)  # any, and the same noise
    pool = (brightness + torch.randint(-20, 21, (200, 1, 8, 8), generator=generator)).byte()
    monkeypatch.setattr(CurriculumPainter, "_public_pool", lambda self, checkpoints: pool)

    def difference(labels: torch.Tensor) -> float:
        model = quick("dp-diffusion", epsilon=math.inf, steps=0, adaptation=training)
        model.fit(ImageSet(images, labels, ("dark", "bright")))
        drawn = [model.sample(60, labels=label, seed=1).images.float().mean() for label in (0, 1)]
        return float(drawn[1] - drawn[0])

    learned = difference(level)
    assert learned > 60
    assert abs(difference(level[torch.randperm(80, generator=generator)])) < learned / 2


def test_rows_are_drawn_with_their_weights() -> None:
    weights = torch.tensor([[0.0, 0.5], [1.0, 0.0], [0.0, 0.5]])
    labels = torch.arange(2).repeat(2000)
    drawn = _draw_rows(weights, labels, torch.Generator().manual_seed(0))
    assert (drawn[labels == 0] == 1).all()
    counts = torch.bincount(drawn[labels == 1], minlength=3)
    assert counts[1] == 0
    assert abs(int(counts[0]) - 1000) < 150  # six standard deviations


def test_private_gradients_change_only_what_they_tune(few_digits: ImageSet) -> None:
    before = load_prior(PRIOR).state
    for tune, kept in (("few", True), ("low-rank", False), ("all", False)):
        model = quick("dp-diffusion", curriculum=False, tune=tune).fit(few_digits)
        after = model.network_.state_dict()
        assert before.keys() == after.keys()
        same = torch.equal(before["unet.middle.first.weight"], after["unet.middle.first.weight"])
        assert same == kept, tune


def test_a_prior_that_changes_after_the_plan_is_refused(few_digits: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "prior.safetensors"
    path.write_bytes(PRIOR.read_bytes())
    model = quick("dp-diffusion", prior=str(path))
    check = PriorPainter.check_unchanged

    def swapped(self: PriorPainter, vault: Any) -> None:
        card = replace(self.prior.card, name="another")
        save_prior(path, card, self.prior.state)
        check(model._painter(model.public_facts(few_digits)), vault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PriorPainter, "check_unchanged", swapped)
        with pytest.raises(DataError, match="has changed"):
            model.fit(few_digits, run_dir=tmp_path / "run")


def test_errors_come_before_anything_is_spent(few_digits: ImageSet, tmp_path: Path) -> None:
    pickled = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, pickled)
    large = PriorCard("large", 1, 32, 1, (8, 8), 8, 0, "nothing", "none")
    save_prior(tmp_path / "large", large, large.new_network().state_dict())
    for prior, message in (
        ("tiny-imagnet", "did you mean 'tiny-imagenet'"),
        (str(pickled), "never read from a pickled file"),
        (str(tmp_path), "prior.safetensors is missing"),
        (str(tmp_path / "large"), "16 to 64, not 8 × 8"),
    ):
        for key in ("dp-diffusion", "atelier"):
            with pytest.raises(DataError, match=message):
                quick(key, prior=prior).fit(few_digits, run_dir=tmp_path / "run")
            assert not (tmp_path / "run").exists()


def test_a_prior_and_an_autoencoder_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave one out"):
        quick("atelier", autoencoder="taef2")


def test_auto_takes_atelier_where_there_is_a_prior() -> None:
    assert sf.create(device="cpu", prior=str(PRIOR)).key == "atelier"
    assert sf.create(device="cpu").key == "dp-merf"


@pytest.mark.parametrize(
    ("key", "settings", "message"),
    [
        ("dp-diffusion", {"steps": 1}, "at least 2"),
        ("dp-diffusion", {"means_share": 1.0}, "between 0 and 1"),
        ("atelier", {"steps": 1}, "at least 2, or 0 for no private gradients"),
        ("atelier", {"steps": 0, "prior": ""}, "steps must be greater than 0"),
        ("atelier", {"teacher": TeacherSettings(steps=1)}, "at least 2 steps"),
    ],
)
def test_settings_that_would_fail_late_are_refused_first(key: str, settings: dict[str, Any], message: str) -> None:
    """A release that is made once has discrete noise, which gradients do not have."""
    with pytest.raises(ValueError, match=message):
        quick(key, **settings)


@pytest.mark.parametrize(
    "settings", [{"bound": 0.0}, {"views": 0}, {"pool": 1}, {"rounds": -1}, {"levels": 1}], ids=str
)
def test_an_adaptation_out_of_range_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PainterTraining(**settings)


def test_soft_labels_without_classes_are_refused_before_anything_is_spent(few_digits: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no teacher"):
        quick("atelier", soft_labels=True).fit(ImageSet(few_digits.images), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_certificate_says_what_is_not_protected(few_digits: ImageSet) -> None:
    model = quick("dp-diffusion", curriculum=False).fit(few_digits)
    assert any("random weights, for tests" in caveat for caveat in model.certificate_.caveats)


def test_a_prior_that_changes_after_the_fit_is_refused(few_digits: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "prior.safetensors"
    path.write_bytes(PRIOR.read_bytes())
    quick("dp-diffusion", prior=str(path)).fit(few_digits, run_dir=tmp_path / "run")
    prior = load_prior(path)
    save_prior(path, replace(prior.card, trained_on="something else"), prior.state)
    with pytest.raises(DataError, match="'prior' is not the one"):
        sf.load(tmp_path / "run")


def test_the_checkpoint_of_another_run_is_refused(few_digits: ImageSet, tmp_path: Path) -> None:
    """Even one that no release has gone into: images of the prior are kept before the first release."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CurriculumPainter, "_practise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quick("dp-diffusion").fit(few_digits, run_dir=tmp_path)
    assert (tmp_path / "checkpoint.safetensors").exists()
    for name in ("ledger.jsonl", "ledger.lock", "releases.log"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(sf.LedgerError, match="another run"):
        quick("dp-diffusion", seed=1).fit(few_digits, run_dir=tmp_path)
