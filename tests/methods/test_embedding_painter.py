"""The embedding painter: what it releases, the distributions it asks for, their correction, shapes, private loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.features.class_gaussians import moved
from sfumato.methods import embedding_painter as module
from sfumato.methods import prior_painter
from sfumato.methods.embedding_painter import ConditionedGenerator, EmbeddingPainter, Records
from sfumato.methods.prior_painter import PainterTraining, PrivateLoss
from sfumato.methods.teacher import TeacherSettings
from sfumato.nets.score import ScoreNetwork, denoising_loss
from sfumato.priors import load_prior, save_prior
from sfumato.priors.latent_space import Pixels
from sfumato.testing import build

PRIOR = Path(__file__).parents[1] / "priors" / "conditioned.safetensors"  # 8 px, grey, random weights
CPU = torch.device("cpu")
ADAPTATION = PainterTraining(pool=40, rounds=2, levels=2)  # too few images for a correction, see `corrected`
QUICK: dict[str, Any] = {
    "prior": str(PRIOR),
    "steps": 2,
    "sampling_prob": 0.5,
    "adaptation": ADAPTATION,
    "teacher": TeacherSettings(steps=5),
    "device": "cpu",
    "epsilon": 20.0,
    "public_size": True,
}


def quick(**settings: Any) -> Any:
    return build("atelier", **{**QUICK, **settings})


def painter_for(images: ImageSet, **settings: Any) -> EmbeddingPainter:
    painter = quick(**settings)._painter(images.public())
    assert isinstance(painter, EmbeddingPainter)
    return painter


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images of a class are enough for a correction."""
    monkeypatch.setattr(module, "MIN_IMAGES_PER_CLASS", 10)


@pytest.mark.usefixtures("corrected")
def test_a_fit_names_the_prior_and_its_model_is_saved(few_digits: ImageSet, tmp_path: Path) -> None:
    model = quick().fit(few_digits, run_dir=tmp_path / "run")
    facts = model.certificate_.public_facts
    assert facts["prior"] == load_prior(PRIOR).facts
    assert "encoder" not in facts  # scattering coefficients
    assert any("random weights, for tests" in caveat for caveat in model.certificate_.caveats)
    assert {event["name"] for event in model.certificate_.events} == {
        "moments",
        "common-moments",
        "teacher",
        "gradients",
    }
    assert sf.verify(tmp_path / "run" / "certificate.json")
    again, samples = sf.load(tmp_path / "run"), model.sample(12, seed=3)
    assert torch.equal(again.sample(12, seed=3).images, samples.images)
    assert not torch.equal(model.sample(12, seed=4).images, samples.images)
    assert isinstance(model.generator_, ConditionedGenerator)
    assert model.generator_.roots.any()


def test_without_steps_there_are_no_private_gradients(few_digits: ImageSet) -> None:
    public = few_digits.public(declare_size=False)
    plan = quick(steps=0, public_size=False).plan(public)
    assert [release.name for release in plan.releases] == ["counts", "moments", "common-moments", "teacher"]
    assert plan.epsilon == pytest.approx(20.0, rel=1e-3)
    sums = {release.name: release.times / release.noise**2 for release in plan.releases}
    of_moments = sums["moments"] + sums["common-moments"]
    assert sums["teacher"] / of_moments == pytest.approx(0.3, rel=1e-2)  # of the shares 0.15 and 0.5
    assert sums["common-moments"] / of_moments == pytest.approx(1 / 3, rel=1e-2)
    model = quick(steps=0).fit(few_digits)
    before = load_prior(PRIOR).state
    after = model.generator_.network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_private_gradients_change_few_parameters(few_digits: ImageSet) -> None:
    """Those that take the condition in a block are not among them."""
    before, after = load_prior(PRIOR).state, quick().fit(few_digits).generator_.network.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert {"unet.context.0.weight", "unet.entry.weight", "unet.last.2.weight"} <= changed
    assert "unet.middle.scale_shift.bias" in changed
    assert not {"unet.middle.first.weight", "unet.middle.scale_shift.weight"} & changed


