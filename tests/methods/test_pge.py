"""PGE: the published training leaks, the sound one does not; it learns; warm starts are charged in the same plan."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.data import DataError, ImageSet, load_images
from sfumato.evaluate import downstream_accuracy
from sfumato.features.codebook import CodebookEncoder
from sfumato.methods.as_published.published_pge import (
    PublishedGradientEstimation,
    PublishedLoss,
    randomised_response,
)
from sfumato.methods.pge import GradientEstimation, SamplerSettings
from sfumato.methods.registry import load
from sfumato.methods.score_matching import LossGradient, ScoreSettings
from sfumato.methods.warm_start import WarmStartSettings
from sfumato.nets.training import Trainer
from sfumato.priors import load_prior
from sfumato.testing import build, check_synthesizer

PRIOR = Path(__file__).parents[1] / "priors" / "conditioned.safetensors"  # random weights
QUICK: dict[str, Any] = {
    "warm": "none",
    "steps": 2,
    "sampling_prob": 0.3,
    "width": 8,
    "sampling": SamplerSettings(levels=2, leapfrogs=1),
    "device": "cpu",
}


def quick(**settings: Any) -> Any:
    return build(GradientEstimation, **{**QUICK, **settings})


def published(**settings: Any) -> Any:
    return build(PublishedGradientEstimation, **{**QUICK, **settings})


@pytest.fixture(scope="session")
def fewer(few_digits: ImageSet) -> ImageSet:
    """Nine of three classes, and the one of the fourth."""
    return few_digits.subset(torch.tensor([0, 1, 2, 20, 21, 22, 40, 41, 42, 60]))


class Warm(GradientEstimation):
    warm_parameters = {"features": 20, "steps": 2, "batch_size": 20}  # noqa: RUF012


def batches(few_digits: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Two neighbouring batches of two: the second image differs."""
    images = few_digits.images.float() / 127.5 - 1
    return images[[0, 1]], images[[0, 2]]


def test_published_updates_of_neighbouring_batches_are_disjoint(few_digits: ImageSet) -> None:
    """Given the vectors, a step has k^b outcomes, whatever epsilon is, and they tell the batches apart: delta is 1."""
    method = published(nearest=2)
    public = few_digits.public()
    network, views = method._new_network(public), method._views(public, slices=False)
    published_loss = PublishedLoss(views)
    generator = torch.Generator().manual_seed(0)
    normals, slices = (torch.randn(2, size, generator=generator) for size in (views.draws, views.dimension))
    labels, parameters = torch.zeros(2, dtype=torch.int64), list(network.parameters())

    def outcomes(batch: torch.Tensor) -> torch.Tensor:
        found = []
        for answers in itertools.product(range(2), repeat=2):
            loss = published_loss(network, batch, labels, normals, slices, slices[list(answers)])
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss.mean(), parameters)]))
        return torch.stack(found)

    one, other = (outcomes(batch) for batch in batches(few_digits))
    again = outcomes(batches(few_digits)[0])
    assert len(one) == 4
    rounding = float((one - again).norm(dim=1).max())
    assert float(torch.cdist(one, other).min()) > 1e-3 * float(one.norm(dim=1).max()) > 100 * rounding


def test_randomised_response_has_its_law_and_never_sees_an_image() -> None:
    vectors = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    unit = torch.nn.functional.normalize(vectors, dim=1)
    near = (unit @ unit.T).topk(4, 1).indices
    generator = torch.Generator().manual_seed(1)
    drawn = torch.stack([randomised_response(vectors, 1.0, 4, generator) for _ in range(4000)])
    for index in range(12):
        share = torch.bincount(drawn[:, index], minlength=12) / 4000
        assert set(share.nonzero()[:, 0].tolist()) == set(near[index].tolist())
        expected = torch.full((12,), 1 / (math.e + 3)).index_fill(0, torch.tensor([index]), math.e / (math.e + 3))
        assert (share - expected)[near[index]].abs().max() < 0.05  # six standard errors
    assert torch.equal(randomised_response(vectors, math.inf, 4, generator), torch.arange(12))


