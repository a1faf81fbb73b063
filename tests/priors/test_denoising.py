"""Training of a prior: what it writes and refuses; continuation; other starts. Sampling: range, seeds, guidance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sfumato.data import DataError, ImageSet
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine.state import read_tensors
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding
from sfumato.nets.score import ScoreNetwork, denoising_loss
from sfumato.nets.training import Trainer
from sfumato.priors import Prior, load_prior, save_prior, train_prior
from sfumato.priors import denoising as module
from sfumato.priors.denoising import CHECKPOINT, PICTURE, PriorTraining, PublicBatches, draw_images, draw_levels
from sfumato.priors.prior import FILE, PriorCard

SIZE, CPU = 16, torch.device("cpu")
TINY = PriorTraining(steps=20, batch_size=8, learning_rate=2e-3, widths=(8, 16), context=8, attention=1, flip=True)
ORIGIN = {"name": "mine", "trained_on": "stripes that a test drew"}


def stripes(count: int = 100, channels: int = 1, size: int = SIZE, labelled: bool = True, seed: int = 0) -> ImageSet:
    """Draw horizontal and vertical stripes, dark and bright."""
    generator = torch.Generator().manual_seed(seed)
    phase = 6 * torch.rand(count, 1, 1, 1, generator=generator)
    wave = torch.sin(0.8 * torch.arange(float(size)) + phase).expand(-1, channels, size, -1)
    labels = torch.arange(count) % 2
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, wave, wave.transpose(2, 3))
    return ImageSet(to_bytes(0.8 * images), labels, ("across", "down")) if labelled else ImageSet(to_bytes(images))


@pytest.fixture(autouse=True)
def few_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN", 9)


def fitted(images: ImageSet) -> ImageEmbedding:
    """Return an embedding that is fitted to these images, with few components."""
    embedding = ImageEmbedding(images.shape, None, CPU, 20)
    embedding.fit(to_unit_range(images.images), 0)
    return embedding


def train(folder: Path, settings: PriorTraining = TINY, images: ImageSet | None = None, **options: Any) -> Prior:
    return train_prior(images or stripes(), folder, settings=settings, **{**ORIGIN, **options})


# -- training ---------------------------------------------------------------------------------------------


def test_training_writes_a_prior_with_a_lower_loss(tmp_path: Path) -> None:
    """The loss of images that were held out; the network of no steps has the same initial weights."""
    images, settings = stripes(400), replace(TINY, steps=40, batch_size=32)
    options = {"licence": "CC0", "encoder": "small_tinyimagenet"}
    prior = train(tmp_path / "new" / "prior", settings, images, **options)
    untrained = train(tmp_path / "untrained", replace(settings, steps=0), images, **options)
    notes = prior.card.notes
    embedding = prior.new_embedding(prior.card.load_encoder(CPU), CPU)
    batches, network = PublicBatches(images, embedding, settings, 0, CPU), prior.network()
    for name, conditioned in (("held_out_loss", False), ("held_out_loss_conditioned", True)):
        assert notes[name] < 0.7 * untrained.card.notes[name]
        assert notes[name] == pytest.approx(batches.held_out_loss(network, conditioned=conditioned), rel=0.02)
    assert sorted(path.name for path in (tmp_path / "new" / "prior").iterdir()) == [FILE, PICTURE]  # no checkpoint
    with Image.open(tmp_path / "new" / "prior" / PICTURE) as picture:
        assert min(picture.size) >= 3 * SIZE
    assert prior.card == PriorCard(
        *("mine", 1, SIZE, 2, (8, 16), 8, 1, "stripes that a test drew", "CC0", "small_tinyimagenet"),
        encoder_sha256=load_perceptual("small_tinyimagenet").sha256,
        condition=128 + 48,
    )
    assert embedding.condition_width == 128 + 48
    parameters = sum(value.numel() for value in prior.network().parameters())
    numbers = {"images": 400, "steps": 40, "batch_size": 32, "images_seen": 40 * 32, "parameters": parameters}
    assert numbers.items() <= notes.items()
    assert load_prior(tmp_path / "new" / "prior").facts == prior.facts


LEARNED = replace(TINY, steps=80, batch_size=16, learning_rate=1e-2, attention=0, flip=False)


def test_an_image_whose_embedding_is_known_has_a_lower_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes of any phase: without the embedding the network cannot know it. With those of other images it errs."""
    images = stripes(300)
    prior = train(tmp_path, LEARNED, images)
    notes = prior.card.notes
    assert notes["held_out_loss_conditioned"] < 0.85 * notes["held_out_loss"]
    batches = PublicBatches(images, prior.new_embedding(None, CPU), LEARNED, 0, CPU)
    monkeypatch.setattr(batches, "_conditions", batches._conditions.roll(1, 1))
    assert batches.held_out_loss(prior.network(), conditioned=True) > 1.1 * notes["held_out_loss"]


