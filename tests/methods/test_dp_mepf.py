"""DP-MEPF: its features, what it releases and for how much, early stopping, and that a generator learns from it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet, PublicFacts, load_images
from sfumato.evaluate import downstream_accuracy
from sfumato.features.weights import sha256_of
from sfumato.methods.dp_mepf import (
    CONFIDENCE,
    EarlyStopping,
    Embedding,
    MomentMatching,
    PerceptualEmbedding,
    distance,
    shift_bounds,
)
from sfumato.methods.generator_method import GeneratorSizes, GeneratorTraining
from sfumato.testing import build, check_synthesizer

FACTS = PublicFacts((1, 12, 8), ("a", "b"), True)
QUICK: dict[str, Any] = {
    "encoder": "scattering",
    "steps": 4,
    "snapshots": 2,
    "batch_size": 40,
    "generator": GeneratorSizes("residual", width=8),
    "device": "cpu",
    "epsilon": 5.0,
    "secure": False,
}


def quick(kind: Any = PerceptualEmbedding, **settings: Any) -> Any:
    return build(kind, **{**QUICK, **settings})


@pytest.fixture(params=["scattering", "network"])
def source(request: pytest.FixtureRequest, encoder: str) -> str:
    return "scattering" if request.param == "scattering" else encoder


def one_moment(embedding: Embedding, images: torch.Tensor, power: int) -> torch.Tensor:
    return embedding.rows(images, range(power, power + 1), pooled=False)


# -- features -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 12, 8), (3, 16, 16)])
def test_features_have_norm_one_and_no_negative_entry(source: str, shape: tuple[int, int, int]) -> None:
    embedding = PerceptualEmbedding(encoder=source, device="cpu")._embedding(replace(FACTS, shape=shape))
    images = torch.rand(20, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    images[0], images[1] = -1, 1  # black and white
    with torch.no_grad():
        for power in (1, 2):
            rows = one_moment(embedding, images, power)
            assert rows.shape == (20, embedding.dimension)
            assert rows.min() >= 0
            assert torch.allclose(rows[1:].norm(dim=1), torch.ones(19), atol=1e-5)
            assert rows[0].isfinite().all()  # nothing may be seen in black: that is a zero, not a division by it
        pooled = embedding.pooled(images[2:], range(1, 3))
        assert torch.allclose(pooled.norm(dim=1), torch.full((18,), math.sqrt(2)), atol=1e-5)
        assert pooled.min() >= 0


def test_brightness_shows(source: str) -> None:
    """Rows are divided by their norm, and yet a darker image has another one."""
    embedding = PerceptualEmbedding(encoder=source, device="cpu")._embedding(FACTS)
    light = torch.rand(5, *FACTS.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for power in (1, 2):
            difference = one_moment(embedding, 2 * light - 1, power) - one_moment(embedding, light - 1, power)
            assert difference.norm(dim=1).min() > 0.1


def test_second_moments_are_squares_of_what_the_first_normalise(encoder: str) -> None:
    embedding = PerceptualEmbedding(encoder=encoder, layers="paper", device="cpu")._embedding(FACTS)
    images = torch.rand(3, *FACTS.shape) * 2 - 1
    with torch.no_grad():
        raw = torch.cat([values.permute(0, 2, 3, 1).flatten(1) for values in embedding.network(images)], 1)
        for power in (1, 2):
            by_hand = raw**power / (raw**power).norm(dim=1, keepdim=True)
            assert torch.allclose(one_moment(embedding, images, power), by_hand, atol=1e-6)


def test_balanced_layers_have_the_same_length(encoder: str) -> None:
    embedding = PerceptualEmbedding(encoder=encoder, layers="balanced", device="cpu")._embedding(FACTS)
    images = torch.rand(3, *FACTS.shape) * 2 - 1
    with torch.no_grad():
        sizes = [values[0].numel() for values in embedding.network(images)]
        for power in (1, 2):
            parts = one_moment(embedding, images, power).split(sizes, 1)
            for part in parts:
                assert torch.allclose(part.norm(dim=1).square(), torch.full((3,), 1 / len(parts)), atol=1e-5)


def test_the_encoders_that_are_shipped_are_the_defaults_and_say_what_they_saw() -> None:
    for shape, data in (((1, 28, 28), "CIFAR-10"), ((3, 32, 32), "Tiny-ImageNet")):
        model = PerceptualEmbedding(encoder="auto", device="cpu")
        assert data in model._facts(replace(FACTS, shape=shape))["encoder"]["trained_on"]


# -- releases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [1, 2])
@pytest.mark.parametrize("stopping", [True, False])
@pytest.mark.parametrize("public_size", [True, False])
def test_what_is_released_is_what_was_planned(
    few_digits: ImageSet, moments: int, stopping: bool, public_size: bool
) -> None:
    model = quick(moments=moments, early_stopping=stopping, public_size=public_size)
    planned = model.plan(model.public_facts(few_digits))
    expected = ["counts"] * (not public_size) + ["moments"]
    assert [release.name for release in planned.releases] == expected
    events = model.fit(few_digits).certificate_.events
    assert [event["name"] for event in events] == expected
    assert [event["noise_multiplier"] for event in events] == [release.noise for release in planned.releases]
    assert planned.epsilon <= model.certificate_.epsilon <= planned.epsilon * (1 + 3e-6) <= 5.0
    assert planned.epsilon == pytest.approx(5.0, rel=1e-3)


def noise_of(**params: Any) -> float:
    """Of a coordinate of the moments, sizes being declared."""
    model = PerceptualEmbedding(encoder="scattering", **params)
    return model.plan(replace(FACTS, sizes=(50, 50)))["moments"].noise * model._bound


def test_one_row_costs_what_its_parts_would_cost() -> None:
    """A second moment: as much again; early stopping: both moments at ten times the noise."""
    one, two = noise_of(moments=1, early_stopping=False), noise_of(moments=2, early_stopping=False)
    assert two / one == pytest.approx(math.sqrt(2), rel=1e-3)
    assert noise_of(moments=2, early_stopping=True) / two == pytest.approx(math.sqrt(1.01), rel=1e-3)


@pytest.mark.parametrize("moments", [1, 2])
def test_replacing_an_image_needs_only_the_square_root_of_two(moments: int) -> None:
    noise = [noise_of(moments=moments, adjacency=adjacency) for adjacency in ("add-remove", "replace-one")]
    assert noise[1] / noise[0] == pytest.approx(math.sqrt(2), rel=1e-3)


class Listening(PerceptualEmbedding):
    """Hears what the generator is given, and trains none."""

    def _fit_generator(self, public: Any, embedding: Any, means: Any, shares: Any, stopping: Any) -> None:
        self.heard_ = embedding, means, shares, stopping
        self.generator_ = self._new_generator(public).eval()


def test_released_moments_are_the_sums_over_all_images(few_digits: ImageSet, source: str) -> None:
    """Without noise: sums of each class by hand, all over the number of images in all classes."""
    model = quick(Listening, encoder=source, epsilon=math.inf).fit(few_digits)
    embedding, means, shares, _ = model.heard_
    pixels = few_digits.images.float() / 127.5 - 1
    assert shares[:, 0].tolist() == pytest.approx([20 / 61, 20 / 61, 20 / 61, 1 / 61], rel=1e-3)
    for power, released in enumerate(means, 1):
        for label in range(4):
            with torch.no_grad():
                rows = one_moment(embedding, pixels[few_digits.labels == label], power)
            assert torch.allclose(released[label], rows.sum(0) / 61, atol=2e-4)


@pytest.mark.slow
def test_it_is_sound_with_a_network(fewer_digits: ImageSet, encoder: str) -> None:
    settings = {"encoder": encoder, "steps": 2, "snapshots": 1}
    check_synthesizer(lambda **params: quick(**{**settings, **params}), fewer_digits)


# -- what is public -----------------------------------------------------------------------------------------------


def test_the_certificate_names_the_encoder(few_digits: ImageSet, encoder: str, tmp_path: Path) -> None:
    model = quick(encoder=encoder).fit(few_digits, run_dir=tmp_path / "run")
    named = model.certificate_.public_facts["encoder"]
    assert named["name"] == "tiny"
    assert named["trained_on"] == "random numbers"
    assert named["sha256"] == sha256_of(Path(encoder))
    assert sf.verify(tmp_path / "run" / "certificate.json")
    assert model.certificate_.public_facts["classes"] == list(few_digits.classes)
    untrained = quick().fit(few_digits).certificate_.public_facts["encoder"]
    assert untrained["trained_on"] == "nothing"


@pytest.mark.parametrize("wrong", ["small_cifar11", "nowhere/weights.safetensors"])
def test_a_wrong_encoder_is_refused_before_anything_is_spent(few_digits: ImageSet, wrong: str, tmp_path: Path) -> None:
    model = quick(encoder=wrong)
    with pytest.raises(DataError, match=Path(wrong).name):
        model.fit(few_digits, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError):
        model.explain_plan(few_digits.public())


def test_an_encoder_that_changes_under_way_is_refused(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quick()
    monkeypatch.setattr(model, "_facts", lambda public: {"encoder": {"name": "another"}})
    with pytest.raises(DataError, match="has changed since the run began"):
        model.fit(few_digits)


@pytest.mark.parametrize(("name", "value"), [("loss", "cubic"), ("moments", 3), ("layers", "large"), ("tones", 1)])
def test_wrong_parameters(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        sf.create("dp-mepf", **{name: value})


def test_large_images_are_refused_before_anything_is_spent() -> None:
    with pytest.raises(DataError, match="--size"):
        PerceptualEmbedding(encoder="scattering").plan(PublicFacts((1, 300, 300), ("a",), True))


# -- the propositions ---------------------------------------------------------------------------------------------


def test_the_shift_of_the_loss_stays_within_its_bounds() -> None:
    """Gaussian noise on a vector, many times; the difference of means as far away as it can be."""
    noise, coordinates = 0.005, 400
    expected, at_worst, at_best = shift_bounds(noise, coordinates, 1)
    generator = torch.Generator().manual_seed(0)
    away = torch.zeros(coordinates)
    away[0], away[1] = 1, -1
    draws = noise * torch.randn(20_000, coordinates, generator=generator)
    shift = ((away + draws).square().sum(1) - away.square().sum()).abs()
    assert 0.5 * expected < shift.mean() < expected
    size = draws.norm(dim=1)
    worst = 2 * (size.square() + 2 * math.sqrt(2) * size)  # of the proof: both ends of a sphere
    assert (worst <= at_worst).float().mean() >= CONFIDENCE
    assert ((6 + 2 * math.sqrt(2)) * size.square() <= at_best).float().mean() >= CONFIDENCE
    assert shift_bounds(0.0, coordinates, 1) == (0, 0, 0)
    assert shift_bounds(1.0, coordinates, 2)[1:] == (4, 4)  # no generator is worse


def test_the_plan_explains_what_its_noise_does() -> None:
    model = PerceptualEmbedding(encoder="scattering")
    typical = model.explain_plan(FACTS)
    assert len(typical) == 4
    assert f"{2 * 2 * model._embedding(FACTS).dimension:,} coordinates" in typical[0]
    declared = model.explain_plan(replace(FACTS, sizes=(3000, 4000)))
    assert len(declared) == 2
    assert declared[1].startswith("m = 7,000:")


# -- training -----------------------------------------------------------------------------------------------------


def test_the_square_loss_is_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.rand(60_000, 2, 5, 6, generator=generator), dim=3)
    wanted, shares = torch.rand(2, 6, generator=generator) / 6, torch.tensor([[0.7], [0.3]])
    loss = torch.stack([distance(shares * some.mean(1), wanted, 5) for some in rows[:20_000]]).mean()
    true = (shares * rows.mean((0, 2)) - wanted).square().sum()
    # Up to what does not depend on the generator: |wanted|², and the rows' norm.
    constant = wanted.square().sum() - (shares.square() / 4).sum()
    assert float(loss + constant) == pytest.approx(float(true), abs=2e-3)


def test_the_moving_average_follows_the_difference() -> None:
    wanted, shares = [torch.full((2, 3), 0.4)], torch.tensor([[0.5], [0.5]])
    matching = MomentMatching(wanted, shares, rate=0.01)
    rows = torch.full((2, 4, 3), 0.2, requires_grad=True)
    for _ in range(300):
        loss = matching([rows.mean(1)], 4)
    assert torch.allclose(matching._average[0], torch.full((2, 3), 0.3), atol=0.01)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert torch.allclose(gradient, torch.full((2, 4, 3), -0.3 * 0.5 / 4), rtol=0.1)


def test_early_stopping_keeps_the_nearest_snapshot(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that are kept are those of the step with the least distance, not the last ones."""
    seen: dict[int, torch.Tensor] = {}
    held: list[EarlyStopping] = []
    measure = EarlyStopping.measure

    def listen(self: EarlyStopping, training: GeneratorTraining, step: int) -> None:
        measure(self, training, step)
        seen[step] = next(training.average.parameters()).clone()
        if step == 6:  # the third of five
            self._least.fill_(-10)
            self._best = {name: value.clone() for name, value in training.average.state_dict().items()}
        held[:] = [self]

    monkeypatch.setattr(EarlyStopping, "measure", listen)
    model = quick(steps=10, snapshots=5).fit(few_digits)
    assert list(held[0].distances) == [2, 4, 6, 8, 10]
    assert torch.equal(next(model.generator_.parameters()), seen[6])
    assert not torch.equal(seen[6], seen[10])