def test_images_without_classes(few_digits: ImageSet) -> None:
    model = quick().fit(ImageSet(few_digits.images))
    assert model.sample(5).images.shape == (5, 1, 8, 8)
    assert {event["name"] for event in model.certificate_.events} == {"moments", "gradients"}


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 12, 12), (3, 16, 10)])
def test_images_come_back_in_their_own_shape(shape: tuple[int, int, int], tmp_path: Path) -> None:
    """The prior's images are grey, of 8 pixels: grey values stay grey, and the embedding is that of grey images."""
    pixels = torch.randint(256, (20, *shape), generator=torch.Generator().manual_seed(0)).byte()
    images = ImageSet(pixels, torch.arange(20) % 2, ("a", "b"))
    model = quick(soft_labels=True).fit(images, run_dir=tmp_path)
    made = model.sample(6)
    assert made.images.shape == (6, *shape)
    assert made.soft_labels is not None
    assert (made.images == made.images[:, :1]).all()
    assert made.images.float().std() > 1
    assert torch.equal(sf.load(tmp_path).sample(6).images, made.images)
    with pytest.raises(DataError, match="4 to 16, not 17 × 8"):
        quick().fit(ImageSet(torch.zeros(20, 1, 17, 8, dtype=torch.uint8)))


def test_another_encoder_is_refused(encoder: str, few_digits: ImageSet, tmp_path: Path) -> None:
    for run in (
        lambda: quick(encoder=encoder).plan(few_digits.public()),
        lambda: quick(encoder=encoder).fit(few_digits, run_dir=tmp_path / "run"),
    ):
        with pytest.raises(DataError, match=r"the prior conditioned has its own embedding.*leave encoder out"):
            run()
    assert not (tmp_path / "run").exists()


# -- what is asked for ------------------------------------------------------------------------------------


def test_without_noise_the_distributions_are_those_of_the_private_embeddings(
    few_digits: ImageSet, tmp_path: Path
) -> None:
    """Before the correction; of a prior whose images vary in all directions."""
    prior = load_prior(PRIOR)
    spread = {"spread": torch.full_like(prior.embedding["spread"], 0.004)}
    path = save_prior(tmp_path, prior.card, prior.state, {**prior.embedding, **spread})
    made = quick(prior=str(path), epsilon=math.inf, steps=0).fit(few_digits).generator_
    embedding = painter_for(few_digits).new_embedding()
    rows = embedding.condition(embedding(to_unit_range(few_digits.images)))
    assert few_digits.labels is not None
    for number in range(3):
        own = rows[few_digits.labels == number]
        assert torch.allclose(made.means[number], own.mean(0), atol=2e-3)
        found, exact = made.roots[number] @ made.roots[number].T, torch.cov(own.T, correction=0)
        assert (found - exact).norm() < 0.1 * exact.norm()
    assert (made.means[0] - made.means[1]).norm() > 0.2