def test_the_picture_is_of_held_out_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor | None] = []

    def kept(*given: Any, condition: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        seen.append(condition)
        return draw_images(*given, condition=condition, **options)

    monkeypatch.setattr(module, "draw_images", kept)
    prior = train(tmp_path, replace(TINY, steps=1))
    batches = PublicBatches(stripes(), prior.new_embedding(None, CPU), TINY, 0, CPU)
    assert seen[0] is not None
    assert torch.allclose(seen[0], batches.held_out_conditions(9), atol=2e-3)  # of two images, five and four times
    assert torch.equal(seen[0][0], seen[0][2])
    assert not torch.allclose(seen[0][0], seen[0][1], atol=1e-2)


@pytest.mark.parametrize(("labelled", "classes"), [(True, 2), (False, 1)])
def test_colour_images_with_and_without_labels(tmp_path: Path, labelled: bool, classes: int) -> None:
    prior = train(tmp_path, replace(TINY, steps=2), stripes(50, 3, labelled=labelled))
    assert (prior.card.channels, prior.card.classes) == (3, classes)
    assert prior.card.licence == "not stated"


def test_the_seed_decides(tmp_path: Path) -> None:
    settings, state = replace(TINY, steps=3), torch.get_rng_state()
    one, same, other = (train(tmp_path / str(n), settings, seed=seed) for n, seed in enumerate((1, 1, 2)))
    assert equal(one, same)
    assert not equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def equal(one: Prior, other: Prior) -> bool:
    pairs = ((one.state, other.state), (one.embedding, other.embedding))
    return all(torch.equal(value, theirs[name]) for own, theirs in pairs for name, value in own.items())


class Interruption:
    """Raises KeyboardInterrupt at a step of the training."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps, self._at, self._descend = 0, step, Trainer.descend
        monkeypatch.setattr(Trainer, "descend", lambda trainer, loss: self.step(trainer, loss))

    def step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self._descend(trainer, loss)
        self.steps += 1
        if self.steps == self._at:
            raise KeyboardInterrupt


def interrupt(folder: Path, step: int, settings: PriorTraining = TINY, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Interruption(step, patch)
        with pytest.raises(KeyboardInterrupt):
            train(folder, settings, **options)


LONGER = replace(TINY, steps=40)  # a checkpoint after every second step


@pytest.mark.parametrize("step", [1, 12, 13, 40])
def test_an_interrupted_training_continues_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    straight = train(tmp_path / "straight", LONGER)
    folder = tmp_path / "interrupted"
    interrupt(folder, step, LONGER)
    assert not (folder / FILE).exists()
    done = (step - 1) // 2 * 2  # steps in the last checkpoint
    assert (folder / CHECKPOINT).exists() == (done > 0)
    counted = Interruption(-1, monkeypatch)
    resumed = train(folder, LONGER, resume=True)
    assert counted.steps == 40 - done
    assert equal(resumed, straight)
    assert resumed.card.notes == straight.card.notes
    assert not (folder / CHECKPOINT).exists()


@pytest.mark.parametrize("part", ["optimizer", "batches", "steps"])
def test_a_part_that_is_not_restored_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Planted fault: Adam's state, the generator, or the number of steps of the average is lost."""
    straight = train(tmp_path / "straight", LONGER)
    interrupt(tmp_path / "interrupted", 13, LONGER)
    restore = module.restore

    def partly(target: Any, state: dict[str, torch.Tensor]) -> None:
        if part == "batches" and isinstance(target, torch.Generator):
            return
        kept = {
            name: value for name, value in state.items() if part != "optimizer" or not name.startswith("optimizer/0/")
        }
        if part == "steps" and isinstance(target, Trainer):
            kept["steps/value"] = torch.tensor(0)
        restore(target, kept)

    monkeypatch.setattr(module, "restore", partly)
    assert not equal(train(tmp_path / "interrupted", LONGER, resume=True), straight)


def test_resume_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    settings = replace(TINY, steps=2)
    assert equal(train(tmp_path / "a", settings, resume=True), train(tmp_path / "b", settings))


# -- another start ----------------------------------------------------------------------------------------


def written(folder: Path, condition: int = 0, **changes: Any) -> Prior:
    """Return a prior with random weights, as it is read from a file; `condition`: any number but 0 for an embedding."""
    embedding = fitted_in_full() if condition else None
    width = embedding.condition_width if embedding else 0
    card = replace(PriorCard("old", 1, SIZE, 2, (8, 16), 8, 1, "nothing", "CC0", condition=width), **changes)
    torch.manual_seed(7)
    state = {name: value + 0.1 * torch.randn_like(value) for name, value in card.new_network().state_dict().items()}
    return load_prior(save_prior(folder, card, state, embedding.state_dict() if embedding else None))


def fitted_in_full() -> ImageEmbedding:
    """Return an embedding with as many components as that of a prior, fitted to other stripes."""
    embedding = ImageEmbedding((1, SIZE, SIZE), None, CPU)
    embedding.fit(to_unit_range(stripes(60, seed=5).images), 0)
    return embedding


def output(prior: Prior, label: int, size: int = SIZE, condition: torch.Tensor | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    images, levels = torch.randn(3, 1, size, size, generator=generator), torch.tensor([0.1, 1.0, 5.0])
    with torch.no_grad():
        result: torch.Tensor = prior.network().eval()(images, levels, torch.full((3,), label), condition=condition)
    return result


def rows(prior: Prior) -> torch.Tensor:
    """Return three embeddings that a network may be conditioned on."""
    return torch.randn(3, prior.card.condition, generator=torch.Generator().manual_seed(4)) / 10


UNTRAINED = replace(TINY, steps=0)


def test_a_network_that_has_grown_gives_what_it_gave_before(tmp_path: Path) -> None:
    """A prior without embedding gets one, which has no effect before the training."""
    old = written(tmp_path / "old.safetensors")
    new = train(tmp_path / "new", UNTRAINED, start=old)
    assert new.card.condition > 0
    for label in (-1, 0, 1):
        for condition in (None, rows(new)):
            assert torch.allclose(output(new, label, condition=condition), output(old, label), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output(train(tmp_path / "plain", UNTRAINED), 0), output(old, 0), atol=0.1)
    trained = train(tmp_path / "trained", replace(LEARNED, steps=2, attention=1), start=old)
    changed = output(trained, 0, condition=rows(new)) - output(trained, 0)
    assert changed.abs().max() > 1e-3  # it is learned from then on


def test_a_network_that_knows_the_embedding_keeps_it(tmp_path: Path) -> None:
    """The same encoder and size: neither the embedding nor its effect changes, whatever the images."""
    old = written(tmp_path / "old.safetensors", 1)
    new = train(tmp_path / "new", UNTRAINED, start=old)
    assert new.card.condition == old.card.condition
    assert all(torch.equal(new.embedding[name], value) for name, value in old.embedding.items())
    known = rows(old)
    assert torch.allclose(output(new, 1, condition=known), output(old, 1, condition=known), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output(new, 1, condition=known), output(old, 1), atol=1e-2)


@pytest.mark.parametrize("changes", [{"encoder": "small_tinyimagenet"}, {"images": stripes(60, size=24)}], ids=str)
def test_another_embedding_is_learned_anew(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Images of another size, or another encoder: what the old network knew of embeddings is not true of these."""
    old = written(tmp_path / "old.safetensors", 1)
    new = train(tmp_path / "new", UNTRAINED, start=old, **changes)
    size = new.card.size
    for condition in (None, rows(new)):
        got, expected = output(new, 1, size, condition), output(old, 1, size)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output(old, 1, condition=rows(old)), output(old, 1), atol=1e-2)  # it did matter
    shapes = [each.shape for each in (new.embedding["centre"], old.embedding["centre"])]
    assert shapes[0] != shapes[1] or not torch.equal(new.embedding["centre"], old.embedding["centre"])


@pytest.mark.parametrize("condition", [0, 1])
def test_other_classes_begin_as_the_mean_of_the_old_ones(tmp_path: Path, condition: int) -> None:
    old = written(tmp_path / "old.safetensors", condition)
    new = train(tmp_path / "new", UNTRAINED, stripes(labelled=False), start=old)
    assert new.card.classes == 1
    assert torch.allclose(output(new, -1), output(old, -1), rtol=1e-4, atol=1e-4)
    mean = replace(old, state=old.network().with_classes(torch.full((1, 2), 0.5)).state_dict())
    mean = replace(mean, card=replace(old.card, classes=1))
    assert torch.allclose(output(new, 0), output(mean, 0), rtol=1e-3, atol=1e-3)  # stored in half precision
    assert not torch.allclose(output(new, 0), output(old, 0), atol=1e-2)


def test_images_that_were_seen_are_counted_over_both_trainings(tmp_path: Path) -> None:
    first = train(tmp_path / "first", replace(TINY, steps=3))
    second = train(tmp_path / "second", replace(TINY, steps=2, batch_size=5), start=first)
    assert (first.card.notes["images_seen"], second.card.notes["images_seen"]) == (24, 34)


@pytest.mark.parametrize(
    "changes",
    [{"channels": 3}, {"widths": (8, 8)}, {"widths": (8, 16, 16)}, {"context": 16}, {"attention": 0}],
    ids=str,
)
def test_a_start_with_another_network_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the prior old has a network of other channels, widths, context or attention"):
        train(tmp_path / "new", start=written(tmp_path / "old.safetensors", **changes))
    assert not (tmp_path / "new").exists()


def test_a_training_is_continued_from_the_same_start_only(tmp_path: Path) -> None:
    start = written(tmp_path / "old.safetensors")
    interrupt(tmp_path / "new", 3, start=start)
    for other in (None, written(tmp_path / "other.safetensors", name="other")):
        with pytest.raises(DataError, match="holds a training with other settings, seed or images"):
            train(tmp_path / "new", resume=True, start=other)
    straight = train(tmp_path / "straight", start=start)
    assert equal(train(tmp_path / "new", resume=True, start=start), straight)


def inverted(images: ImageSet) -> ImageSet:
    return replace(images, images=255 - images.images)


# -- what is refused --------------------------------------------------------------------------------------


def test_an_interrupted_training_is_not_overwritten(tmp_path: Path) -> None:
    interrupt(tmp_path, 3)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(DataError, match=r"holds an interrupted training; continue it with resume \(--resume\)"):
        train(tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": replace(TINY, learning_rate=1e-3)},
        {"settings": replace(TINY, steps=21)},
        {"settings": replace(TINY, widths=(8, 8))},
        {"seed": 1},  # another split into training and held-out images
        {"images": stripes(101)},
        {"images": stripes(labelled=False)},
        {"images": stripes(channels=3)},
        {"images": inverted(stripes())},  # of the same shape, number and labels
    ],
)
def test_a_training_is_continued_with_the_same_settings_only(tmp_path: Path, changes: dict[str, Any]) -> None:
    interrupt(tmp_path, 3)
    with pytest.raises(DataError, match="holds a training with other settings, seed or images"):
        train(tmp_path, resume=True, **changes)
    assert read_tensors(tmp_path / CHECKPOINT)[1]["step"] == 2
    train(tmp_path, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_folder_is_refused(tmp_path: Path, resume: bool) -> None:
    finished = train(tmp_path, replace(TINY, steps=1))
    with pytest.raises(DataError, match="holds a finished prior; choose another folder"):
        train(tmp_path, replace(TINY, steps=1), resume=resume)
    assert load_prior(tmp_path).sha256 == finished.sha256


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((60, 1, 16, 20), "square images of 16 to 64 pixels, not 16 × 20"),
        ((60, 3, 65, 65), "square images of 16 to 64 pixels, not 65 × 65"),
        ((60, 1, 15, 15), "square images of 16 to 64 pixels, not 15 × 15"),
        ((49, 1, 16, 16), "at least 50 images, and should have thousands; there are 49"),
    ],
)
def test_unsuitable_images_are_refused(tmp_path: Path, shape: tuple[int, ...], message: str) -> None:
    images = ImageSet(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(DataError, match=message):
        train(tmp_path / "new", images=images)
    assert not (tmp_path / "new").exists()


# -- batches ----------------------------------------------------------------------------------------------


def test_held_out_images_are_never_trained_on() -> None:
    """Each image has one value of its own."""
    pixels = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, SIZE, SIZE).contiguous()
    batches = PublicBatches(ImageSet(pixels), fitted(stripes()), replace(TINY, batch_size=500), 0, CPU)
    drawn = [batches.draw() for _ in range(8)]
    seen = {int(value) for images, *_ in drawn for value in to_bytes(images[:, 0, 0, 0])}
    held = {int(value) for value in batches._forms[0, : batches._held, 0, 0, 0]}
    assert len(held) == 2
    assert seen == set(range(100)) - held


def test_labels_and_conditions_are_dropped_and_images_are_mirrored_if_asked() -> None:
    """Of 2,000 labels half are dropped, and a tenth of the conditions, independently; five standard deviations."""
    images = stripes(100)
    ramp = torch.arange(SIZE, dtype=torch.uint8).expand(100, 1, SIZE, SIZE).contiguous()
    for flip in (False, True):
        held, settings = ImageSet(ramp, images.labels, images.classes), replace(TINY, batch_size=2000, flip=flip)
        batches = PublicBatches(held, fitted(images), settings, 0, CPU)
        pixels, noise, levels, labels, conditions = batches.draw()
        assert pixels.shape == noise.shape == (2000, 1, SIZE, SIZE)
        unlabelled, unknown = labels == -1, ~conditions.any(1)
        assert abs(int(unlabelled.sum()) - 1000) < 112
        assert abs(int(unknown.sum()) - 200) < 67
        assert abs(int((unlabelled & unknown).sum()) - 100) < 50
        assert set(labels.tolist()) == {-1, 0, 1}
        assert module.LOWEST <= levels.min() < levels.median() < levels.max() <= module.HIGHEST
        mirrored = pixels[:, 0, 0, 0] > pixels[:, 0, 0, -1]
        assert abs(float(mirrored.float().mean()) - 0.5 * flip) < 0.06
        assert torch.equal(to_bytes(pixels[~mirrored][0]), ramp[0])


@pytest.mark.parametrize("flip", [False, True])
def test_conditions_are_the_embeddings_of_the_images_in_the_batch(flip: bool) -> None:
    """Of a mirrored image, that of the mirrored one. Stripes with a slope in brightness, which a mirror turns."""
    images = stripes(60)
    slope = (images.images.float() / 2 + 8 * torch.arange(SIZE)).byte()
    held = ImageSet(slope, images.labels, images.classes)
    embedding = fitted(held)
    batches = PublicBatches(held, embedding, replace(TINY, batch_size=50, flip=flip), 0, CPU)
    pixels, _, _, _, conditions = batches.draw()
    known = conditions.any(1)
    assert torch.allclose(embedding.condition(embedding(pixels))[known], conditions[known], atol=1e-3)
    assert not torch.allclose(embedding.condition(embedding(pixels.flip(3)))[known], conditions[known], atol=0.1)


def test_noise_levels_are_log_normal() -> None:
    """Five standard errors of 20,000 draws."""
    logs = draw_levels(20_000, torch.Generator().manual_seed(0)).log()
    assert logs.median().exp() == pytest.approx(module.LEVEL_CENTRE, rel=0.06)
    assert logs.std() == pytest.approx(module.LEVEL_SPREAD, rel=0.025)


def test_the_held_out_loss_is_a_mean_over_all_images_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = tiny_network(), stripes(600)
    batches = PublicBatches(images, fitted(images), TINY, 0, CPU)
    first = batches.held_out_loss(network)
    batches.draw()
    assert batches.held_out_loss(network) == first
    seen: list[tuple[int, set[int], bool]] = []

    def counted(
        network: ScoreNetwork, pixels: torch.Tensor, noise: Any, levels: Any, labels: Any, condition: Any
    ) -> torch.Tensor:
        seen.append((len(pixels), set(labels.tolist()), condition is not None))
        return denoising_loss(network, pixels, noise, levels, labels)

    monkeypatch.setattr(module, "denoising_loss", counted)
    batches.held_out_loss(network)
    batches.held_out_loss(network, conditioned=True)
    assert seen == [(12, {-1}, False), (12, {-1}, True)]


# -- sampling ---------------------------------------------------------------------------------------------


def tiny_network(classes: int = 2, seed: int = 0) -> ScoreNetwork:
    torch.manual_seed(seed)
    return ScoreNetwork(1, classes, widths=(8, 16), context=8, attention=1).eval()


def draw(network: ScoreNetwork, labels: torch.Tensor, seed: int = 0, **options: Any) -> torch.Tensor:
    return draw_images(network, (1, SIZE, SIZE), labels, torch.Generator().manual_seed(seed), **options)


def test_images_are_in_range_and_the_generator_decides() -> None:
    network, labels = tiny_network(), torch.arange(6) % 2
    images = draw(network, labels)
    assert images.shape == (6, 1, SIZE, SIZE)
    assert images.dtype == torch.float32
    assert images.abs().max() <= 1
    assert images.std() > 0.05
    assert not images.requires_grad
    assert torch.equal(draw(network, labels), images)
    assert not torch.allclose(draw(network, labels, seed=1), images, atol=1e-2)
    assert not torch.allclose(draw(network, labels, levels=9), images, atol=1e-3)
    assert not torch.allclose(draw(network, 1 - labels), images, atol=1e-4)


def test_guidance_of_one_is_none() -> None:
    network, labels = tiny_network(), torch.arange(6) % 2
    plain = draw(network, labels)
    assert torch.equal(draw(network, labels, guidance=1.0), plain)
    assert not torch.allclose(draw(network, labels, guidance=3.0), plain, atol=1e-3)
    none = torch.full_like(labels, -1)
    assert torch.allclose(draw(network, none, guidance=3.0), draw(network, none), atol=1e-4)  # nothing to guide to


class Known(ScoreNetwork):
    """The score of constant images of value c / 10, 0 without class c, plus the condition. Keeps the calls."""

    def __init__(self) -> None:
        super().__init__(1, 2, widths=(8,), context=8)
        self.calls: list[tuple[float, bool]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Known:
        return self  # so that the sampler's copy records its calls here

    def forward(
        self, noisy: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor, code: Any = None, condition: Any = None
    ) -> Any:
        known = torch.zeros(len(labels)) if condition is None else condition[:, 0]
        self.calls.append((float(levels[0]), bool((labels < 0).all() and not known.any())))
        mean = (torch.where(labels < 0, 0.0, labels / 10) + known).view(-1, 1, 1, 1)
        return (mean - noisy) / levels.view(-1, 1, 1, 1).square()


def test_the_sampler_ends_at_the_denoised_image() -> None:
    labels = torch.tensor([0, 1, 2, -1])
    images = draw(Known(), labels)
    expected = torch.tensor([0.0, 0.1, 0.2, 0.0]).view(-1, 1, 1, 1).expand_as(images)
    assert torch.allclose(images, expected, atol=1e-4)
    known = torch.tensor([0.3, 0.0, -0.3, 0.5])
    images = draw(Known(), labels, condition=known[:, None])
    assert torch.allclose(images, expected + known.view(-1, 1, 1, 1), atol=1e-4)


def test_guidance_leads_away_from_images_without_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """With guidance g the mean moves to g times that of the condition, if nothing is known in the other term."""
    network, none, known = Known(), torch.tensor([-1, -1]), torch.tensor([[0.1], [-0.2]])
    monkeypatch.setattr(module, "GUIDANCE_LEVELS", (0.0, 100.0))
    images = draw(network, none, guidance=3.0, condition=known)
    assert torch.allclose(images[:, 0, 0, 0], 3 * known[:, 0], atol=1e-3)
    assert len([level for level, nothing in network.calls if nothing]) == len(network.calls) / 2 > 0


def test_guidance_extrapolates_at_medium_noise_levels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """With guidance g the mean moves to g times that of the class; at low levels it does not."""
    network, labels = Known(), torch.tensor([1, 2])
    images = draw(network, labels, guidance=3.0)
    unguided = [level for level, none in network.calls if none]
    low, high = module.GUIDANCE_LEVELS
    assert 3 < len(unguided) < module.SAMPLER_LEVELS
    assert all(low < level < high for level in unguided)
    assert torch.allclose(images[:, 0, 0, 0], torch.tensor([0.1, 0.2]), atol=1e-3)  # the last levels are not guided
    monkeypatch.setattr(module, "GUIDANCE_LEVELS", (0.0, 100.0))
    assert torch.allclose(draw(Known(), labels, guidance=3.0)[:, 0, 0, 0], torch.tensor([0.3, 0.6]), atol=1e-3)


def test_a_trained_prior_draws_images_of_the_asked_embedding(tmp_path: Path) -> None:
    """Two grey values instead of stripes: what the smallest network learns in seconds."""
    values = torch.tensor([40, 215], dtype=torch.uint8)[torch.arange(200) % 2]
    pixels = values.view(-1, 1, 1, 1).expand(-1, 1, SIZE, SIZE).contiguous()
    prior = train(tmp_path, replace(LEARNED, steps=100, learning_rate=5e-3), ImageSet(pixels))
    embedding, wanted = prior.new_embedding(None, CPU), to_unit_range(pixels[:2])
    known = embedding.condition(embedding(wanted)).repeat(10, 1)
    none = torch.full((20,), -1)
    drawn = draw(prior.network().eval(), none, levels=12, condition=known).mean((1, 2, 3)).view(10, 2)
    assert (drawn.mean(0) - wanted.mean((1, 2, 3))).abs().max() < 0.3
    assert (drawn[:, 0] < drawn[:, 1]).all()
