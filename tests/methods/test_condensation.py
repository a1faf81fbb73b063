"""Condensed sets: a few images per class and no more; matching that matches; unequal classes; parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.audit.small_settings import SMALL_SETTINGS
from sfumato.data import DataError, ImageSet, PublicFacts, load_images
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault
from sfumato.evaluate import downstream_accuracy
from sfumato.evaluate.utility import Recipe
from sfumato.methods.condensation import Condenser, Matcher, RandomViews
from sfumato.methods.dpdc import NonlinearCondenser
from sfumato.methods.registry import create, load
from sfumato.nets.random_convnet import depth_for, draw_networks, embed
from sfumato.privacy import BudgetExceeded, Ledger
from sfumato.synthesize import synthesize
from sfumato.testing import UnsoundError, build, check_synthesizer

CONDENSERS = ("ldpdc", "ndpdc", "dpmix")
QUICK: dict[str, dict[str, Any]] = {
    "ldpdc": {"sampling_prob": 0.2},
    "ndpdc": {"sampling_prob": 0.2, "iterations": 5, "width": 8},
    "dpmix": {"sampling_prob": 0.05},
}


def quick(key: str, **params: Any) -> Condenser:
    model = build(key, **{"images_per_class": 4, "device": "cpu", **QUICK[key], **params})
    assert isinstance(model, Condenser)
    return model


# -- the random networks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 48), (1, 8, 8), (1, 20, 33)])
def test_embeddings_are_rows_of_their_images(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    networks = draw_networks(2, shape, generator, 16)
    assert len(networks) == depth_for(shape)
    images = torch.rand(5, *shape, generator=generator) * 2 - 1
    first, second = ([weights[n] for weights in networks] for n in range(2))
    rows = embed(images, first)
    assert torch.allclose(rows[3:], embed(images[3:], first), atol=1e-4)
    assert not torch.allclose(rows, embed(images, second), atol=0.1)


def test_images_of_28_pixels_give_the_papers_2048_features() -> None:
    networks = draw_networks(1, (1, 28, 28), torch.Generator().manual_seed(0))
    assert embed(torch.zeros(1, 1, 28, 28), [weights[0] for weights in networks]).shape == (1, 2048)


def test_differences_from_the_class_mean_are_short(digits: ImageSet) -> None:
    """Why rows are differences: most of an embedding is what its class has in common."""
    assert digits.labels is not None
    generator = torch.Generator().manual_seed(0)
    weights = [layer[0] for layer in draw_networks(1, digits.shape, generator, 64)]
    rows = torch.nn.functional.normalize(embed(digits.images.float() / 127.5 - 1, weights))
    means = torch.stack([rows[digits.labels == label].mean(0) for label in range(10)])
    assert (rows - means[digits.labels]).norm(dim=1).mean() < 0.5


# -- matching -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [True, False])
def test_pulling_towards_real_means_brings_them_nearer(unit: bool, digits: ImageSet) -> None:
    assert digits.labels is not None
    public = digits.public()
    generator = torch.Generator().manual_seed(0)
    views = RandomViews(public, generator, width=16, flip=False)
    rate = 2.0 if not unit else 1000.0
    matcher = Matcher(public, 5, 60, generator, unit=unit, learning_rate=rate, momentum=0.5, decay=True, average=0.1)
    real = digits.images.float() / 127.5 - 1
    members = torch.nn.functional.one_hot(digits.labels, 10).float()
    distances = []
    for _ in range(60):
        view = views.next()
        rows = view(real, digits.labels)
        rows = torch.nn.functional.normalize(rows) if unit else rows
        difference = (members.T @ rows) / members.sum(0)[:, None] - matcher.means(view)
        distances.append(float(difference.square().sum()))
        matcher.step(view, difference)
    assert sum(distances[-5:]) < 0.3 * sum(distances[:5])
    assert matcher.result().abs().max() <= 1
    assert not torch.equal(matcher.result(), matcher.images)  # an average


def test_views_are_drawn_again(digits: ImageSet) -> None:
    views = RandomViews(digits.public(), torch.Generator().manual_seed(0), width=8, flip=False)
    first = [views.next() for _ in range(3)]
    views.restart()
    for view in first:
        again = views.next()
        assert all(torch.equal(a, b) for a, b in zip(view.tensors(), again.tensors(), strict=True))
    assert view.tensors()[0].shape[0] == 8
    assert views.features == view(digits.images[:1].float(), digits.labels[:1]).shape[1]


class AskedAgain(NonlinearCondenser):
    """The author asks for the sums again in the second pass, instead of keeping what was released."""

    def _match_again(self, views: RandomViews, matcher: Matcher, kept: torch.Tensor, scale: float) -> None:
        self.vault.sum(lambda images: images.flatten(1), release="sums", bound=self.bound, by_class=True)

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        self.vault = vault
        super()._fit(vault, public)


class FreshNoise(NonlinearCondenser):
    """Dosser's fault: sums are stored without noise, and get fresh noise whenever they are used."""

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        self.vault = vault
        super()._fit(vault, public)
        del self.vault

    def _match_again(self, views: RandomViews, matcher: Matcher, kept: torch.Tensor, scale: float) -> None:
        exact = to_unit_range(self.vault._images).flatten(1).sum(1)
        super()._match_again(views, matcher, kept + exact.sum() + torch.randn(kept.shape), scale)