class Nearest:
    """In the place of the prior's network: draws the public image whose embedding is nearest to the asked one."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images, self.embedding = images, load_prior(PRIOR).new_embedding(None, CPU)
        self.rows = self.embedding.condition(self.embedding(images))

    def __call__(
        self, network: Any, shape: Any, labels: torch.Tensor, generator: Any, *, condition: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        assert (labels == -1).all()
        return self.images[torch.cdist(condition, self.rows).argmin(1)]


def nearest_class(images: ImageSet, means: torch.Tensor, embedding: Any) -> torch.Tensor:
    """Return how often the embeddings of images are nearest to the mean of their own class."""
    assert images.labels is not None
    rows = embedding.condition(embedding(to_unit_range(images.images)))
    return (torch.cdist(rows, means).argmin(1) == images.labels).float().mean()


@pytest.mark.usefixtures("corrected")
def test_images_of_a_class_have_embeddings_of_this_class(
    digits: ImageSet, few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prior of other digits, without labels; private digits of three classes. With exchanged classes it fails."""
    drawing = Nearest(to_unit_range(digits.images[300:700]))
    monkeypatch.setattr(prior_painter, "draw_images", drawing)
    images = few_digits.subset(torch.arange(60))
    assert images.labels is not None
    images = ImageSet(images.images, images.labels, images.classes[:3])
    rows = drawing.embedding.condition(drawing.embedding(to_unit_range(images.images)))
    means = torch.stack([rows[images.labels == number].mean(0) for number in range(3)])
    settings = {"epsilon": math.inf, "steps": 0, "disagreement": "keep"}
    model = quick(**settings).fit(images)
    made = model.sample(90, labels=[number % 3 for number in range(90)])
    assert nearest_class(made, means, drawing.embedding) > 0.85
    assert len(made.images.flatten(1).unique(dim=0)) > 20  # not one image for each class
    model.generator_.means.copy_(model.generator_.means.roll(1, 0))  # planted: the distributions of other classes
    model.generator_.roots.copy_(model.generator_.roots.roll(1, 0))
    wrong = model.sample(90, labels=[number % 3 for number in range(90)])
    assert nearest_class(wrong, means, drawing.embedding) < 0.2


class Plain:
    """In the place of an embedding: rows are what they are."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def condition(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class Loop:
    """In the place of checkpoints."""

    def loop(self, name: str, total: int, **parts: Any) -> range:
        assert name == "correction"
        assert set(parts) == {"means", "random"}
        return range(total)


class Decided:
    """In the place of a teacher: the class of an image of the prior is that of its place."""

    def weigh(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.eye(2)[torch.arange(len(rows)) % 2]


def test_covariances_are_expected_from_images_of_the_prior(
    digits: ImageSet, few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class: of the images which the teacher takes for it, moved to the mean and covariance of all."""
    shown = to_unit_range(digits.images[:100])
    monkeypatch.setattr(module, "MIN_PUBLIC_IMAGES", 100)
    monkeypatch.setattr(prior_painter, "draw_images", lambda *_, **__: shown)
    painter, limit = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=100)), 0.5
    embedding = painter.new_embedding()
    conditions = embedding.condition(embedding(shown)).double() / limit
    spread, expected = painter._public_spread(embedding, Decided(), limit)  # type: ignore[arg-type]
    assert torch.allclose(spread, torch.cov(conditions.T))  # this prior has one class
    assert expected is not None
    means = torch.stack([conditions[:7].mean(0), conditions[7:20].mean(0)])
    found = expected(means, torch.tensor([0.5, 0.5]).double(), 4 * spread)
    offset = means[0] - means[1]
    wanted = moved(conditions, means.mean(0), 4 * spread + offset[:, None] * offset / 4)
    for number in range(2):
        own, width = torch.cov(wanted[number::2].T, correction=0), conditions.shape[1]
        assert torch.allclose(found[number], (50 * own + width * 4 * spread) / (50 + width))
    assert painter._public_spread(embedding, None, limit)[1] is None  # without a teacher
    fewer = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=99))
    plain, nothing = fewer._public_spread(embedding, Decided(), limit)  # type: ignore[arg-type]
    assert nothing is None
    assert torch.equal(plain, torch.diag(embedding.spread) / limit**2)