def test_the_published_form_says_that_it_promises_nothing(few_digits: ImageSet) -> None:
    model = published().fit(few_digits)
    assert (model.certificate_.guarantee, model.certificate_.epsilon) == ("none", None)
    assert model.certificate_.claimed is not None
    assert "do not depend on the data" in model.certificate_.claimed["why"]
    assert model.plan(few_digits.public()).epsilon == math.inf
    assert quick().fit(few_digits).certificate_.claimed is None


@pytest.mark.parametrize("options", [{"network": "energy"}, {"score_settings": ScoreSettings("sliced")}], ids=str)
def test_other_networks_and_objectives_ask_for_gradients_too(options: dict[str, Any], few_digits: ImageSet) -> None:
    model = quick(**options).fit(few_digits)
    assert [event["name"] for event in model.certificate_.events] == ["counts", "gradients"]
    assert model.certificate_.epsilon is not None
    assert model.certificate_.epsilon <= 1
    assert len(model.sample(5)) == 5


def test_a_warm_start_is_sound_and_in_the_plan(few_digits: ImageSet, fewer: ImageSet) -> None:
    def make(share: float = 0.8, **settings: Any) -> Any:
        start = WarmStartSettings(share=share, images=60, steps=2, batch_size=20)
        return build(Warm, **{**QUICK, "warm": "dp-merf", "warm_start": start, **settings})

    public = few_digits.public()
    plan, cold = make().plan(public), quick().plan(public)
    assert [release.name for release in plan.releases] == ["counts", "embedding", "gradients"]
    assert plan.epsilon <= 1
    assert plan["gradients"].noise > cold["gradients"].noise
    small, large = (make(share=share).plan(public) for share in (0.1, 0.9))
    assert small["embedding"].noise == pytest.approx(3 * large["embedding"].noise, rel=1e-3)
    assert small["gradients"].noise < large["gradients"].noise
    check_synthesizer(make, fewer)


def test_residual_codes_are_public_and_named(encoder: str, few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick(residual=encoder).fit(few_digits)
    assert model.certificate_.public_facts["residual"]["trained_on"] == "random numbers"
    model.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").sample(9, seed=1).images, model.sample(9, seed=1).images)


def test_residual_training_is_sound(encoder: str, fewer: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.features.codebook.SMOOTH_IMAGES", 16)
    check_synthesizer(lambda **params: quick(residual=encoder, **params), fewer)


def test_codes_look_like_noise_and_tell_images_apart(encoder: str, digits: ImageSet) -> None:
    images = digits.images[:200].float() / 127.5 - 1
    code = CodebookEncoder(encoder, digits.shape, (4, 4), torch.device("cpu"))
    codes = code(images)
    assert codes.shape == (200, 16, 4, 4)
    assert abs(float(codes.mean())) < 0.3
    assert 0.5 < float(codes.std()) < 1.5
    assert torch.equal(codes, CodebookEncoder(encoder, digits.shape, (4, 4), torch.device("cpu"))(images))
    assert float((codes[0] - codes[1]).abs().max()) > 0.1
    moved = code(images + 1e-6 * torch.randn_like(images))
    assert float((moved - codes).abs().max()) < 0.01  # a soft choice: rounding makes no other code


def test_codes_are_hidden_in_part_and_whole_in_half_of_the_views(encoder: str, few_digits: ImageSet) -> None:
    views = quick(residual=encoder)._views(few_digits.public())
    rows = views.rows(few_digits.images[:1].float() / 127.5 - 1).expand(400, -1)
    normals = torch.randn(400, views.draws, generator=torch.Generator().manual_seed(0))
    code = views.split(rows, normals)[4]
    assert code is not None
    true = rows[:, views.dimension :].unflatten(1, code.shape[1:])
    kept = (code == true).all(1).flatten(1).float().mean(1)
    assert 0.4 < float((kept == 0).float().mean()) < 0.6
    assert 0.2 < float(kept[kept > 0].mean()) < 0.3


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "ode"},
        {"sampler": "langevin"},
        {"sampling": SamplerSettings(levels=2, leapfrogs=1, momentum="rayleigh")},
    ],
    ids=str,
)
def test_samplers_are_saved_and_loaded(options: dict[str, Any], few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick(**options).fit(few_digits)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.sample(7, seed=1).images, model.sample(7, seed=1).images)
    assert not torch.equal(model.sample(7, seed=1).images, model.sample(7, seed=2).images)


