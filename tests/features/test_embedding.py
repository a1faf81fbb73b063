"""Embedding: norm, parts, shapes, state, tracing by the vault. Tilting: weights, means, the dual problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sfumato.data import ImageSet
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine import calibrate
from sfumato.features import Perceptual, load_perceptual
from sfumato.features import embedding as module
from sfumato.features.embedding import LAYOUT, LAYOUT_WEIGHT, ImageEmbedding, convert, tilt
from sfumato.privacy import Budget, Release, Vault

SIZE, COMPONENTS, CPU = 16, 12, torch.device("cpu")
ENCODERS = ["", "small_tinyimagenet"]  # scattering coefficients, and an encoder that is part of the package
KINDS = [(encoder, channels) for encoder in ENCODERS for channels in (1, 3)]
ROUNDING = 1e-5


def load(encoder: str) -> Perceptual | None:
    return load_perceptual(encoder) if encoder else None


def stripes(count: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Draw images in [-1, 1]: stripes of random direction, frequency and colour, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.linspace(-1, 1, SIZE)
    angle, frequency, phase = 6 * torch.rand(3, count, 1, 1, 1, generator=generator)
    along = angle.cos() * axis[:, None] + angle.sin() * axis
    colour = torch.rand(count, channels, 1, 1, generator=generator) * 2 - 1
    noise = 0.2 * torch.randn(count, channels, SIZE, SIZE, generator=generator)
    return (colour * torch.sin(2 * frequency * along + phase) + noise).clamp(-1, 1)


def fitted(encoder: str, channels: int, seed: int = 0) -> ImageEmbedding:
    embedding = ImageEmbedding((channels, SIZE, SIZE), load(encoder), CPU, COMPONENTS)
    embedding.fit(stripes(40, channels, 100 + seed), seed)
    return embedding


def test_rounding_errors_do_not_grow_near_the_mean() -> None:
    """An image whose content is nearly that of the mean: its direction is nothing but rounding errors."""
    embedding = fitted("", 1)
    thumbnail = torch.zeros(2, embedding.layout_centre.numel())
    error = 1e-6 * torch.nn.functional.normalize(torch.randn(2, len(embedding.centre)), dim=1)
    near = embedding.centre + torch.cat([torch.zeros(1, len(embedding.centre)), error])
    rows = embedding._join(near, thumbnail[:1].expand(3, -1))
    scale = float(embedding.axes.norm(dim=1).max())
    moved = (rows[1:] - rows[0]).norm(dim=1)
    assert float(moved.max()) < 1e-6 * max(scale, float(torch.linalg.matrix_norm(embedding.axes, 2))) * 2 / 1.1
    planted = torch.nn.functional.normalize((near - embedding.centre) @ embedding.axes, dim=1)
    assert float((planted[1] - planted[0]).norm()) > 0.9  # what a division by the norm itself does


@pytest.mark.parametrize(("encoder", "channels"), KINDS)
def test_norm_is_at_most_one(encoder: str, channels: int) -> None:
    """Also for images far from the public ones: black, white, noise, and a single pixel."""
    embedding, pixel = fitted(encoder, channels), -torch.ones(1, channels, SIZE, SIZE)
    pixel[..., 5, 5] = 1
    white = torch.ones(1, channels, SIZE, SIZE)
    noise = torch.randn(4, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).sign()
    rows = embedding(torch.cat([stripes(20, channels), white, -white, pixel, noise]))
    assert rows.shape == (27, embedding.width) == (27, COMPONENTS + LAYOUT)
    norms = rows.norm(dim=1)
    assert norms.max() <= 1 + ROUNDING
    assert norms[20] == pytest.approx(1, abs=1e-4)  # white: farther from the mean thumbnail than the stripes
    assert norms[:20].min() > math.sqrt(1 / 1.25) - ROUNDING  # of images like the public ones


@pytest.mark.parametrize(("encoder", "channels"), KINDS)
def test_rows_are_independent_and_differ(encoder: str, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, images = fitted(encoder, channels), stripes(7, channels)
    rows = embedding(images)
    alone = torch.cat([embedding(image[None]) for image in images])
    assert torch.allclose(rows, alone, atol=1e-4)
    monkeypatch.setattr(module, "IMAGES_PER_BATCH", 3)
    assert torch.allclose(embedding(images), rows, atol=1e-4)
    assert torch.pdist(rows).min() > 0.01
    plain = embedding._rows[0]
    embedding._rows[0] = lambda x: plain(x) - plain(x).mean(0)  # planted fault: rows that depend on their batch
    assert not torch.allclose(torch.cat([embedding(image[None]) for image in images]), embedding(images), atol=1e-2)


def test_components_have_levelled_spreads() -> None:
    """Projected on the axes, the spread of a component is that of the data to the power of one half."""
    embedding, images = fitted("", 1), stripes(40, 1, 100)
    rows = embedding._rows[0](images)
    assert torch.allclose(embedding.centre, rows.mean(0), atol=1e-5)
    spread = torch.linalg.svdvals(rows - rows.mean(0))[:COMPONENTS]
    projected = ((rows - embedding.centre) @ embedding.axes).norm(dim=0)
    assert torch.allclose(projected / projected[0], (spread / spread[0]).sqrt(), rtol=0.1)
    products = embedding.axes.T @ embedding.axes
    assert (products - products.diag().diag()).abs().max() < 1e-3 * products.max()


def test_fewer_public_images_than_components() -> None:
    embedding = ImageEmbedding((1, SIZE, SIZE), None, CPU, COMPONENTS)
    embedding.fit(stripes(5, 1, 100), 0)
    rows = embedding(stripes(6, 1))
    assert rows.shape == (6, embedding.width)
    assert rows.isfinite().all()
    assert rows.norm(dim=1).max() <= 1 + ROUNDING
    assert not embedding.axes[:, 5:].any()
    assert not embedding.layout_axes[:, 5:].any()


def test_another_fit_replaces_the_first_and_the_seed_decides() -> None:
    embedding, images = fitted("", 1), stripes(5, 1)
    first, state = embedding(images), torch.get_rng_state()
    embedding.fit(stripes(5, 1, 7), 0)
    assert not torch.allclose(embedding(images), first, atol=1e-2)
    embedding.fit(stripes(40, 1, 100), 0)
    assert torch.equal(embedding(images), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("encoder", "channels"), KINDS)
def test_a_state_holds_all_that_was_fitted(encoder: str, channels: int) -> None:
    embedding, images = fitted(encoder, channels), stripes(5, channels)
    other = ImageEmbedding((channels, SIZE, SIZE), load(encoder), CPU, COMPONENTS)
    assert embedding.state_dict().keys() == ImageEmbedding.STATE  # public networks are not part of it
    other.load_state_dict(embedding.state_dict())
    assert torch.equal(other(images), embedding(images))
    assert torch.equal(other.spread, embedding.spread)


def test_an_encoder_sees_a_grey_image_as_three_equal_channels() -> None:
    grey, encoder = stripes(5, 1), ENCODERS[1]
    one, three = (ImageEmbedding((channels, SIZE, SIZE), load(encoder), CPU)._rows[0] for channels in (1, 3))
    assert torch.allclose(one(grey), three(grey.expand(-1, 3, -1, -1)), atol=1e-4)
    assert not torch.allclose(three(stripes(5, 3)), one(grey), atol=1e-2)


@pytest.mark.parametrize(("encoder", "channels"), KINDS)
def test_the_vault_traces_the_embedding(encoder: str, channels: int) -> None:
    """Without noise, class sums over mapped records are those of the plain embedding: nothing was clipped or mixed."""
    embedding = fitted(encoder, channels)
    images = ImageSet(to_bytes(stripes(9, channels)), torch.arange(9) % 2, ("a", "b"))
    vault = Vault(images, calibrate([Release("means")], Budget(math.inf))).map(embedding)
    got = vault.sum(lambda rows: rows, release="means", bound=1.0, by_class=True)
    rows = embedding(to_unit_range(images.images))
    expected = torch.stack([rows[0::2].sum(0), rows[1::2].sum(0)])
    assert torch.allclose(got.to(expected), expected, atol=2e-3)
    assert not torch.allclose(expected, expected.flip(0), atol=0.1)  # the classes differ by more


# -- parts ------------------------------------------------------------------------------------------------


def test_the_layout_of_an_average_image_has_half_of_its_largest_norm() -> None:
    """The largest norm is that of an image twice as far from the mean thumbnail as the average."""
    embedding, largest = fitted("", 3), LAYOUT_WEIGHT / math.sqrt(1 + LAYOUT_WEIGHT**2)
    norms = embedding(stripes(40, 3, 100))[:, embedding.content :].norm(dim=1)
    assert norms.max() <= largest + ROUNDING
    assert float(norms.mean()) == pytest.approx(largest / 2, rel=0.15)


def test_the_layout_tells_where_and_in_which_colour() -> None:
    """Four images of one grey value and texture: the content hardly differs, the layout does."""
    embedding = fitted("", 3)
    images = -torch.ones(4, 3, SIZE, SIZE)
    images[0, 0, :8], images[1, 2, :8], images[2, 0, 8:], images[3, 2, 8:] = 1, 1, 1, 1  # red, blue; above, below
    rows = embedding(images)[:, embedding.content :]
    assert torch.pdist(rows).min() > 0.05
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    colourless = embedding(grey)[:, embedding.content :]
    assert (colourless[0] - colourless[1]).norm() < 1e-4  # where colour is removed, nothing tells them apart


def test_the_condition_is_the_main_content_and_all_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(float(COMPONENTS + LAYOUT)).expand(2, -1)
    embedding = fitted("", 1)
    assert embedding.condition_width == embedding.width
    assert torch.equal(embedding.condition(rows), rows)
    monkeypatch.setattr(module, "CONDITION", 5)
    shorter = fitted("", 1)
    assert (shorter.width, shorter.condition_width) == (COMPONENTS + LAYOUT, 5 + LAYOUT)
    kept = [*range(5), *range(COMPONENTS, COMPONENTS + LAYOUT)]
    assert torch.equal(shorter.condition(rows), rows[:, kept])
    assert torch.equal(shorter.condition(rows[0]), rows[0, kept])
    changed = shorter.with_condition(rows, -rows[:, kept])
    assert torch.equal(shorter.condition(changed), -rows[:, kept])
    assert torch.equal(changed[:, 5:COMPONENTS], rows[:, 5:COMPONENTS])
    assert torch.equal(rows[0], torch.arange(float(COMPONENTS + LAYOUT)))  # they are not changed themselves


@pytest.mark.parametrize("shape", [(1, SIZE, SIZE), (3, 2 * SIZE, 2 * SIZE)])
def test_the_spread_is_that_of_public_conditions(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of public images in another shape."""
    monkeypatch.setattr(module, "CONDITION", 5)
    embedding, images = ImageEmbedding((1, SIZE, SIZE), None, CPU, COMPONENTS), convert(stripes(40, 1, 100), shape)
    embedding.fit(images, 0)
    assert embedding.spread.shape == (5 + LAYOUT,)
    assert torch.allclose(embedding.spread, embedding.condition(embedding(images)).var(0), atol=1e-6)
    assert embedding.spread.sum() > 0.1


