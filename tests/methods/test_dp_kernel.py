"""DP-kernel: the published training leaks, the sound forms do not; each learns; forms agree on what they follow."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from sfumato.data import DataError, ImageSet, PublicFacts, load_images
from sfumato.engine import GradientVault
from sfumato.evaluate import downstream_accuracy
from sfumato.features import FrequencyBlock, GaussianKernel, PointEvaluations, RandomFourierFeatures, load_perceptual
from sfumato.features.unit_norm import CNNFeatures, EncoderFeatures, ScatteringAndPixels
from sfumato.methods import create, load
from sfumato.methods.as_published.published_dp_kernel import published_loss
from sfumato.methods.dp_kernel import KernelGenerator, smooth_images
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import KernelPainter, PainterSettings, combine_with_common_sum, total_variation
from sfumato.testing import build, check_synthesizer

PAINTER = PainterSettings(features=20, features_per_step=10, cnn_images=100)
QUICK: dict[str, Any] = {
    "steps": 2,
    "paths": 2,
    "batch_size": 40,
    "device": "cpu",
    "painter": PAINTER,
    "generator": GeneratorSizes(width=8),
}


def quick(**settings: Any) -> Any:
    return build(KernelGenerator, **{**QUICK, **settings})


def painter_of(public: PublicFacts, **settings: Any) -> KernelPainter:
    return quick(painter=replace(PAINTER, **settings))._painter(public)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))


def test_the_published_gradient_is_the_unnoised_one_at_every_noise_level(few_digits: ImageSet) -> None:
    assert few_digits.labels is not None
    real, labels = few_digits.images[:30].float() / 127.5 - 1, few_digits.labels[:30]
    fake = smooth_images(30, few_digits.shape, torch.Generator().manual_seed(0)).requires_grad_(True)
    gradients = []
    for noise in (0.0, 1.0, 1000.0):
        loss = published_loss(real, labels, fake, labels, noise, torch.Generator().manual_seed(1))
        gradients.append(torch.autograd.grad(loss, fake)[0])
    assert abs(cosine(gradients[0], gradients[1])) > 0.9999
    assert abs(cosine(gradients[0], gradients[2])) > 0.9999


def test_the_sound_gradient_drowns_in_its_noise(few_digits: ImageSet) -> None:
    """The same comparison for a path, and for exact derivatives: noise turns the direction."""
    generator = torch.Generator().manual_seed(0)
    real = few_digits.images[:30].flatten(1).double() / 127.5 - 1
    points = smooth_images(6, few_digits.shape, generator).flatten(1).double().requires_grad_(True)
    kernel = GaussianKernel((8.0,))
    features = RandomFourierFeatures([FrequencyBlock(lambda x: x, kernel)], 3000, points.float(), generator)
    sums = features(real.float()).sum(0)
    exact = PointEvaluations(kernel, points)
    for noise, least, most in ((0.0, 0.999, 1.0), (1e4, -0.5, 0.5)):
        noisy = sums + noise * torch.randn(sums.shape, generator=generator)
        (path,) = torch.autograd.grad((features(points.float()) @ noisy).sum(), points)
        rows = exact.rows(real).sum(0)
        _, slopes = exact.unwhiten(rows + noise * torch.randn(rows.shape, generator=generator, dtype=torch.float64))
        places = points.detach().clone().requires_grad_(True)
        squares = (real[:, None] - places).square().sum(2)
        (true,) = torch.autograd.grad(torch.exp(-squares / 128).sum(), places)
        assert least - 0.06 <= cosine(path, true) <= most
        assert least <= cosine(slopes, true) <= most + 1e-9


@pytest.mark.parametrize("form", ["gp", pytest.param("nystrom", marks=pytest.mark.slow)])
def test_the_other_forms_are_sound(form: str, fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: quick(form=form, **params), fewer_digits)


def test_the_published_form_says_that_it_promises_nothing(few_digits: ImageSet) -> None:
    model = create("dp-kernel-as-published", steps=2, device="cpu").fit(few_digits)
    assert model.certificate_.guarantee == "none"
    assert model.certificate_.epsilon is None
    assert model.certificate_.claimed is not None
    assert "never reaches the gradient" in model.certificate_.claimed["why"]
    assert model.plan(few_digits.public()).epsilon == math.inf  # no releases to account for is not an epsilon of 0
    assert quick().fit(few_digits).certificate_.claimed is None


def test_vectors_have_norm_one_or_less(digits: ImageSet) -> None:
    images = torch.nn.functional.interpolate(digits.images[:50].float() / 127.5 - 1, (28, 28))
    vectors = ScatteringAndPixels((1, 28, 28))
    rows = vectors(images)
    assert rows.shape == (50, 81 * 49 + 784)
    assert torch.equal(rows, torch.cat([vectors.scattering(images), vectors.pixels(images)], 1))
    assert vectors.scattering(images).norm(dim=1).max() <= 1 + 1e-6
    assert vectors.scattering(images).norm(dim=1).min() > 0.7
    assert vectors.pixels(images).norm(dim=1).max() <= 1 + 1e-6
    assert ScatteringAndPixels((3, 32, 24))(torch.zeros(1, 3, 32, 24)).shape == (1, 243 * 48 + 3 * 32 * 24)


def test_taught_features_have_norm_one_and_tell_classes_apart(digits: ImageSet) -> None:
    assert digits.labels is not None
    images = torch.nn.functional.interpolate(digits.images[:1000].float() / 127.5 - 1, (16, 16))
    labels = digits.labels[:1000]
    taught = CNNFeatures(images[:800], labels[:800], 10, torch.Generator().manual_seed(0))
    rows = taught(images)
    assert rows.shape == (1000, 64 * 16)
    assert rows.norm(dim=1).max() <= 1 + 1e-6
    assert rows.norm(dim=1).min() > 0.5
    centres = torch.stack([rows[:800][labels[:800] == label].mean(0) for label in range(10)])
    nearest = torch.cdist(rows[800:], centres).argmin(1)
    assert (nearest == labels[800:]).double().mean() > 0.8
    assert not any(parameter.requires_grad for parameter in taught.parameters())


def test_networks_are_taught_by_generated_images_only(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the method asks of the vault are the planned sums, whatever is taught in between."""
    asked: list[str] = []
    plain = GradientVault.sum

    def listening(self: GradientVault, feature: Any, **options: Any) -> torch.Tensor:
        asked.append(options["release"])
        return plain(self, feature, **options)

    monkeypatch.setattr(GradientVault, "sum", listening)
    model = quick(paths=3, steps=7).fit(few_digits)
    assert asked == ["counts", "sums", "sums", "sums"]
    assert [event["times"] for event in model.certificate_.events if event["name"] == "sums"] == [3]