def test_nearest_is_measured_by_the_release(few_digits: ImageSet) -> None:
    """A generator that grows brighter: a release as bright as its sixth step is nearest to that one."""
    shares = torch.full((4, 1), 0.25)

    def brightness(images: torch.Tensor) -> torch.Tensor:
        angle = images.mean((1, 2, 3))
        return torch.stack([angle.cos(), angle.sin()], 1)

    def training(seed: int) -> GeneratorTraining:
        generator = torch.Generator().manual_seed(seed)
        public = few_digits.public()
        network = quick()._new_generator(public)
        made = GeneratorTraining(network, public, generator, each=20, ema=0.5, latent=64)
        made.trainer.set_rate(0.02)
        return made

    def brighter(one: GeneratorTraining) -> None:
        one.trainer.descend(-one.images(one.latent()).mean())

    first, second = training(0), training(1)
    for _ in range(6):
        brighter(first)
    first.averaged()
    rows = torch.cat([brightness(first.average_images()).view(4, 20, 2) for _ in range(10)], 1)
    nearest = EarlyStopping(brightness, shares * rows.mean(1), shares)
    weights = {}
    for step in range(12):
        brighter(second)
        if step % 3 == 2:
            nearest.measure(second, step + 1)
            weights[step + 1] = next(second.average.parameters()).clone()
    found = nearest.distances
    assert found[12] > found[9] > found[6] < found[3]
    assert torch.equal(next(nearest.best(second).parameters()), weights[6])