# -- shapes -----------------------------------------------------------------------------------------------

SIDES = [(28, 32), (32, 28), (32, 64), (64, 32), (28, 64), (64, 28)]


def smooth(count: int, channels: int, size: int) -> torch.Tensor:
    """Draw slow waves that are the same picture at every size."""
    generator = torch.Generator().manual_seed(0)
    axis = (torch.arange(size) + 0.5) / size
    phase, colour = torch.rand(2, count, channels, 1, 1, generator=generator)
    return (0.5 + 0.4 * colour) * torch.sin(3 * axis[:, None] + 2 * axis + 6 * phase)


@pytest.mark.parametrize(("old", "new"), SIDES)
@pytest.mark.parametrize("channels", [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_a_converted_image_is_the_same_picture(old: int, new: int, channels: tuple[int, int]) -> None:
    images, target = smooth(4, channels[0], old), smooth(4, channels[0], new)
    if channels[0] != channels[1]:
        target = target.mean(1, keepdim=True).expand(-1, channels[1], -1, -1)
    got = convert(images, (channels[1], new, new))
    assert got.shape == (4, channels[1], new, new)
    assert (got - target).abs().max() < 0.07  # windows of 1 and 2 pixels, from 32 to 28
    assert (got.roll(1, 0) - target).abs().mean() > 0.1  # another picture would be seen


def test_an_image_of_the_wanted_shape_is_unchanged() -> None:
    images = stripes(3, 3)
    assert torch.equal(convert(images, (3, SIZE, SIZE)), images)


def test_a_smaller_image_has_means_of_pixels_and_a_larger_one_stays_in_range() -> None:
    images = torch.randint(2, (3, 1, 28, 32), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    assert torch.equal(convert(images, (1, 14, 16)), torch.nn.functional.avg_pool2d(images, 2))
    for shape in ((1, 64, 64), (3, 28, 64), (1, 32, 28)):  # the last has fewer columns and more rows
        got = convert(images, shape)
        assert got.shape == (3, *shape)
        assert got.abs().max() <= 1
    assert torch.equal(convert(images[1:2], (1, 64, 64)), convert(images, (1, 64, 64))[1:2])


def test_images_of_other_shapes_have_the_embedding_of_the_converted_image() -> None:
    embedding, images = fitted("", 1), stripes(5, 1)
    rows = embedding(images)
    larger = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(embedding(larger), rows, atol=1e-4)
    assert torch.allclose(embedding(larger.expand(-1, 3, -1, -1)), rows, atol=1e-4)
    assert not torch.allclose(embedding(larger.flip(3)), rows, atol=1e-2)


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 8, 8), (3, 16, 32)])
def test_the_vault_traces_the_embedding_of_other_shapes(shape: tuple[int, int, int]) -> None:
    embedding = fitted("", 1)
    images = ImageSet(to_bytes(convert(stripes(6, 1), shape)), torch.arange(6) % 2, ("a", "b"))
    vault = Vault(images, calibrate([Release("means")], Budget(math.inf))).map(embedding)
    got = vault.sum(lambda rows: rows, release="means", bound=1.0, by_class=True)
    rows = embedding(to_unit_range(images.images))
    assert torch.allclose(got.to(rows), torch.stack([rows[0::2].sum(0), rows[1::2].sum(0)]), atol=2e-3)