def test_options_are_named() -> None:
    for name in ("warm", "sampler"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            GradientEstimation(**{name: "other"}).validate()
    with pytest.raises(ValueError, match="no warm start"):
        PublishedGradientEstimation(warm="dp-merf").validate()


@pytest.mark.parametrize("residual", ["", "small_tinyimagenet"])
def test_with_a_prior_the_network_begins_as_the_prior(residual: str, few_digits: ImageSet, tmp_path: Path) -> None:
    """Gradients train few of its parameters; the rest stays as the prior has it."""
    model = quick(prior=str(PRIOR), residual=residual, preset="prior").fit(few_digits, run_dir=tmp_path / "run")
    assert model.certificate_.public_facts["prior"] == load_prior(PRIOR).facts
    assert [event["name"] for event in model.certificate_.events] == ["counts", "gradients"]
    before, after = load_prior(PRIOR).state, model.network_.state_dict()
    assert torch.equal(before["unet.middle.first.weight"], after["unet.middle.first.weight"])
    assert not torch.equal(before["unet.last.2.weight"], after["unet.last.2.weight"])
    again = load(tmp_path / "run")
    assert torch.equal(again.sample(7, seed=1).images, model.sample(7, seed=1).images)


def test_a_prior_is_a_score_network_of_pixels() -> None:
    for other in ({"autoencoder": "taef2"}, {"preset": "energy"}):
        with pytest.raises(ValueError, match="leave out autoencoder and preset=energy"):
            GradientEstimation(prior=str(PRIOR), **other).validate()


def test_large_images_need_an_autoencoder(few_digits: ImageSet) -> None:
    large = ImageSet(torch.zeros(4, 3, 256, 256, dtype=torch.uint8), few_digits.labels[:4], few_digits.classes)  # type: ignore[index]
    with pytest.raises(DataError, match="autoencoder='taef2'"):
        quick().plan(large.public())
    assert quick(autoencoder="taef2").plan(large.public()).epsilon <= 1


def test_one_class_needs_no_labels(few_digits: ImageSet) -> None:
    unlabelled = ImageSet(few_digits.images, None, ("all",))
    assert len(quick().fit(unlabelled).sample(5)) == 5


def test_the_average_follows_the_network(few_digits: ImageSet) -> None:
    training = Trainer(quick()._new_network(few_digits.public()), ema=0.5, warm_up=True)
    training.set_rate(0.1)
    ones = {name: torch.ones_like(value) for name, value in training.parameters.items()}
    before = training.average.unet.entry.weight.clone()
    training.step(ones)
    moved = training.average.unet.entry.weight - before
    assert torch.allclose(moved, torch.full_like(moved, -0.1 * (1 - 1 / 10)), atol=1e-4)


def test_slopes_are_those_of_the_mean_loss(few_digits: ImageSet) -> None:
    method, public = quick(), few_digits.public()
    network, views = method._new_network(public), method._views(public)
    rows, labels = few_digits.images[:5].float() / 127.5 - 1, torch.arange(5) % 2
    normals = torch.randn(5, views.draws, generator=torch.Generator().manual_seed(0))
    found = LossGradient(views.loss, network)(rows, labels, normals)
    views.loss(network, rows, labels, normals).mean().backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_it_learns_digits(digits: ImageSet) -> None:
    options = {
        "epsilon": math.inf,
        "warm": "none",
        "steps": 60,
        "sampling_prob": 0.15,
        "width": 16,
        "learning_rate": 1e-2,
    }
    sampling = SamplerSettings(levels=12, leapfrogs=3)
    model = build(GradientEstimation, **options, ema=0.9, sampling=sampling, device="cpu").fit(digits)
    accuracy = downstream_accuracy(model.sample(500), load_images("digits", split="test"))
    assert accuracy.mean > 40