def test_a_release_is_not_drawn_again(fewer_digits: ImageSet) -> None:
    with pytest.raises(BudgetExceeded, match="spent"):
        build(AskedAgain, device="cpu", **SMALL_SETTINGS["ndpdc"]).fit(fewer_digits)


def test_stored_sums_without_noise_are_caught(fewer_digits: ImageSet) -> None:
    with pytest.raises(UnsoundError, match="depends on"):
        check_synthesizer(
            lambda **given: build(FreshNoise, device="cpu", **SMALL_SETTINGS["ndpdc"], **given), fewer_digits
        )


def test_further_passes_cost_nothing_and_match_better(digits: ImageSet) -> None:
    """Without noise and in one network, which the second and later passes see again."""
    few = digits.subset(range(200))
    plans = [quick("ndpdc", passes=passes).plan(few.public()) for passes in (1, 5)]
    assert plans[0] == plans[1]
    errors = []
    for passes in (1, 6):
        settings = {"epsilon": math.inf, "sampling_prob": 1.0, "bound": 2.0, "augmentation": False, "public_size": True}
        model = quick("ndpdc", passes=passes, iterations=10, learning_rate=5.0, **settings).fit(few)
        assert [event["times"] for event in model.certificate_.events] == [10]
        views = RandomViews(few.public(), torch.Generator().manual_seed(1), width=8, flip=None)
        view, distance = views.next(), 0.0
        for label in range(10):
            real = few.images[few.labels == label].float() / 127.5 - 1
            made = model.images_[model.labels_ == label]
            means = [
                torch.nn.functional.normalize(view(images, torch.full((len(images),), label))).mean(0)
                for images in (real, made)
            ]
            distance += float((means[0] - means[1]).square().sum())
        errors.append(distance)
    assert errors[1] < 0.7 * errors[0]