# -- tilting ----------------------------------------------------------------------------------------------


def pool(count: int = 300, width: int = 6, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


TARGETS = torch.tensor([[0.4, 0.1, 0, 0, 0, 0], [0, 0, -0.3, 0, 0.3, 0], [0, 0, 0, 0, 0, -0.5]])
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)


def test_weights_are_a_distribution_for_each_class() -> None:
    for strength in STRENGTHS:
        weights = tilt(pool(), TARGETS, strength)
        assert weights.shape == (300, 3)
        assert weights.min() >= 0
        assert torch.allclose(weights.sum(0), torch.ones(3), atol=1e-5)
        assert not weights.requires_grad


def test_the_weighted_mean_approaches_the_target() -> None:
    rows = pool()
    distances = torch.stack([(tilt(rows, TARGETS, s).T @ rows - TARGETS).norm(dim=1) for s in STRENGTHS])
    assert (distances[1:] < distances[:-1]).all()
    assert (distances[0] > 0.3).all()
    assert (distances[-1] < 0.02).all()
    effective = torch.stack([1 / tilt(rows, TARGETS, s).square().sum(0) for s in STRENGTHS])
    assert (effective[1:] < effective[:-1]).all()  # fewer images share the weight


def test_without_strength_the_weights_are_equal() -> None:
    weights = tilt(pool(), TARGETS, 1e-6)
    assert torch.allclose(weights, torch.full_like(weights, 1 / 300), rtol=1e-3)
    assert not torch.allclose(tilt(pool(), TARGETS, 1.0), weights, rtol=0.1)


