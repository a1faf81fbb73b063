"""Atelier: what is released, what the teacher learns, and what becomes of images on which it disagrees."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods import load
from sfumato.methods.atelier import CPU, ENCODER_NOTE, Atelier
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.teacher import Components, TeacherSettings
from sfumato.testing import _check_neighbours, build

TEACHER = TeacherSettings(
    steps=30,  # with ten the rate is high, and the teacher fails once in a hundred times
    cnn_images=200,
)
PAINTER = replace(CPU, features=40, features_per_step=20, cnn_images=200, smoothness=0.6)
QUICK: dict[str, Any] = {
    "steps": 6,
    "device": "cpu",
    "public_size": True,
    "epsilon": 20.0,
    "paths": 2,
    "batch_size": 40,
    "painter": PAINTER,
    "teacher": TEACHER,
    "generator": GeneratorSizes(width=8),
}


def quick(**settings: Any) -> Any:
    return build(Atelier, **{**QUICK, **settings})


@pytest.fixture(scope="module")
def fitted(few_digits: ImageSet) -> Atelier:
    return quick().fit(few_digits)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_the_budget_is_shared_as_it_says(few_digits: ImageSet, share: float) -> None:
    plan = quick(teacher_share=share).plan(few_digits.public(declare_size=True))
    sums, common, teacher = ((plan[name].times / plan[name].noise ** 2) for name in ("sums", "common", "teacher"))
    assert teacher / (sums + common + teacher) == pytest.approx(share)
    assert sums == pytest.approx(common)
    assert plan.epsilon == pytest.approx(20.0, rel=1e-3)


@pytest.mark.parametrize(
    ("epsilon", "sizes", "steps"),
    [(10.0, (30_000, 30_000), 200), (10.0, None, 200), (10.0, (4_000, 4_000), 60), (1.0, (30_000, 30_000), 60)],
)
def test_there_is_more_to_learn_where_there_is_less_noise(
    epsilon: float, sizes: tuple[int, int] | None, steps: int
) -> None:
    public = PublicFacts((1, 28, 28), ("a", "b"), labelled=True, sizes=sizes)
    model = Atelier(epsilon=epsilon, device="cpu", preset="default")
    assert model.plan(public)["teacher"].times == steps


@pytest.mark.parametrize(
    ("epsilon", "sizes", "there"),
    [(0.2, 6_000, True), (1.0, 6_000, False), (1.0, 1_400, True), (0.2, None, True), (10.0, None, False)],
)
def test_what_classes_have_in_common_is_asked_for_where_there_is_much_noise(
    epsilon: float, sizes: int | None, there: bool
) -> None:
    public = PublicFacts((1, 28, 28), tuple("abcdefghij"), labelled=True, sizes=(sizes,) * 10 if sizes else None)
    model = Atelier(epsilon=epsilon, device="cpu")
    assert ("common" in [release.name for release in model.plan(public).releases]) == there
    forced = build(Atelier, epsilon=epsilon, device="cpu", painter=replace(CPU, common_threshold=0.0)).plan(public)
    assert "common" in [release.name for release in forced.releases]


def test_the_high_noise_preset_applies_by_public_facts_and_never_to_what_was_given(few_digits: ImageSet) -> None:
    public = PublicFacts((1, 28, 28), tuple("abcdefghij"), labelled=True, sizes=(6_000,) * 10)

    def sources(**params: Any) -> dict[str, str]:
        found = Atelier(**{"device": "cpu", **params}).settings(public)
        return {setting.name: setting.source for setting in found}

    for epsilon in (1.0, math.inf):
        assert sources(epsilon=epsilon)["painter.features_per_step"] == "preset cpu"
        assert sources(epsilon=epsilon)["painter.features"] == "default"
    for params in ({"epsilon": 0.2}, {"epsilon": 10.0, "preset": "high-noise"}):
        assert sources(**params)["painter.smoothness"] == "preset high-noise"
    assert sources(epsilon=0.2)["steps"] == "preset high-noise"
    assert sources(epsilon=0.2, steps=4500)["steps"] == "given", "also a value that equals the default"
    assert sources(epsilon=0.2, preset="default")["painter.smoothness"] == "default"
    assert Atelier(epsilon=1.0).explain_plan(public) == []
    assert Atelier(epsilon=1.0, encoder="vgg11").explain_plan(public) == [ENCODER_NOTE]
    model = Atelier(epsilon=0.2, autoencoder="taef2", device="cpu")
    assert model._resolved(public)._painter(replace(public, shape=(1, 64, 64))).settings.smoothness == 0
    model = quick().fit(few_digits)
    assert model.certificate_.parameters["painter"]["smoothness"] == 0.6
    assert model.certificate_.parameters["steps"] == QUICK["steps"]


def test_the_plan_lists_the_settings_that_are_used_and_why() -> None:
    public = PublicFacts((1, 28, 28), tuple("abcdefghij"), labelled=True, sizes=(3_000,) * 10)

    def listed(model: Atelier) -> dict[str, tuple[object, str]]:
        return {each.name: (each.value, each.source) for each in model.settings(public)}

    found = listed(Atelier(epsilon=1.0, device="cpu"))
    rate, source = found["teacher.rate"]
    assert isinstance(rate, float)
    assert 0 < rate < 60
    assert source == "default 60, by the noise of 30,000 images"
    assert found["teacher.components"] == (500, "default 0, by the noise of 30,000 images")
    assert found["painter.common_share"] == (0.0, "default 0.5, less noise than common_threshold")
    assert listed(Atelier(epsilon=0.2, device="cpu"))["painter.common_share"] == (0.5, "default")
    assert not [name for name in found if name.startswith("adaptation.") or name == "sampling_prob"]
    assert listed(Atelier(epsilon=100.0, device="cpu"))["teacher.components"][0] == 1500
    with_prior = listed(Atelier(prior="random-process", variety=0.5, device="cpu"))
    assert with_prior["variety"] == (0.5, "given, not used")
    assert with_prior["disagreement"] == ("drop", "default relabel, with a prior")
    assert found["disagreement"] == ("relabel", "default")
    keeping = listed(Atelier(prior="random-process", disagreement="keep", device="cpu"))
    assert keeping["disagreement"] == ("keep", "given")
    assert "adaptation.levels" in with_prior
    assert not [name for name in with_prior if name.startswith(("painter.", "generator."))]


def test_the_teacher_learns_the_private_classes(fitted: Atelier, few_digits: ImageSet) -> None:
    """The painter has hardly begun, so what the teacher knows it has from its own releases."""
    assert few_digits.labels is not None
    seen = fitted.probabilities(few_digits)
    assert torch.allclose(seen.sum(1), torch.ones(len(seen)), atol=1e-5)
    assert (seen.argmax(1) == few_digits.labels).float().mean() > 0.6
    others = ImageSet(few_digits.images, (few_digits.labels + 1) % 3, few_digits.classes)
    seen = quick().fit(others).probabilities(few_digits)
    assert (seen.argmax(1) == others.labels).float().mean() > 0.5


def test_images_are_of_the_class_that_the_teacher_sees(fitted: Atelier) -> None:
    agreed = {}
    for way in ("keep", "drop", "relabel"):
        fitted.disagreement = way
        made = fitted.sample(100)
        assert made.labels is not None
        agreed[way] = float((fitted.probabilities(made).argmax(1) == made.labels).float().mean())
    assert agreed["relabel"] > agreed["keep"] + 0.2
    assert agreed["drop"] >= agreed["keep"]


def test_variety_is_between_classes_and_the_teacher_says_of_which(fitted: Atelier) -> None:
    plain, varied = (fitted.sample(60, disagreement="relabel", variety=variety) for variety in (0.0, 1.0))
    assert plain.labels is not None
    assert varied.labels is not None
    assert torch.equal(plain.labels, varied.labels)
    assert not torch.equal(plain.images, varied.images)
    for made in (plain, varied):
        assert (fitted.probabilities(made).argmax(1) == made.labels).float().mean() > 0.8
    for way in ("keep", "drop"):
        alike = [fitted.sample(20, disagreement=way, variety=variety).images for variety in (0.0, 1.0)]
        assert torch.equal(*alike), "what is labelled as it was meant is painted as it was meant"
    with pytest.raises(ValueError, match="variety must lie between 0 and 1"):
        fitted.sample(1, variety=1.5)


def test_what_was_adjusted_after_the_fit_is_saved(fitted: Atelier, tmp_path: Path) -> None:
    again = load(fitted.save(tmp_path / "first"), device="cpu").set_params(variety=0.25, disagreement="drop")
    last = load(again.save(tmp_path / "last"), device="cpu")
    assert isinstance(last, Atelier)
    assert (last.variety, last.disagreement) == (0.25, "drop")
    assert last.certificate_.parameters["variety"] == 1, "the certificate is of the fit"


def test_origins_are_how_often_the_painter_meant_a_class_that_is_seen(fitted: Atelier) -> None:
    assert torch.allclose(fitted.origins_.sum(1), torch.ones(len(fitted.origins_)))
    assert (fitted.origins_ >= 0).all()


def test_a_saved_model_paints_and_sees_the_same(fitted: Atelier, few_digits: ImageSet, tmp_path: Path) -> None:
    fitted.disagreement = "relabel"
    again = load(fitted.save(tmp_path / "model"), device="cpu")
    assert isinstance(again, Atelier)
    assert torch.equal(again.sample(40).images, fitted.sample(40).images)
    assert torch.allclose(again.probabilities(few_digits), fitted.probabilities(few_digits), atol=1e-6)


def test_soft_labels_are_what_the_teacher_sees(fitted: Atelier, tmp_path: Path) -> None:
    assert fitted.sample(30).soft_labels is None
    made = fitted.sample(30, soft_labels=True)
    assert made.soft_labels is not None
    assert torch.equal(made.soft_labels, fitted.probabilities(made))
    assert torch.equal(made.images, fitted.sample(30).images)
    again = load(quick(soft_labels=True).fit(made, run_dir=tmp_path).save(tmp_path), device="cpu")
    assert again.sample(5).soft_labels is not None


def test_the_teacher_may_use_a_public_encoder(
    encoder: str, few_digits: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sfumato.methods.teacher.ENCODER_SIDE", 16)
    model = quick(encoder=encoder).fit(few_digits, run_dir=tmp_path)
    facts = model.certificate_.public_facts
    assert facts["encoder"]["trained_on"] == "random numbers"
    again = load(tmp_path, device="cpu")
    assert isinstance(again, Atelier)
    assert torch.allclose(again.probabilities(few_digits), model.probabilities(few_digits), atol=1e-6)


@pytest.mark.usefixtures("averages")
def test_the_teacher_sees_an_autoencoders_maps(large_digits: ImageSet, tmp_path: Path) -> None:
    assert large_digits.labels is not None
    model = quick(autoencoder="taef2").fit(large_digits, run_dir=tmp_path)
    assert (model.probabilities(large_digits).argmax(1) == large_digits.labels).float().mean() > 0.6
    made = model.sample(30, soft_labels=True)
    assert made.shape == large_digits.shape
    assert made.soft_labels is not None
    assert (made.soft_labels.argmax(1) == made.labels).float().mean() > 0.5
    assert torch.equal(load(tmp_path, device="cpu").sample(30).images, made.images)


@pytest.mark.usefixtures("averages")
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_maps_are_painted_and_seen_soundly(fewer_large_digits: ImageSet, adjacency: str) -> None:
    options = {
        "steps": 1,
        "paths": 1,
        "painter": replace(PAINTER, cnn_images=20),
        "teacher": TeacherSettings(steps=2, cnn_images=20),
        "autoencoder": "taef2",
        "public_size": False,
    }
    make = lambda **params: quick(**{**options, **params})  # noqa: E731
    _check_neighbours(make, fewer_large_digits, 21, adjacency, GradientVault)


def test_without_classes_the_painter_works_alone(few_digits: ImageSet) -> None:
    model = quick().fit(ImageSet(few_digits.images))
    assert [event["name"] for event in model.certificate_.events] == ["sums"]
    assert len(model.sample(5)) == 5
    with pytest.raises(DataError, match="no teacher"):
        model.probabilities(few_digits)
    with pytest.raises(DataError, match="no teacher"):
        quick(soft_labels=True).plan(ImageSet(few_digits.images).public())


def test_components_are_level_and_of_mean_norm_one() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(0, -2, 20)
    rows = 3 + torch.randn(500, 20, generator=generator) * spread
    scaled = Components.of(rows, 500, seed=0)(rows)
    assert scaled.norm(dim=1).mean().item() == pytest.approx(1.0, rel=1e-5)
    ratio = float(scaled.std(0)[0] / scaled.std(0)[19])
    assert ratio == pytest.approx(math.sqrt(100), rel=0.3)  # 100 before, levelled by its root


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"disagreement": "shout"}, "relabel"),
        ({"teacher_share": 1.0}, "between 0 and 1"),
        ({"autoencoder": "taef2", "encoder": "vgg11"}, "leave one out"),
    ],
)
def test_bad_settings_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**params)