def test_smooth_steps_are_smooth_and_as_strong() -> None:
    public = PublicFacts((1, 16, 16), ("a",), True, None)

    def moved(smoothness: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        views = RandomViews(public, generator, width=16, flip=None)
        start = torch.zeros(8, 1, 16, 16)
        start += 0.1 * torch.randn(start.shape, generator=generator)
        matcher = Matcher(
            public,
            8,
            1,
            generator,
            unit=True,
            learning_rate=1.0,
            momentum=0.0,
            smoothness=smoothness,
            start=start.clone(),
        )
        view = views.next()
        matcher.step(view, torch.randn(1, matcher.means(view).shape[1], generator=generator))
        return matcher.images - start

    rough, smooth = moved(0.0), moved(0.2)

    def roughness(step: torch.Tensor) -> float:
        return float(step.diff(dim=3).square().mean() / step.square().mean())

    assert roughness(smooth) < 0.3 * roughness(rough)
    assert 0.3 < float(smooth.norm() / rough.norm()) < 5


def test_many_classes_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    public = PublicFacts((1, 8, 8), tuple("abcdefg"), True, None)

    def run() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        views = RandomViews(public, generator, width=8, flip=True)
        matcher = Matcher(public, 3, 2, generator, unit=True, learning_rate=100.0, momentum=0.5)
        for _ in range(2):
            view = views.next()
            matcher.step(view, torch.ones_like(matcher.means(view)))
        return matcher.images

    whole = run()
    monkeypatch.setattr("sfumato.methods.condensation.CHUNK", 7)
    assert torch.allclose(whole, run(), atol=1e-4)


# -- what a user meets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CONDENSERS)
def test_a_condensed_set_gives_each_image_once_and_no_more(key: str, digits: ImageSet) -> None:
    model = quick(key, epsilon=5.0).fit(digits)
    most = model.max_samples(digits.public())
    assert most == 40
    whole = model.sample(most)
    assert whole.labels is not None
    assert len(torch.unique(whole.images.flatten(1), dim=0)) == most
    few = model.sample(12, seed=1)
    assert all((whole.images == image).flatten(1).all(1).any() for image in few.images)
    with pytest.raises(ValueError, match=r"cannot draw more.*images_per_class"):
        model.sample(most + 1)
    label = int(whole.labels[0])
    with pytest.raises(ValueError, match="were asked for"):
        model.sample(most, labels=label)


def test_synth_takes_all_there_is_and_refuses_more_before_anything_is_spent(tmp_path: Path, digits: ImageSet) -> None:
    with pytest.raises(DataError, match="creates at most 40 images"):
        synthesize(quick("ldpdc"), digits, tmp_path / "a", number=41)
    assert not (tmp_path / "a" / "ledger.jsonl").exists()
    assert synthesize(quick("ldpdc"), digits, tmp_path / "b").number == 40
    assert len(load(tmp_path / "b").sample(40)) == 40


@pytest.mark.parametrize("key", CONDENSERS)
def test_colour_images_that_are_not_square_and_have_no_labels(key: str) -> None:
    generator = torch.Generator().manual_seed(0)
    images = ImageSet((torch.rand(60, 3, 16, 12, generator=generator) * 255).byte(), None, ("all",))
    made = quick(key).fit(images).sample(4)
    assert made.shape == (3, 16, 12)
    assert not made.labelled


def test_a_group_size_needs_sizes_that_are_public(digits: ImageSet) -> None:
    with pytest.raises(DataError, match=r"declare them public.*sampling_prob"):
        quick("ndpdc", group_size=20).fit(digits)


def test_with_unequal_classes_the_probability_is_that_of_the_smallest(digits: ImageSet) -> None:
    assert digits.labels is not None
    keep = (digits.labels != 3) | (torch.arange(len(digits)) % 4 == 0)
    images = digits.subset(keep)
    model = quick("ndpdc", group_size=20, public_size=True)
    public = model.public_facts(images)
    assert public.sizes is not None
    assert max(public.sizes) > 2 * min(public.sizes)
    (event,) = model.plan(public).releases
    assert event.sampling_prob == pytest.approx(20 / min(public.sizes))
    model.fit(images)
    assert model.certificate_.epsilon is not None


def test_noise_may_be_given_and_epsilon_is_then_a_limit(digits: ImageSet) -> None:
    plan = quick("ndpdc", noise_multiplier=5.0, epsilon=50.0, public_size=True, group_size=20)
    found = plan.plan(plan.public_facts(digits))
    assert found["sums"].noise == 5.0
    assert found.epsilon < 5
    with pytest.raises(BudgetExceeded, match="the budget is"):
        quick("ndpdc", noise_multiplier=0.5, public_size=True, group_size=20).fit(digits)


@pytest.mark.parametrize(
    "params",
    [
        {"group_size": 0},
        {"group_size": "many"},
        {"noise_multiplier": -1.0},
        {"sampling_prob": 1.5},
        {"smoothness": -0.1},
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        quick("ndpdc", **params)


def test_the_papers_form_is_a_matter_of_parameters(digits: ImageSet) -> None:
    paper = {"residual": False, "bound": 1.0, "start": 1.0, "learning_rate": 1.0, "decay": False}
    model = quick("ndpdc", **paper, smoothness=0.0, average=0.0, momentum=0.5).fit(digits)
    assert len(model.sample(40)) == 40


def test_an_interrupted_run_goes_on(tmp_path: Path, digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "step", fail)
        with pytest.raises(KeyboardInterrupt):
            quick("ndpdc").fit(digits, run_dir=tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        assert ledger.charged("sums") == 1
    model = quick("ndpdc").fit(digits, run_dir=tmp_path / "run", resume=True)
    assert {event["name"]: event["times"] for event in model.certificate_.events}["sums"] == 5


def test_ldpdc_is_the_average_of_its_sample_when_there_is_no_noise(digits: ImageSet) -> None:
    assert digits.labels is not None
    model = create("ldpdc", epsilon=math.inf, sampling_prob=1.0, images_per_class=2, public_size=True, device="cpu")
    made = model.fit(digits).sample(20)
    assert model.certificate_.guarantee == "none"
    for label in range(10):
        mean = digits.images[digits.labels == label].double().mean(0)
        assert (made.images[made.labels == label].double() - mean).abs().max() <= 1


@pytest.mark.parametrize("residual", [True, False])
def test_ndpdc_learns_digits(residual: bool, digits: ImageSet) -> None:
    """Some 140 images a class; a classifier that has seen nothing but 100 synthetic ones."""
    bound = 0.3 if residual else 1.0
    model = build(
        "ndpdc", epsilon=8.0, images_per_class=10, iterations=60, width=32, sampling_prob=0.3, bound=bound,
        residual=residual, device="cpu",
    ).fit(digits)  # fmt: skip
    test = load_images("digits", split="test")
    accuracy = downstream_accuracy(model.sample(100), test, "convnet", recipe=Recipe(60, condensed=True))
    assert accuracy.mean > 70  # some 83 as a rule