def test_a_public_encoder_is_looked_through_and_named(encoder: str, few_digits: ImageSet) -> None:
    model = quick(encoder=encoder).fit(few_digits)
    assert model.certificate_.public_facts["encoder"]["trained_on"] == "random numbers"
    seen = EncoderFeatures(load_perceptual(encoder), few_digits.shape)
    images = few_digits.images[:9].float() / 127.5 - 1
    rows = seen(images)
    assert rows.shape == (9, seen.maps(images)[0].numel())
    assert 0.5 < rows.norm(dim=1).min() <= rows.norm(dim=1).max() <= 1 + 1e-6
    assert min(seen.maps(images).shape[2:]) == 4
    larger = functional.interpolate(images, (16, 16), mode="bilinear")
    through = [EncoderFeatures(load_perceptual(encoder), *of) for of in ((few_digits.shape, 16), ((1, 16, 16),))]
    assert torch.equal(through[0](images), through[1](larger))
    with pytest.raises(DataError, match="nowhere"):
        quick(encoder="nowhere.safetensors").fit(few_digits)


@pytest.mark.parametrize("key", ["dp-kernel", "atelier"])
def test_large_images_need_an_autoencoder(key: str) -> None:
    large = PublicFacts((3, 256, 256), ("a", "b"), labelled=True)
    with pytest.raises(DataError, match=r"up to 64 pixels a side .* autoencoder='taef2'"):
        create(key).plan(large)
    assert create(key, autoencoder="taef2").plan(large).epsilon <= 1
    with pytest.raises(DataError, match="at least 32 pixels"):
        create(key, autoencoder="taef2").plan(PublicFacts((3, 256, 24), ("a", "b"), labelled=True))


