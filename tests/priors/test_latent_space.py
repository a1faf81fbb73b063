"""Priors of an autoencoder's maps, on digits of 64 pixels. The autoencoder has random weights: it is not shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sfumato as sf
from sfumato.data import DataError, ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.features.public_autoencoder import Autoencoder
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.teacher import TeacherSettings
from sfumato.nets.score import ScoreNetwork
from sfumato.priors import Prior, denoising, load_prior, prior, train_prior
from sfumato.priors.denoising import PriorTraining, PublicBatches, draw_images
from sfumato.priors.latent_space import PublicAutoencoderMaps
from sfumato.testing import build

CPU = torch.device("cpu")
SIDE = 64
SETTINGS = PriorTraining(steps=2, batch_size=4, widths=(8, 8), context=8, attention=1, flip=True)
SHA256 = ("of the encoder", "of the decoder")


@pytest.fixture(scope="module", autouse=True)
def autoencoder() -> Iterator[Autoencoder]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Autoencoder().eval().requires_grad_(False)
    network.sha256 = SHA256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prior, "load_autoencoder", lambda device: network)
        patch.setattr(denoising, "SHOWN", 4)
        yield network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, large: ImageSet) -> Path:
    """A prior of maps."""
    path = tmp_path_factory.mktemp("prior")
    train(path, large)
    return path


@pytest.fixture(scope="session")
def large(digits: ImageSet) -> ImageSet:
    """Fifty digits of three classes, 64 pixels a side."""
    assert digits.labels is not None
    chosen = (digits.labels < 3).nonzero()[:50, 0]
    pixels = digits.images[chosen].repeat_interleave(8, 2).repeat_interleave(8, 3)
    return ImageSet(pixels, digits.labels[chosen], digits.classes[:3])


def train(target: Path, images: ImageSet, **options: Any) -> Prior:
    given = {"name": "maps", "trained_on": "digits", "settings": SETTINGS, "autoencoder": "taef2"}
    return train_prior(images, target, **{**given, **options})


def test_a_prior_of_maps_is_trained_on_maps(large: ImageSet, folder: Path, autoencoder: Autoencoder) -> None:
    made = load_prior(folder)
    card = made.card
    assert (card.autoencoder, card.autoencoder_sha256, card.shape) == ("taef2", SHA256, (1, SIDE, SIDE))
    assert made.facts["autoencoder"] == {"name": "taef2", "sha256": list(SHA256)}
    assert made.network().unet.entry.in_channels == 32
    space = card.space(card.shape, CPU)
    batches = PublicBatches(large, made.new_embedding(None, CPU), SETTINGS, 0, CPU, space)
    maps, noise, *_ = batches.draw()
    assert maps.shape == noise.shape == (4, 32, 8, 8)
    forms = torch.cat([to_unit_range(large.images), to_unit_range(large.images).flip(3)])
    distances = torch.cdist(maps.flatten(1), autoencoder.encode(forms).flatten(1)).amin(1)
    assert (distances < 1e-2 * maps.flatten(1).norm(dim=1)).all()  # stored in half precision
    assert "autoencoder" not in load_prior("random-process").facts


def test_maps_of_images_in_any_shape(autoencoder: Autoencoder) -> None:
    grey = torch.rand(2, 1, 60, 70, generator=torch.Generator().manual_seed(0)) * 2 - 1
    space = PublicAutoencoderMaps((1, 60, 70), autoencoder)
    assert space.maps == (32, 8, 9)
    maps = space.encode(grey)
    assert maps.shape == (2, *space.maps)
    assert space.decode(maps).shape == grey.shape
    assert space.decode(100 * maps).abs().max() <= 1


def test_maps_that_are_drawn_have_the_limit_of_the_decoder(folder: Path) -> None:
    made = load_prior(folder)
    network, space = made.network(), made.space(made.card.shape, CPU)
    given = network, space.maps, torch.zeros(3, dtype=torch.int64), torch.Generator().manual_seed(0)
    bright = {"levels": 2, "start": torch.full((3, *space.maps), 3.0), "highest": 0.03}
    assert float(draw_images(*given, **bright, limit=space.limit).max()) == 1.5
    assert float(draw_images(*given, **bright).max()) == 1  # pixels


@pytest.mark.parametrize("key", [pytest.param("atelier", marks=pytest.mark.slow), "dp-diffusion", "pge"])
def test_methods_with_a_prior_of_maps(key: str, large: ImageSet, folder: Path, tmp_path: Path) -> None:
    made = load_prior(folder)
    settings: dict[str, Any] = {"prior": str(folder), "steps": 2, "sampling_prob": 0.3, "device": "cpu"}
    if key != "pge":
        settings["adaptation"] = PainterTraining(
            pool=8, rounds=1, practice_steps=2, practice_batch=4, levels=2, tries=1
        )
    if key == "atelier":
        settings["teacher"] = TeacherSettings(steps=3)
    private = large.subset(torch.arange(15))
    model = build(key, epsilon=10.0, **settings).fit(private, run_dir=tmp_path / "run")
    assert model.certificate_.public_facts["prior"] == made.facts
    assert sf.verify(tmp_path / "run" / "certificate.json")
    drawn = model.sample(4).images
    assert drawn.shape == (4, 1, SIDE, SIDE)
    assert torch.equal(sf.load(tmp_path / "run").sample(4).images, drawn)
    network = model.generator_.network if key == "atelier" else model.network_
    assert isinstance(network, ScoreNetwork)
    assert not torch.equal(network.state_dict()["unet.last.2.weight"], made.state["unet.last.2.weight"])


def test_other_weights_of_the_autoencoder_are_refused_before_anything_is_spent(
    large: ImageSet, folder: Path, tmp_path: Path, autoencoder: Autoencoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoencoder, "sha256", ("of another encoder", "of the decoder"))
    for key in ("atelier", "pge"):
        with pytest.raises(DataError, match="other files of the autoencoder taef2"):
            build(key, prior=str(folder), device="cpu").fit(large, run_dir=tmp_path / "run")
        assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_errors_are_clear(large: ImageSet, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no autoencoder 'taef3'; available: taef2"):
        train(tmp_path, large, autoencoder="taef3")
    pixels = torch.zeros(50, 1, 80, 80, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"16 to 64 pixels, not 80 × 80; .*--autoencoder taef2"):
        train(tmp_path, ImageSet(pixels), autoencoder="")
    with pytest.raises(DataError, match="64 to 256 pixels, not 40 × 40"):
        train(tmp_path, ImageSet(pixels[:, :, :40, :40]))
    first = load_prior(folder)
    with pytest.raises(DataError, match="or another autoencoder"):
        train(tmp_path / "pixels", large, autoencoder="", start=first)
    grown = train(tmp_path / "more", large, start=first)
    assert grown.card.notes["images_seen"] == 2 * SETTINGS.steps * SETTINGS.batch_size
