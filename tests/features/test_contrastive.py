"""Contrastive learning: the loss, the views, and that an encoder without labels learns to tell images apart."""

from __future__ import annotations

import torch

from sfumato.data import ImageSet
from sfumato.features.contrastive import ViewBatches, alignment_and_uniformity, view
from sfumato.features.perceptual import PerceptualCard
from sfumato.features.resnet import small_resnet
from sfumato.features.train_encoder import train_encoder
from sfumato.priors.random_process import random_process


def test_the_loss_is_the_formula() -> None:
    a, b = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0)).double()
    first, second = (each / each.norm(dim=1, keepdim=True) for each in (a, b))
    alignment = (first - second).square().sum(1).mean()
    parts = []
    for rows in (first, second):
        pairs = [torch.exp(-2 * (rows[i] - rows[j]).square().sum()) for i in range(6) for j in range(6) if i != j]
        parts.append(torch.stack(pairs).mean().log())
    expected = alignment + sum(parts) / 2
    torch.testing.assert_close(alignment_and_uniformity(7 * a, b), expected.float())


def test_the_loss_prefers_close_pairs_and_spread_images() -> None:
    spread = torch.eye(8)
    assert alignment_and_uniformity(spread, spread) < alignment_and_uniformity(spread, spread.roll(1, 0))
    assert alignment_and_uniformity(spread, spread) < alignment_and_uniformity(torch.ones(8, 8), torch.ones(8, 8))


def test_views_show_parts_of_their_image_in_other_colours() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = random_process(40, 16).images.float() / 255
    made = view(pixels, generator)
    assert made.shape == pixels.shape
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert float((made - pixels).abs().mean()) > 0.02
    grey = (made - made.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-6
    assert 2 <= int(grey.sum()) <= 20  # of 40, probability 0.2
    stripes = torch.linspace(0, 1, 16).expand(200, 3, 16, 16)  # brighter to the right
    slopes = (view(stripes, generator).diff(dim=3).mean((1, 2, 3)) > 0).sum()
    assert 70 <= int(slopes) <= 130  # mirrored in half of the views
    assert torch.equal(view(pixels, torch.Generator().manual_seed(1)), view(pixels, torch.Generator().manual_seed(1)))


def test_an_epoch_pairs_views_of_each_image_once() -> None:
    shades = (torch.arange(12).view(12, 1, 1, 1) * 20).expand(12, 3, 8, 8).byte()
    batches = ViewBatches(shades, 5, torch.Generator().manual_seed(0))
    pairs = list(batches)
    assert [len(first) for first, _ in pairs] == [5, 5]  # an incomplete batch is dropped
    assert batches.steps == 2
    means = [torch.stack([each.mean((1, 2, 3)) for each in pair]) for pair in pairs]
    for mean in means:
        assert float(torch.corrcoef(mean)[0, 1]) > 0.5  # both views are of one image


def recognised(network: torch.nn.Module, images: torch.Tensor, card: PerceptualCard) -> float:
    """Return the share of other images whose view is further from a view than the other view of its own image."""
    generator = torch.Generator().manual_seed(9)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (card.mean, card.std))
    with torch.no_grad():
        rows = [network.eval().trunk((view(images, generator) - mean) / std).mean((2, 3)) for _ in range(2)]
    first, second = (torch.nn.functional.normalize(each - each.mean(0)) for each in rows)
    cosines = first @ second.T
    return float((cosines < cosines.diagonal()[:, None]).float().mean())


def test_an_encoder_learns_without_labels() -> None:
    images = random_process(640, 16)
    train, held_out = ImageSet(images.images[:512]), images.images[512:].float() / 255
    options = {"epochs": 4, "batch_size": 32, "learning_rate": 0.8}
    card, state = train_encoder(train, name="mine", trained_on="procedural images", **options)
    assert card.notes["loss"] == "contrast of views"
    assert "test_accuracy" not in card.notes
    torch.manual_seed(0)
    before, after = small_resnet(), small_resnet()
    after.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")}, strict=False)
    assert recognised(after, held_out, card) > recognised(before, held_out, card) + 0.06  # 0.80 against 0.68