def test_the_spread_of_public_images_is_that_within_classes_of_the_prior(
    digits: ImageSet, few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prior of two classes, whose images are bright and dark; with too few images its classes are taken as one."""
    shown = (to_unit_range(digits.images[:100]) / 4 + (torch.arange(100) % 2)[:, None, None, None]).clamp(-1, 1)
    monkeypatch.setattr(module, "MIN_PUBLIC_IMAGES", 100)
    monkeypatch.setattr(prior_painter, "draw_images", lambda *_, **__: shown)
    painter = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=100))
    embedding, network = painter.new_embedding(), painter.prior.network()
    card = replace(painter.prior.card, classes=2)
    painter.prior = SimpleNamespace(card=card, network=lambda: network)  # type: ignore[assignment]
    conditions = embedding.condition(embedding(shown)).double()
    within, _ = painter._public_spread(embedding, None, 1.0)
    monkeypatch.setattr(module, "MIN_IMAGES_PER_GROUP", 51)
    whole, _ = painter._public_spread(embedding, None, 1.0)
    assert torch.allclose(whole, torch.cov(conditions.T))
    apart = torch.stack([conditions[number::2] - conditions[number::2].mean(0) for number in range(2)], 1)
    assert torch.allclose(within, torch.cov(apart.flatten(0, 1).T))
    assert within.trace() < 0.9 * whole.trace()


def test_a_fit_with_images_of_the_prior(few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PUBLIC_IMAGES", 40)
    model = quick(steps=0).fit(few_digits)
    monkeypatch.setattr(module, "MIN_PUBLIC_IMAGES", 41)
    plain = quick(steps=0).fit(few_digits)
    roots = model.generator_.roots
    assert roots.isfinite().all()
    assert [event["name"] for event in model.certificate_.events] == [
        event["name"] for event in plain.certificate_.events
    ]
    assert not torch.allclose(roots @ roots.mT, plain.generator_.roots @ plain.generator_.roots.mT, rtol=0.05)


@pytest.mark.usefixtures("corrected")
@pytest.mark.parametrize("rounds", [0, 1, 12])
def test_the_correction_moves_means_until_images_have_the_wanted_ones(
    rounds: int, few_digits: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that follows an embedding by half, with a constant error; one round corrects 35 % of the difference."""

    def half(self: EmbeddingPainter, made: ConditionedGenerator, labels: torch.Tensor, generator: Any) -> torch.Tensor:
        return made.gaussians.draw(labels, generator) / 2 + 0.1

    monkeypatch.setattr(EmbeddingPainter, "paint", half)
    painter = painter_for(few_digits, adaptation=replace(ADAPTATION, rounds=rounds))
    made, embedding = painter.new_generator(), Plain()
    wanted = torch.randn(made.means.shape, generator=torch.Generator().manual_seed(0))
    made.means.copy_(wanted)
    painter._correct(made, embedding, Loop())  # type: ignore[arg-type]
    got = half(painter, made, torch.arange(len(wanted)), torch.Generator().manual_seed(0))
    first = wanted / 2 - 0.1  # the difference without correction
    assert torch.allclose(wanted - got, 0.65**rounds * first, atol=1e-4)


def test_too_few_images_of_a_class_correct_nothing(few_digits: ImageSet) -> None:
    """Four classes and 399 images: their means would have more noise than error."""
    for pool, changed in ((399, False), (400, True)):
        painter = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=pool, rounds=1))
        made = painter.new_generator()
        painter._correct(made, painter.new_embedding(), Loop())  # type: ignore[arg-type]
        assert bool(made.means.any()) == changed


def test_a_plan_lists_the_settings_of_the_correction_only_where_there_is_one(few_digits: ImageSet) -> None:
    """Four classes with 100 images each, at least."""
    settings = {"adaptation.rounds", "adaptation.pool"}
    skipped = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=399)).in_use()
    drawn = painter_for(few_digits, adaptation=replace(ADAPTATION, pool=400)).in_use()
    assert all(skipped[name] is None for name in settings)
    assert drawn["adaptation.pool"] is not None
    assert "adaptation.rounds" not in drawn