@pytest.mark.parametrize("loss", ["square", "moving"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14)])
@pytest.mark.parametrize("classes", [1, 3])
def test_every_loss_shape_and_number_of_classes(loss: str, shape: tuple[int, int, int], classes: int) -> None:
    pixels = torch.randint(0, 256, (12, *shape), generator=torch.Generator().manual_seed(0)).byte()
    labels = None if classes == 1 else torch.arange(12) % classes
    images = ImageSet(pixels, labels, ("all",) if classes == 1 else ("a", "b", "c"))
    sample = quick(loss=loss).fit(images).sample(10)
    assert sample.shape == shape
    assert sample.labelled == (classes > 1)


def test_save_and_load(few_digits: ImageSet, encoder: str, tmp_path: Path) -> None:
    settings = {"encoder": encoder, "generator": GeneratorSizes("mepf", width=8)}
    model = quick(**settings).fit(few_digits, run_dir=tmp_path / "run")
    before = model.sample(12, seed=5).images
    assert torch.equal(sf.load(tmp_path / "run", device="cpu").sample(12, seed=5).images, before)
    with pytest.raises(DataError, match="holds a finished run"):
        quick(**settings).fit(few_digits, run_dir=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("source", "loss"),
    [pytest.param("scattering", "moving", marks=pytest.mark.slow), ("network", "square")],
    indirect=["source"],
)
def test_it_learns_digits(source: str, loss: str) -> None:
    """Seconds of training at a moderate budget: a classifier taught by the samples knows real digits; chance is 10."""
    train, test = load_images("digits"), load_images("digits", split="test")
    options = {"encoder": source, "loss": loss, "epsilon": 10.0, "steps": 60, "batch_size": 100, "secure": False}
    model = build(PerceptualEmbedding, **options, snapshots=1, device="cpu")
    assert downstream_accuracy(model.fit(train).sample(2000), test).mean > 45