Weights = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def stationarity(weights: Weights, strength: float) -> float:
    """Return how far weights are from the solution: log-weights linear in w = strength · (target - weighted mean)."""
    rows = pool()
    found = weights(rows, TARGETS, strength)
    w = strength * (TARGETS - found.T @ rows)
    return float((found.log() - (rows @ w.T).log_softmax(0)).abs().max())


@pytest.mark.parametrize("strength", [0.5, 5.0, 50.0])
def test_weights_solve_the_dual_problem(strength: float) -> None:
    assert stationarity(tilt, strength) < 0.05
    assert stationarity(lambda rows, means, s: tilt(rows, means, s / 2), strength) > 0.1  # planted: wrong strength


def test_classes_do_not_disturb_each_other() -> None:
    together = tilt(pool(), TARGETS, 5.0)
    alone = torch.cat([tilt(pool(), target[None], 5.0) for target in TARGETS], 1)
    assert torch.allclose(together, alone, rtol=0.02, atol=1e-5)


def test_it_works_without_gradients_and_repeats() -> None:
    with torch.no_grad():
        first = tilt(pool(), TARGETS, 5.0)
    assert torch.equal(first, tilt(pool(), TARGETS, 5.0))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_public_images_of_the_class_get_most_weight(encoder: str) -> None:
    """A pool of horizontal stripes, vertical stripes and noise; the classes are the stripes, other draws of them."""

    def draw(kind: int, count: int, seed: int) -> torch.Tensor:
        generator: Any = torch.Generator().manual_seed(seed)
        phase = 6 * torch.rand(count, 1, 1, 1, generator=generator)
        wave = torch.sin(2.5 * torch.arange(float(SIZE)) + phase)
        noise = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
        images = [wave.expand(-1, 1, SIZE, -1), wave.expand(-1, 1, SIZE, -1).transpose(2, 3), 2 * noise][kind]
        return (images + noise).clamp(-1, 1)

    public = torch.cat([draw(kind, 40, kind) for kind in range(3)])
    embedding = ImageEmbedding((1, SIZE, SIZE), load(encoder), CPU, COMPONENTS)
    embedding.fit(public, 0)
    means = torch.stack([embedding(draw(kind, 30, 10 + kind)).mean(0) for kind in range(2)])
    weights = tilt(embedding(public), means, 50.0).view(3, 40, 2).sum(1)  # [kind of the pool, class]
    assert weights[0, 0] > 0.8
    assert weights[1, 1] > 0.8