@pytest.mark.usefixtures("corrected")
def test_the_correction_is_the_mean_over_images_of_each_class(few_digits: ImageSet) -> None:
    """With the prior's own network: the rounds change the means by 0.7 of the difference that is measured."""
    painter = painter_for(few_digits, adaptation=replace(ADAPTATION, rounds=1))
    made, embedding = painter.new_generator(), painter.new_embedding()
    wanted = 0.1 * torch.randn(made.means.shape, generator=torch.Generator().manual_seed(0))
    made.means.copy_(wanted)
    labels = torch.arange(4).repeat(10)
    images = painter.paint(made, labels, torch.Generator().manual_seed(painter.seed))
    rows = embedding.condition(embedding(images))
    measured = torch.stack([rows[labels == number].mean(0) for number in range(4)])
    painter._correct(made, embedding, Loop())  # type: ignore[arg-type]
    assert torch.allclose(made.means, wanted + 0.7 * (wanted - measured), atol=1e-4)


# -- private gradients ------------------------------------------------------------------------------------


def test_a_record_is_an_image_in_the_priors_shape_and_its_condition() -> None:
    embedding = load_prior(PRIOR).new_embedding(None, CPU)
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    records = Records(embedding, Pixels((1, 8, 8)))(images)
    assert records.shape == (5, 64 + 176)
    grey = torch.nn.functional.avg_pool2d(images.mean(1, keepdim=True), 2)
    assert torch.allclose(records[:, :64].view(5, 1, 8, 8), grey, atol=1e-5)
    assert torch.allclose(records[:, 64:], embedding.condition(embedding(grey)), atol=1e-4)


def test_the_private_loss_knows_nine_in_ten_conditions_and_no_label() -> None:
    """Its noise, its level and whether the condition is known come from the vault's normal numbers."""
    network = load_prior(PRIOR).network()
    generator = torch.Generator().manual_seed(0)
    loss = PrivateLoss((1, 8, 8), 0.5, 176)
    assert loss.draws == 2 + 64
    records, normals = torch.randn(6, 64 + 176, generator=generator), torch.randn(6, 66, generator=generator)
    records[:, 64:] /= 10
    normals[:, 1] = torch.tensor([-3.0, 0.0, 1.2, 1.3, 2.0, 5.0])
    got = loss(network, records, torch.arange(6) % 2, normals)
    images, noise = (part.view(6, 1, 8, 8) for part in (records[:, :64], normals[:, 2:]))
    levels, none = 0.5 * torch.exp(1.2 * normals[:, 0]), torch.full((6,), -1)
    known = denoising_loss(network, images, noise, levels, none, condition=records[:, 64:])
    unknown = denoising_loss(network, images, noise, levels, none)
    assert torch.allclose(got[:3], known[:3], rtol=1e-4)
    assert torch.allclose(got[3:], unknown[3:], rtol=1e-4)
    assert ((known - unknown).abs() > 1e-3 * known).all()
    dropped = 1 - 0.5 * (1 + math.erf(1.28 / math.sqrt(2)))
    assert dropped == pytest.approx(0.1, abs=2e-3)


def test_the_private_loss_without_condition_takes_labels() -> None:
    torch.manual_seed(0)
    network, loss = ScoreNetwork(1, 2, widths=(8, 8), context=8), PrivateLoss((1, 8, 8), 0.5)
    images, normals, labels = torch.randn(4, 1, 8, 8), torch.randn(4, 66), torch.arange(4) % 2
    levels = 0.5 * torch.exp(1.2 * normals[:, 0])
    expected = denoising_loss(network, images, normals[:, 2:].view(4, 1, 8, 8), levels, labels)
    assert torch.allclose(loss(network, images, labels, normals), expected, rtol=1e-4)
    assert not torch.allclose(loss(network, images, 1 - labels, normals), expected, rtol=1e-4)


def test_a_prior_that_changes_after_the_fit_is_refused(few_digits: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "prior.safetensors"
    path.write_bytes(PRIOR.read_bytes())
    quick(prior=str(path), steps=0).fit(few_digits, run_dir=tmp_path / "run")
    prior = load_prior(path)
    changed = {**prior.embedding, "spread": prior.embedding["spread"] * 2}
    save_prior(path, prior.card, prior.state, changed)
    with pytest.raises(DataError, match="'prior' is not the one"):
        sf.load(tmp_path / "run")
