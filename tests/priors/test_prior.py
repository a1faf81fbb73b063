"""Priors: files and their cards, what is refused, networks for other channels and classes, the shipped files."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from sfumato.data import DataError
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding
from sfumato.features.weights import save_with_card
from sfumato.nets.score import LABELS, ScoreNetwork
from sfumato.nets.unet import AttentionBlock
from sfumato.priors import Prior, PriorCard, list_priors, load_prior, save_prior
from sfumato.priors.latent_space import Pixels
from sfumato.priors.prior import FILE, FORMAT, SHIPPED

ENTRY, LAST_BIAS = "unet.entry.weight", "unet.last.2.bias"
CARD = PriorCard(
    name="mine",
    channels=3,
    size=16,
    classes=4,
    widths=(8, 16),
    context=8,
    attention=1,
    trained_on="stripes that a test drew",
    licence="CC0",
    encoder="small_tinyimagenet",
    notes={"held_out_loss": 0.1, "images": 5},
)


def network_of(card: PriorCard, seed: int = 0) -> ScoreNetwork:
    """Return a network with random weights, attention and last layer included."""
    torch.manual_seed(seed)
    network = card.new_network()
    for part in network.modules():
        if isinstance(part, AttentionBlock):
            nn.init.normal_(part.projection.weight, std=0.3)
    return network.eval()


def in_memory(card: PriorCard) -> Prior:
    return Prior(card, network_of(card).state_dict(), "0" * 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_prior(tmp_path / "mine", CARD, network_of(CARD).state_dict())
    return tmp_path / "mine"


def inputs(channels: int, count: int = 4, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, channels, 16, 16, generator=generator)
    return images, torch.rand(count, generator=generator) + 0.1, torch.arange(count) % classes


# -- files ------------------------------------------------------------------------------------------------


def test_a_prior_is_read_as_it_was_written(folder: Path) -> None:
    """Filters are kept in half precision, so that they change by less than one part in a thousand."""
    prior, written = load_prior(folder), network_of(CARD).state_dict()
    assert prior.card == CARD
    assert prior.card.notes == CARD.notes  # not compared by ==
    assert prior.state.keys() == written.keys()
    for name, value in written.items():
        assert prior.state[name].dtype == torch.float32
        expected = value.half().float() if value.ndim > 1 else value
        assert torch.equal(prior.state[name], expected), name
        assert torch.allclose(prior.state[name], value, rtol=1e-3, atol=1e-6), name
    with torch.no_grad():
        got, plain = (each(*inputs(3)) for each in (prior.network().eval(), network_of(CARD)))
    assert 0 < (got - plain).abs().max() < 0.02 * plain.abs().max()


def test_filters_take_two_bytes_each(folder: Path) -> None:
    with safe_open(folder / FILE, "pt") as file:
        types = {name: (file.get_tensor(name).dtype, file.get_tensor(name).ndim) for name in file.keys()}  # noqa: SIM118
    assert {dtype for dtype, dimensions in types.values() if dimensions > 1} == {torch.float16}
    assert {dtype for dtype, dimensions in types.values() if dimensions == 1} == {torch.float32}


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    path = save_prior(tmp_path / "deep" / "other.safetensors", CARD, network_of(CARD).state_dict())
    assert path == tmp_path / "deep" / "other.safetensors"
    assert load_prior(path).card == load_prior(str(path)).card == CARD
    assert save_prior(tmp_path / "folder", CARD, network_of(CARD).state_dict()) == tmp_path / "folder" / FILE


def test_the_certificate_states_the_origin(folder: Path) -> None:
    facts = load_prior(folder).facts
    assert facts == {
        "name": "mine",
        "sha256": hashlib.sha256((folder / FILE).read_bytes()).hexdigest(),
        "trained_on": "stripes that a test drew",
        "licence": "CC0",
        "taken_as": "public",
    }
    save_prior(folder, replace(CARD, trained_on="other images"), network_of(CARD).state_dict())
    assert load_prior(folder).facts["sha256"] != facts["sha256"]  # the card is part of the file


# -- what is refused --------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match="there is no prior 'tiny-imagnet'; did you mean 'tiny-imagenet'"):
        load_prior("tiny-imagnet")
    with pytest.raises(DataError, match="there is no prior 'qqq'; available: random-process, tiny-imagenet; or a path"):
        load_prior("qqq")


def test_a_folder_without_a_prior_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"holds no prior: {FILE} is missing; make one with sfumato prior train"):
        load_prior(tmp_path)


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["prior.pth", "prior.pt", "prior.pkl", FILE])
def test_pickled_files_are_refused_and_not_executed(tmp_path: Path, name: str) -> None:
    path, touched = tmp_path / name, tmp_path / "touched"
    torch.save({"weight": Planted(touched)}, path)
    with pytest.raises(DataError, match="is not a safetensors file"):
        load_prior(path)
    assert not touched.exists()
    torch.load(io.BytesIO(path.read_bytes()), weights_only=False)  # the planted code works
    assert touched.exists()


@pytest.mark.parametrize("kept", [0, 5, 500, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="is not a safetensors file"):
        load_prior(folder)


def rewritten(path: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: str) -> None:
    """Write a file again with some tensors or metadata changed, as somebody else could."""
    with safe_open(path, "pt") as file:
        old = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    save_file({**old[0], **(tensors or {})}, path, {**old[1], **metadata})


def test_a_changed_tensor_is_refused(folder: Path) -> None:
    rewritten(folder / FILE)
    assert load_prior(folder).card == CARD  # written again unchanged
    with safe_open(folder / FILE, "pt") as file:
        bias = file.get_tensor(LAST_BIAS)
    bias[0] += 1e-3
    rewritten(folder / FILE, {LAST_BIAS: bias})
    with pytest.raises(DataError, match=r"was changed after it was written: the SHA-256 of its tensors"):
        load_prior(folder)


def test_a_flipped_byte_is_refused(folder: Path) -> None:
    content = bytearray((folder / FILE).read_bytes())
    content[-20] ^= 1
    (folder / FILE).write_bytes(bytes(content))
    with pytest.raises(DataError, match="was changed after it was written"):
        load_prior(folder)


@pytest.mark.parametrize("changes", [{"widths": (8, 24)}, {"classes": 5}, {"attention": 0}, {"channels": 1}])
def test_a_card_of_another_network_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save_prior(tmp_path, replace(CARD, **changes), network_of(CARD).state_dict())
    with pytest.raises(DataError, match=r"does not fit the ScoreNetwork network: .* differ"):
        load_prior(path)


@pytest.mark.parametrize(
    "changes", [{"widths": (12, 16)}, {"widths": ()}, {"widths": ("a", "b")}, {"context": "x"}, {"classes": -20}]
)
def test_a_card_of_no_network_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = save_prior(tmp_path, replace(CARD, **changes), network_of(CARD).state_dict())
    with pytest.raises(DataError, match="describes no valid network"):
        load_prior(path)


def test_an_incomplete_card_is_refused(tmp_path: Path) -> None:
    path, complete = tmp_path / FILE, asdict(CARD)
    for name in ("widths", "trained_on"):
        content = {key: value for key, value in complete.items() if key != name}
        save_with_card(path, network_of(CARD).state_dict(), content, FORMAT)
        with pytest.raises(DataError, match=f"is incomplete or invalid: .*{name}"):
            load_prior(path)
    save_with_card(path, network_of(CARD).state_dict(), {**complete, "surprise": 1}, FORMAT)
    with pytest.raises(DataError, match=r"is incomplete or invalid: .*surprise"):
        load_prior(path)


def test_other_weight_files_are_refused(tmp_path: Path) -> None:
    save_with_card(tmp_path / FILE, network_of(CARD).state_dict(), asdict(CARD))  # of an encoder
    with pytest.raises(DataError, match=f"has no {FORMAT} metadata"):
        load_prior(tmp_path)


# -- embeddings -------------------------------------------------------------------------------------------


CONDITIONED = Path(__file__).parent / "conditioned.safetensors"


def test_a_prior_holds_the_embedding_on_which_it_is_conditioned(tmp_path: Path) -> None:
    """Axes are kept in half precision; images have nearly the same embedding as before."""
    embedding = ImageEmbedding((3, 16, 16), None, torch.device("cpu"))
    images = torch.rand(60, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    embedding.fit(images, 0)
    card = replace(CARD, encoder="", condition=embedding.condition_width)
    prior = load_prior(save_prior(tmp_path, card, network_of(card).state_dict(), embedding.state_dict()))
    assert prior.card == card
    assert prior.state.keys() == network_of(card).state_dict().keys()
    assert prior.embedding.keys() == ImageEmbedding.STATE
    again = prior.new_embedding(None, torch.device("cpu"))
    assert torch.allclose(again(images), embedding(images), atol=5e-3)
    assert torch.equal(again.spread, embedding.spread)
    assert again.shape == card.shape
    assert not torch.allclose(again(images.flip(0)), embedding(images), atol=0.1)


@pytest.mark.parametrize("left_out", ["", "spread"])
def test_a_conditioned_prior_without_embedding_is_refused(tmp_path: Path, left_out: str) -> None:
    """Also if a part of it is missing."""
    prior = load_prior(CONDITIONED)
    held = {name: value for name, value in prior.embedding.items() if left_out and name != left_out}
    path = save_prior(tmp_path, prior.card, prior.state, held)
    with pytest.raises(DataError, match="holds no embedding, on which its network is conditioned"):
        load_prior(path)
    assert load_prior(save_prior(tmp_path, prior.card, prior.state, prior.embedding)).card == prior.card


def test_an_embedding_of_another_shape_or_encoder_is_refused() -> None:
    prior = load_prior(CONDITIONED)
    larger = replace(prior, card=replace(prior.card, size=16))
    with pytest.raises(DataError, match="the embedding of the prior conditioned"):
        larger.new_embedding(None, torch.device("cpu"))
    with pytest.raises(DataError, match="the prior conditioned was trained with another file of the encoder"):
        prior.new_embedding(load_perceptual("small_tinyimagenet"), torch.device("cpu"))


@pytest.mark.parametrize("width", [0, 100])
def test_a_card_of_another_condition_is_refused(tmp_path: Path, width: int) -> None:
    prior = load_prior(CONDITIONED)
    path = save_prior(tmp_path, replace(prior.card, condition=width), prior.state, prior.embedding)
    with pytest.raises(DataError, match=r"does not fit the ScoreNetwork network: .* differ"):
        load_prior(path)


def test_an_embedding_is_part_of_the_checksum(tmp_path: Path) -> None:
    prior = load_prior(CONDITIONED)
    path = save_prior(tmp_path, prior.card, prior.state, prior.embedding)
    rewritten(path, {"embedding.spread": prior.embedding["spread"] * 2})
    with pytest.raises(DataError, match="was changed after it was written"):
        load_prior(path)


# -- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 8), (3, 32, 32), (1, 9, 13), (1, 12, 24)])
def test_sizes_up_to_a_factor_of_two_are_served(shape: tuple[int, int, int]) -> None:
    in_memory(CARD).check_shape(shape)


@pytest.mark.parametrize("shape", [(3, 7, 7), (1, 33, 33), (3, 16, 33), (3, 7, 16), (1, 9, 31)])
def test_other_sizes_are_refused(shape: tuple[int, int, int]) -> None:
    message = f"prior mine was trained on images of 16 pixels and serves images of 8 to 32, not {shape[1]} × {shape[2]}"
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        in_memory(CARD).check_shape(shape)
    assert "--size" in str(caught.value)


# -- networks ---------------------------------------------------------------------------------------------


def denoised(prior: Prior, grey: torch.Tensor, *, equal: bool = False) -> torch.Tensor:
    """Return the mean squared error of grey images to which noise was added, and removed by a colour prior.

    - equal: planted fault: the same noise in all channels, as a network of one channel would see it.
    """
    space, level = prior.space((1, 32, 32), torch.device("cpu")), 0.3
    maps = space.encode(grey)
    noise = torch.randn(maps.shape, generator=torch.Generator().manual_seed(0))
    noisy = maps + level * (noise[:, :1].expand_as(maps) if equal else noise)
    with torch.no_grad():
        levels, none = torch.full((len(grey),), level), torch.full((len(grey),), -1)
        found = noisy + level**2 * prior.network().eval()(noisy, levels, none)
    return (space.decode(found) - grey).square().mean()


def test_a_colour_prior_removes_the_noise_of_grey_images() -> None:
    """Noise that is the same in all channels looks weaker to the network than it is, and stays in part."""
    digits = load_digits().images[:4].astype(np.float32) / 8 - 1
    grey = functional.interpolate(torch.from_numpy(digits)[:, None], (32, 32), mode="bilinear")
    prior = load_prior("random-process")
    assert denoised(prior, grey) < 0.5 * denoised(prior, grey, equal=True)


def test_pixels_have_the_channels_of_the_prior() -> None:
    grey, colour = inputs(1)[0], inputs(3)[0]
    wide, narrow = Pixels((1, 16, 16), 3), Pixels((3, 16, 16), 1)
    assert (wide.maps, narrow.maps) == ((3, 16, 16), (1, 16, 16))
    assert [space.changes for space in (wide, narrow, Pixels((3, 16, 16), 3))] == [True, True, False]
    assert torch.equal(wide.encode(grey), grey.expand(-1, 3, -1, -1))
    assert torch.allclose(wide.decode(colour), colour.mean(1, keepdim=True))
    assert torch.allclose(narrow.encode(colour), colour.mean(1, keepdim=True))
    assert torch.equal(narrow.decode(grey), grey.expand(-1, 3, -1, -1))


def test_the_own_network_is_unchanged_and_a_copy() -> None:
    prior = in_memory(CARD)
    network = prior.network()
    assert all(torch.equal(value, prior.state[name]) for name, value in network.state_dict().items())
    with torch.no_grad():
        network.unet.entry.weight.zero_()
    assert prior.state[ENTRY].any()


def test_a_one_hot_mixture_is_the_class_itself() -> None:
    network, (images, levels, labels) = network_of(CARD), inputs(3)
    shares = torch.eye(4)[[2, 0, 2, 3, 1]]  # five new classes
    changed = network.with_classes(shares).eval()
    with torch.no_grad():
        for new, own in enumerate((2, 0, 2, 3, 1)):
            got = changed(images, levels, torch.full((4,), new))
            assert torch.allclose(got, network(images, levels, torch.full((4,), own)), rtol=1e-5, atol=1e-5)
        none = torch.full((4,), -1)
        assert torch.allclose(changed(images, levels, none), network(images, levels, none), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(network(images, levels, labels), network(images, levels, none), atol=1e-3)
    assert changed.unet.classes == 5


def test_a_mixture_is_embedded_as_the_mean_of_its_classes() -> None:
    network, shares = network_of(CARD), torch.tensor([[0.5, 0.5, 0, 0], [0, 0.1, 0.2, 0.7]])
    before = {name: value.clone() for name, value in network.state_dict().items()}
    changed = network.with_classes(shares).state_dict()
    assert torch.allclose(changed[LABELS][:, -2:], before[LABELS][:, -4:] @ shares.T)
    assert torch.equal(changed[LABELS][:, :-2], before[LABELS][:, :-4])
    assert all(torch.equal(changed[name], value) for name, value in before.items() if name != LABELS)
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())  # a copy


# -- shipped ----------------------------------------------------------------------------------------------


def test_shipped_priors() -> None:
    cards = {card.name: card for card in list_priors()}
    assert cards.keys() == {"random-process", "tiny-imagenet"} == {path.stem for path in SHIPPED.glob("*.safetensors")}
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 50e6
    for card in cards.values():
        assert card.channels == 3
        assert card.trained_on
        assert card.licence
        assert card.notes["held_out_loss"] > 0


@pytest.mark.parametrize("name", ["random-process", "tiny-imagenet"])
def test_a_shipped_prior_loads_by_name(name: str) -> None:
    prior = load_prior(name)
    assert prior.facts["name"] == name
    assert prior.facts["sha256"] == hashlib.sha256((SHIPPED / f"{name}.safetensors").read_bytes()).hexdigest()
    assert all(value.isfinite().all() for value in prior.state.values())