@pytest.mark.usefixtures("averages")
def test_an_autoencoders_maps_are_painted(large_digits: ImageSet, tmp_path: Path) -> None:
    options = {"autoencoder": "taef2", "epsilon": math.inf, "public_size": True, "steps": 100, "device": "cpu"}
    painter = PainterSettings(features=1000, features_per_step=250)
    model = build(KernelGenerator, **options, batch_size=40, paths=1, painter=painter)
    model.fit(large_digits, run_dir=tmp_path)
    assert model.certificate_.public_facts["autoencoder"] == {"name": "averages"}
    made = model.sample(40)
    assert made.shape == large_digits.shape
    assert torch.equal(load(tmp_path, device="cpu").sample(40).images, made.images)
    assert made.labels is not None
    assert large_digits.labels is not None
    means = [
        torch.stack([some.images[some.labels == c].float().mean(0) for c in range(3)]) for some in (made, large_digits)
    ]
    one, other = ((mean - mean.mean(0)).flatten(1) for mean in means)
    assert torch.cosine_similarity(one[:, None], other, dim=2).argmax(1).tolist() == [0, 1, 2]


def test_a_network_that_changes_under_way_is_noticed(large_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter("ab")

    def changing(device: str = "cpu") -> SimpleNamespace:
        return SimpleNamespace(facts={"name": next(versions)})

    monkeypatch.setattr("sfumato.methods.kernel_painter.load_autoencoder", changing)
    with pytest.raises(DataError, match="file of the autoencoder has changed"):
        quick(autoencoder="taef2").fit(large_digits)


@pytest.mark.parametrize("variant", ["conditional", "parallel"])
def test_variants_are_saved_and_loaded(variant: str, few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick(variant=variant).fit(few_digits)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert torch.equal(again.sample(20, seed=1).images, model.sample(20, seed=1).images)


def test_specks_are_rough_and_specks_of_colour_rougher() -> None:
    flat, edge, grey_speck, red_speck = torch.zeros(4, 3, 16, 16)
    edge[:, :, 8:], grey_speck[:, 4, 4], red_speck[0, 4, 4] = 1.0, 1.0, 1.0
    rough = total_variation(torch.stack([flat, edge, grey_speck, red_speck])) - total_variation(flat[None])
    assert rough[0] == 0
    assert rough[1] == pytest.approx(16 / 16**2, rel=0.1)  # the edge's height times its length
    assert rough[3] > 1.5 * rough[2]
    assert torch.allclose(total_variation(grey_speck[None, :1]) - total_variation(flat[None, :1]), rough[2], rtol=1e-3)


def test_smoothness_costs_in_proportion_to_the_noises_square() -> None:
    painter = painter_of(PublicFacts((1, 8, 8), ("a",), labelled=False), smoothness=0.5)
    noise = torch.tensor([[0.0], [0.01], [0.02], [5.0]])
    assert torch.allclose(painter._smoothing(noise), torch.tensor([[0.0], [0.002], [0.008], [0.5]]))


def test_a_generator_that_follows_grows_smoother_where_roughness_costs(few_digits: ImageSet) -> None:
    painter = painter_of(few_digits.public(), smoothness=1.0)
    training = painter.training()
    features = painter._features(training, None, None)
    costs = torch.tensor([0.0, 0.0, 10.0, 10.0])[:, None]
    training.add(features, torch.zeros(4, 40), costs)
    training.trainer.set_rate(0.01)
    for _ in range(100):
        training.follow(10)
    rough = training.by_class(total_variation(training.images(training.latent()))).mean(1)
    assert rough[2:].max() < 0.3 * rough[:2].min()


def test_what_classes_have_in_common_is_a_release_with_its_share(few_digits: ImageSet) -> None:
    public = few_digits.public()
    plain = quick().plan(public)["sums"].noise
    plan = quick(painter=replace(PAINTER, common_share=0.8)).plan(public)
    assert plan["common"].times == plan["sums"].times == QUICK["paths"]
    assert plan["sums"].noise == pytest.approx(2 * plan["common"].noise)  # shares go by 1 / noise²
    assert plan["common"].noise > plain
    alone = quick(painter=replace(PAINTER, common_share=0.8)).plan(ImageSet(few_digits.images).public())
    assert [release.name for release in alone.releases] == [r.name for r in quick().plan(public).releases]


def test_what_classes_have_in_common_counts_by_its_noise_and_without_bias(few_digits: ImageSet) -> None:
    """The mean of many losses is that of the means of many images, but for what does not depend on them."""
    painter, generator = painter_of(few_digits.public(), common_share=0.8), torch.Generator().manual_seed(0)
    training = painter.training()
    assert training.common_weight == pytest.approx(4 * 4**2)  # noise² is a quarter, and there are four times the images
    training.class_shares = torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None]
    features, wanted = painter._features(training, None, None), torch.rand(4, 40, generator=generator) / 10
    losses: list[float] = []
    training.trainer.descend = lambda loss: losses.append(float(loss))  # type: ignore[method-assign]
    means, count = torch.zeros(4, 40), 400
    with torch.no_grad():
        for _ in range(count):
            latent = training.latent()
            training._match(features, wanted, latent)
            means += training.by_class(features(training.images(latent))).mean(1) / count
    every, aim = ((training.class_shares * rows).sum(0) for rows in (means, wanted))
    apart = (means.square() - 2 * means * wanted).sum() + 4 / (training.each - 1)
    together = (every.square() - 2 * every * aim).sum() + training.class_shares.square().sum() / (training.each - 1)
    spread = torch.tensor(losses).std() / math.sqrt(count)
    assert float(torch.tensor(losses).mean()) == pytest.approx(
        float(apart + training.common_weight * together), abs=5 * float(spread)
    )
    assert float(spread) < 0.2 * training.common_weight * float(training.class_shares.square().sum()) / (
        training.each - 1
    )


def test_sums_of_classes_and_of_all_are_reconciled_by_least_squares() -> None:
    share, generator = 0.8, torch.Generator().manual_seed(0)
    sums, every = torch.randn(5, 3, generator=generator).double(), torch.randn(3, generator=generator).double()
    rows = torch.cat([torch.eye(5) * math.sqrt(1 - share), torch.ones(1, 5) * math.sqrt(share)]).double()
    seen = torch.cat([sums * math.sqrt(1 - share), every[None] * math.sqrt(share)])
    assert torch.allclose(combine_with_common_sum(sums, every, share), torch.linalg.lstsq(rows, seen).solution)
    assert torch.equal(combine_with_common_sum(sums, every, 0.0), sums)


@pytest.mark.slow  # `test_testing.py` checks atelier, whose painter has the same release, in each run
def test_no_image_leaves_with_what_classes_have_in_common(fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: quick(painter=replace(PAINTER, common_share=0.5), **params), fewer_digits)


def test_one_class_has_nothing_to_be_taught(few_digits: ImageSet) -> None:
    unlabelled = ImageSet(few_digits.images, None, ("all",))
    assert len(quick().fit(unlabelled).sample(5)) == 5


def test_forms_are_named() -> None:
    with pytest.raises(ValueError, match="form must be one of 'pathwise', 'gp', 'nystrom', got 'exact'"):
        KernelGenerator(form="exact").validate()
    with pytest.raises(ValueError, match="variant must be one of 'conditional', 'parallel'"):
        KernelGenerator(variant="serial").validate()
    with pytest.raises(ValueError, match="autoencoder must be one of '', 'taef2'"):
        KernelGenerator(autoencoder="taef3").validate()
    with pytest.raises(ValueError, match="are for the pathwise form"):
        KernelGenerator(autoencoder="taef2", form="gp").validate()
    with pytest.raises(ValueError, match="cannot be combined with autoencoder"):
        KernelGenerator(autoencoder="taef2", encoder="small_cifar10").validate()


def test_it_learns_digits(digits: ImageSet) -> None:
    painter = PainterSettings(features=400, cnn_images=2000)
    model = build(KernelGenerator, epsilon=20.0, steps=150, batch_size=100, device="cpu", painter=painter).fit(digits)
    accuracy = downstream_accuracy(model.sample(2000), load_images("digits", split="test"))
    assert accuracy.mean > 60  # 80 as a rule
