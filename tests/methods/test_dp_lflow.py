"""DP-LFlow: joint sensitivity, classes in parallel, learning, scores, samples that may be sharpened."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato import noise_multiplier, verify
from sfumato.data import DataError, ImageSet, load_images
from sfumato.engine import GradientVault
from sfumato.evaluate import downstream_accuracy
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.dp_lflow import LatentFlow
from sfumato.methods.registry import load
from sfumato.methods.warm_start import WarmStartSettings
from sfumato.nets.latent_flow import LatentNetwork, sharpen
from sfumato.nets.stacked import unstack
from sfumato.testing import build, check_synthesizer

QUICK: dict[str, Any] = {
    "steps": 3,
    "sampling_prob": 0.5,
    "code": 4,
    "width": 2,
    "couplings": 2,
    "hidden": 6,
    "procedural_batches": 2,
    "warm": "none",
    "device": "cpu",
}
COLD = LatentFlow.presets["no-warm-start"]


class Warm(LatentFlow):
    """Starts from a small dp-merf."""

    warm_parameters = {"features": 20, "steps": 2, "batch_size": 20}  # noqa: RUF012


def quick(**settings: Any) -> Any:
    return build(LatentFlow, **{**QUICK, **settings})


def warm(share: float = 0.8, **settings: Any) -> Any:
    own = {"warm": "dp-merf", "warm_start": WarmStartSettings(share=share, images=40, steps=2, batch_size=4)}
    return build(Warm, **{**QUICK, "steps": 2, **own, **settings})


@pytest.mark.parametrize("options", [{"variant": "conditional"}, {"space": "pixels"}])
def test_the_other_forms_are_sound(options: dict[str, Any], fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: quick(**{"steps": 2, **options, **params}), fewer_digits)


def test_the_published_noise_is_not_enough() -> None:
    """Section E.2: sigma = 4.5 for epsilon 1; and with two blocks noised apart its sensitivity is sqrt(2) larger."""
    calibrated = LatentFlow(epsilon=1.0, public_size=True, warm="none").plan(
        load_images("digits").public(declare_size=True)
    )
    assert calibrated["gradients"].noise == pytest.approx(
        noise_multiplier(epsilon=1.0, sampling_prob=0.1, steps=300), rel=1e-3
    )
    assert calibrated["gradients"].noise > 6.5 > 4.5


def test_the_plan_has_gradients_and_counts(few_digits: ImageSet) -> None:
    plan = quick().plan(few_digits.public())
    assert [(release.name, release.times, release.sampling_prob) for release in plan.releases] == [
        ("counts", 1, 1.0),
        ("gradients", 3, 0.5),
    ]
    assert plan.epsilon <= 1
    declared = quick(public_size=True).plan(few_digits.public(declare_size=True))
    assert [release.name for release in declared.releases] == ["gradients"]


@pytest.mark.parametrize("variant", ["partitioned", pytest.param("conditional", marks=pytest.mark.slow)])
def test_a_warm_start_is_sound(variant: str, fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: warm(variant=variant, **params), fewer_digits)


def test_a_warm_start_is_in_the_plan_and_in_the_certificate(few_digits: ImageSet) -> None:
    public = few_digits.public()
    plan, cold = warm().plan(public), quick(steps=2).plan(public)
    assert [release.name for release in plan.releases] == ["counts", "embedding", "gradients"]
    assert plan.epsilon <= 1
    assert plan["gradients"].noise > cold["gradients"].noise
    small, large = (warm(share=share).plan(public) for share in (0.1, 0.9))
    assert small["embedding"].noise == pytest.approx(3 * large["embedding"].noise, rel=1e-3)
    assert small["gradients"].noise < large["gradients"].noise

    model = warm(public_size=True, adjacency="replace-one", secure=False).fit(few_digits)
    assert [event["name"] for event in model.certificate_.events] == ["embedding", "gradients"]
    assert model.certificate_.epsilon is not None
    assert model.certificate_.epsilon <= 1
    named = model.certificate_.public_facts["warm"]
    assert (named["features"], named["adjacency"], named["public_size"], named["secure"]) == (
        20,
        "replace-one",
        True,
        False,
    )


def test_an_image_moves_its_own_class_only(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no image of a class there is nothing but noise in its block; without noise, nothing."""
    seen: list[dict[str, torch.Tensor]] = []
    plain = GradientVault.gradient

    def listening(self: GradientVault, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        assert options["by_class"]
        assert set(options["bound"]) == {"autoencoder", "flow"}
        seen.append(plain(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(GradientVault, "gradient", listening)
    assert few_digits.labels is not None
    some = few_digits.subset(few_digits.labels < 2)
    quick(epsilon=math.inf, sampling_prob=1.0, steps=2, public_size=True).fit(some)
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in seen[0].values()]).norm(dim=0)
    assert norms[:2].min() > 0
    assert norms[2:].max() == 0


@pytest.mark.parametrize("options", [{}, {"variant": "conditional"}, {"space": "pixels"}])
def test_models_are_saved_and_loaded(options: dict[str, Any], few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick(**options, sharpness=3.0).fit(few_digits, run_dir=tmp_path / "run")
    again = load(tmp_path / "run")
    assert isinstance(again, LatentFlow)
    assert again.sharpness == 3.0  # saved with the run
    assert torch.equal(again.sample(20, seed=1).images, model.sample(20, seed=1).images)
    assert torch.equal(again.score(few_digits), model.score(few_digits))
    assert verify(tmp_path / "run" / "certificate.json")
    with pytest.raises(DataError, match="holds a run already"):
        quick(**options).fit(few_digits, run_dir=tmp_path / "run")
    with pytest.raises(DataError, match="holds a finished run"):
        quick(**options, sharpness=3.0).fit(few_digits, run_dir=tmp_path / "run", resume=True)


def test_samples_can_be_sharpened_and_cooled(few_digits: ImageSet) -> None:
    model = quick().fit(few_digits)
    plain = model.sample(8, seed=1).images
    assert not torch.equal(model.sample(8, seed=1, sharpness=5.0).images, plain)
    assert not torch.equal(model.sample(8, seed=1, temperature=0.5).images, plain)
    assert model.sharpness == 0
    assert torch.equal(model.sample(8, seed=1).images, plain)
    with pytest.raises(ValueError, match="has no parameter 'width'"):
        model.sample(8, width=4)
    with pytest.raises(ValueError, match="sharpness must be 0 or greater"):
        model.sample(8, sharpness=-1.0)


def test_sharpening_is_that_of_the_paper() -> None:
    """As torchvision's adjust_sharpness(0), then adjust_sharpness(factor): by hand for one bright pixel."""
    image = torch.full((1, 1, 7, 7), -1.0)
    image[0, 0, 3, 3] = 1
    smooth = sharpen(image, 1.0)
    assert smooth[0, 0, 3, 3] == pytest.approx(2 * 5 / 13 - 1)
    assert smooth[0, 0, 2, 3] == pytest.approx(2 / 13 - 1)
    twice = 2 * (25 + 8) / 169 - 1  # the middle, smoothed again
    sharp = sharpen(image, 1.5)
    assert sharp[0, 0, 3, 3] == pytest.approx(1.5 * (2 * 5 / 13 - 1) - 0.5 * twice, abs=1e-6)
    assert sharpen(image, 50.0).abs().max() <= 1
    grey = torch.full((2, 3, 8, 8), 0.3)
    assert torch.allclose(sharpen(grey, 8.0), grey, atol=1e-6)


def test_likelihoods_of_codes_are_the_flow_s(few_digits: ImageSet) -> None:
    model = quick().fit(few_digits)
    network = model._network_of(1)
    assert network.autoencoder is not None
    images = few_digits.images.float() / 127.5 - 1
    with torch.no_grad():
        codes = network.autoencoder["encoder"](images)
        z, growth = network.flow(codes)
        expected = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) + growth
    assert torch.allclose(model.score(few_digits, label=1).float(), expected, atol=1e-4)
    assert (model.score(few_digits, label=1, likelihood="image").float() < expected).all()


def test_parameters_are_checked() -> None:
    for params, message in (
        ({"variant": "serial"}, "variant must be one of 'partitioned', 'conditional'"),
        ({"space": "wavelets"}, "space must be one of 'latent', 'pixels'"),
        ({"likelihood": "pixel"}, "likelihood must be one of 'code', 'image'"),
        ({"sampling_prob": 1.5}, "sampling_prob must be at most 1"),
        ({"warm": "dp-gan"}, "warm must be one of 'none', 'dp-merf'"),
        ({"code": 1}, "code must be at least 2"),
        ({"bounds": (1.0,)}, "bounds must be 2 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build(LatentFlow, **params)


@pytest.mark.parametrize("variant", ["partitioned", pytest.param("conditional", marks=pytest.mark.slow)])
def test_it_learns_digits(variant: str, digits: ImageSet) -> None:
    sizes = {"code": 8, "width": 8, "couplings": 2, "hidden": 24}
    model = build(
        LatentFlow,
        variant=variant,
        epsilon=50.0,
        procedural_batches=200,
        device="cpu",
        **{**COLD, "warm": "none", "steps": 60, "sampling_prob": 0.3, "learning_rates": (1e-2, 5e-3, 5e-2)},
        **sizes,
    ).fit(digits)
    accuracy = downstream_accuracy(model.sample(2000), load_images("digits", split="test"))
    assert accuracy.mean > 45  # 70 to 78 as a rule


def test_lessons_are_public_and_help(digits: ImageSet) -> None:
    """Weights before the first gradient come from the seed alone, and reconstruct better than random ones."""
    model = quick(code=8, width=8, procedural_batches=300)
    model._checkpoints = Checkpoints(None, None)  # type: ignore[arg-type]
    public = digits.public()
    images = digits.images[:100].float() / 127.5 - 1
    found = []
    for network in (
        model._new_network(public),
        model._pretrained_on_procedural_images(model._new_network(public), public),
    ):
        alone = unstack(network, 3)
        with torch.no_grad():
            found.append(float(alone(images, torch.zeros(100, 8))[0].mean()))
    assert found[1] > 0.85 * found[0]  # both below 0, which is perfect
    again = model._pretrained_on_procedural_images(model._new_network(public), public)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("variant", ["partitioned", "conditional"])
def test_painted_images_teach_each_class_its_own(variant: str, digits: ImageSet) -> None:
    """A classifier that learned from real images knows what is drawn, and knows nothing without the teaching."""
    assert digits.labels is not None
    painted = digits.subset(torch.cat([(digits.labels == c).nonzero()[:100, 0] for c in range(10)]))
    sizes = {"code": 8, "width": 8, "couplings": 2, "hidden": 24}
    model = build(
        LatentFlow,
        variant=variant,
        device="cpu",
        warm_start=WarmStartSettings(steps=150, batch_size=16, learning_rate=1e-2),
        **sizes,
    )
    model.public_, model.counts_, model.settings_ = digits.public(), torch.ones(10), {}
    model._checkpoints = Checkpoints(None, None)  # type: ignore[arg-type]

    def recognised(network: LatentNetwork) -> float:
        model.network_ = network
        return downstream_accuracy(digits, model.sample(300)).mean

    assert recognised(model._new_network(model.public_)) < 30
    network = model._new_network(model.public_)
    model._pretrain_on_images(network, painted)
    assert recognised(network) > 70


# -- an autoencoder from procedural images -----------------------------------------------------------------


def fixed(kind: Any = quick, **settings: Any) -> Any:
    return kind(**{"autoencoder": "procedural", **settings})


@pytest.mark.parametrize("options", [{}, pytest.param({"variant": "conditional"}, marks=pytest.mark.slow)])
def test_a_procedural_autoencoder_is_sound(options: dict[str, Any], fewer_digits: ImageSet) -> None:
    check_synthesizer(lambda **params: fixed(**{"steps": 2, **options, **params}), fewer_digits)


@pytest.mark.parametrize("kind", [quick, warm])
def test_private_images_change_the_flow_only(kind: Any, few_digits: ImageSet, tmp_path: Path) -> None:
    """Of two sets that share nothing, the autoencoders are the same, and the same for all classes."""
    other = ImageSet(255 - few_digits.images, few_digits.labels, few_digits.classes)
    model, second = (fixed(kind, epsilon=math.inf, public_size=True).fit(images) for images in (few_digits, other))
    states = [each.network_.state_dict() for each in (model, second)]
    same = {name: torch.equal(value, states[1][name]) for name, value in states[0].items()}
    assert all(equal for name, equal in same.items() if name.startswith("autoencoder."))
    assert not same["flow.shift"]
    weights = states[0]["autoencoder.encoder.trunk.0.weight"]
    assert torch.equal(weights[0], weights[-1])
    assert not torch.equal(
        weights[0], fixed()._new_network(few_digits.public()).state_dict()["autoencoder.encoder.trunk.0.weight"][0]
    )  # it has learned from procedural images
    model.save(tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").sample(9, seed=1).images, model.sample(9, seed=1).images)


def test_only_the_flow_is_clipped_and_trained(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[Any] = []

    def kept(vault: GradientVault, network: Any, *given: Any, bound: Any, **options: Any) -> Any:
        bounds.append((bound, {name.split(".")[0] for name, _ in network.named_parameters()}))
        return ask(vault, network, *given, bound=bound, **options)

    ask = GradientVault.gradient
    monkeypatch.setattr(GradientVault, "gradient", kept)
    fixed().fit(few_digits)
    assert bounds == [({"flow": 1.0}, {"flow"})] * 3


def test_a_procedural_autoencoder_needs_one() -> None:
    for other in ({"space": "pixels"}, {"procedural_batches": 0}):
        with pytest.raises(ValueError, match="needs space=latent and procedural_batches"):
            fixed(**other).validate()
    preset = LatentFlow(preset="procedural-autoencoder")._resolved(load_images("digits").public())
    assert preset.autoencoder == "procedural"
