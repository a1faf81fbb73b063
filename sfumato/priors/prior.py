"""A prior: a diffusion model (`ScoreNetwork`) of public images, with a card that states what it was trained on.

A file holds weights in half precision, and the card, in safetensors format with a checksum. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from sfumato.data import DataError
from sfumato.features import load_perceptual
from sfumato.features.embedding import ImageEmbedding
from sfumato.features.perceptual import Perceptual
from sfumato.features.public_autoencoder import latent_shape, load_autoencoder
from sfumato.features.weights import SAFETENSORS, check_fit, read_card, read_state, save_with_card, sha256_of
from sfumato.nets.score import ScoreNetwork
from sfumato.nets.training import state_below
from sfumato.priors.latent_space import DrawingSpace, Pixels, PublicAutoencoderMaps

FORMAT = "sfumato-prior-1"
FILE = "prior.safetensors"  # in the folder that `train_prior` writes
SHIPPED = Path(__file__).parent / "data"
MAX_RATIO = 2.0  # between the side of images and of the prior's own
EMBEDDING = "embedding."  # names of the embedding's tensors in a file
EMBEDDED_SIDE, ENCODED_SIDE = 64, 128  # pixels to which larger images are reduced for scattering, or an encoder


@dataclass(frozen=True)
class PriorCard:
    """Origin and network of a prior.

    - name: of the prior.
    - channels, size: of the images that it was trained on; size is the side in pixels.
    - classes: number of its classes; 1 if the images had no labels.
    - widths, context, attention: of the U-Net.
    - trained_on: images, and where they come from.
    - licence: of the weights.
    - encoder: public network of the embedding (`features/embedding.py`); empty: scattering coefficients.
    - encoder_sha256: of its weight file.
    - condition: width of the embedding on which the network is conditioned; 0: it is not.
    - autoencoder: public network whose maps the network draws in place of pixels; empty: none.
    - autoencoder_sha256: of its weight files.
    - notes: further facts, for example the held-out loss; default none.
    """

    name: str
    channels: int
    size: int
    classes: int
    widths: tuple[int, ...]
    context: int
    attention: int
    trained_on: str
    licence: str
    encoder: str = ""
    encoder_sha256: str = ""
    condition: int = 0
    autoencoder: str = ""
    autoencoder_sha256: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size

    def new_network(self) -> ScoreNetwork:
        """Return the network with initial weights."""
        options: dict[str, Any] = {
            "widths": tuple(self.widths),
            "context": self.context,
            "attention": self.attention,
            "condition": self.condition,
        }
        channels = latent_shape(self.shape)[0] if self.autoencoder else self.channels
        return ScoreNetwork(channels, self.classes, **options)

    def load_encoder(self, device: torch.device) -> Perceptual | None:
        """Load the public network of the embedding."""
        return load_perceptual(self.encoder, device) if self.encoder else None

    def new_embedding(self, encoder: Perceptual | None, device: torch.device) -> ImageEmbedding:
        """Return the embedding on which the network is conditioned, not fitted yet."""
        return ImageEmbedding(embedded_shape(self.shape, encoder), encoder, device)

    def space(self, shape: tuple[int, int, int], device: torch.device) -> DrawingSpace:
        """Return what the network draws for images of `shape`."""
        if not self.autoencoder:
            return Pixels(shape, self.channels)
        space = PublicAutoencoderMaps(shape, load_autoencoder(device))
        if self.autoencoder_sha256 not in ((), space.autoencoder.sha256):
            raise DataError(f"the prior {self.name} was trained with other files of the autoencoder {self.autoencoder}")
        return space


def embedded_shape(shape: tuple[int, int, int], encoder: Perceptual | None) -> tuple[int, int, int]:
    """Return the shape that images are converted to for their embedding: large ones are reduced."""
    most = EMBEDDED_SIDE if encoder is None else ENCODED_SIDE
    channels, height, width = shape
    return channels, min(height, most), min(width, most)


@dataclass(frozen=True)
class Prior:
    """A prior in memory.

    - card: origin and network.
    - state: the weights, float32.
    - sha256: of the file.
    - embedding: state of the embedding on which the network is conditioned; empty: none.
    """

    card: PriorCard
    state: Mapping[str, torch.Tensor]
    sha256: str
    embedding: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the certificate's description: the guarantee holds if these training data are public."""
        card = self.card
        return {
            "name": card.name,
            "sha256": self.sha256,
            "trained_on": card.trained_on,
            "licence": card.licence,
            "taken_as": "public",
            **({"autoencoder": self._autoencoder_facts} if self._autoencoder_facts else {}),
        }

    @property
    def _autoencoder_facts(self) -> dict[str, Any]:
        card = self.card
        return {"name": card.autoencoder, "sha256": list(card.autoencoder_sha256)} if card.autoencoder else {}

    def space(self, shape: tuple[int, int, int], device: torch.device) -> DrawingSpace:
        """Return what the network draws for images of `shape`: pixels, or the maps of an autoencoder."""
        return self.card.space(shape, device)

    @property
    def foreign(self) -> bool:
        """Whether the network is of another library; methods then train adapters only."""
        return False

    def new_embedding(self, encoder: Perceptual | None, device: torch.device) -> ImageEmbedding:
        """Return the embedding on which the network is conditioned; `encoder` is what the card names."""
        if encoder is not None and encoder.sha256 != self.card.encoder_sha256:
            raise DataError(
                f"the prior {self.card.name} was trained with another file of the encoder {self.card.encoder} "
                f"(SHA-256 {self.card.encoder_sha256[:8]}, here {encoder.sha256[:8]})"
            )
        embedding = self.card.new_embedding(encoder, device)
        check_fit(embedding, self.embedding, f"the embedding of the prior {self.card.name}")
        finite = all(value.isfinite().all() for value in self.embedding.values())
        if not finite or embedding.condition_width != self.card.condition:
            raise DataError(f"the embedding of the prior {self.card.name} is damaged, or not the one of its network")
        embedding.load_state_dict(self.embedding)
        return embedding

    def check_shape(self, shape: tuple[int, int, int]) -> None:
        """Raise `DataError` for images whose size is too far from that of the prior's own images."""
        sides = sorted((*shape[1:], self.card.size))
        if sides[-1] > MAX_RATIO * sides[0]:
            raise DataError(
                f"the prior {self.card.name} was trained on images of {self.card.size} pixels and serves images of "
                f"{self.card.size / MAX_RATIO:.0f} to {self.card.size * MAX_RATIO:.0f}, not {shape[1]} × {shape[2]}; "
                "pass another size (--size), or train a prior of this size (sfumato prior train)"
            )

    def network(self) -> ScoreNetwork:
        """Return the network, which draws in `space`."""
        network = self.card.new_network()
        network.load_state_dict(self.state)
        return network


def save_prior(
    folder: str | Path,
    card: PriorCard,
    state: Mapping[str, torch.Tensor],
    embedding: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a prior to a folder (or a file NAME.safetensors); return the path of the file."""
    path = Path(folder) if Path(folder).suffix == SAFETENSORS else Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {f"{EMBEDDING}{name}": value for name, value in (embedding or {}).items()}
    save_with_card(path, {**state, **named}, asdict(card), FORMAT)
    return path


def list_priors() -> list[PriorCard]:
    """List the priors that are part of the package."""
    return [_card(path) for path in sorted(SHIPPED.glob(f"*{SAFETENSORS}"))]


def load_prior(source: str | Path) -> Prior:
    """Load a prior by its name, or by the path of its folder or file. Raise `DataError` if that fails."""
    if Path(source).is_dir() and not (Path(source) / FILE).is_file():
        from sfumato.priors.diffusers_checkpoint import is_diffusers, read_diffusers

        if is_diffusers(Path(source)):
            return read_diffusers(Path(source))
    path = _find(source)
    facts = path.stat()
    return _read(path, (facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=2)  # a plan, a fit and each batch of samples need it
def _read(path: Path, version: tuple[int, int]) -> Prior:  # noqa: ARG001
    digest, card = sha256_of(path), _card(path)
    held = {name: value.float().clone() for name, value in read_state(path).items()}  # not mapped to the file
    embedding = state_below(held, EMBEDDING)
    state = {name: value for name, value in held.items() if not name.startswith(EMBEDDING)}
    if sha256_of(path) != digest:
        raise DataError(f"{path} was changed while it was read; try again")
    try:
        with torch.device("meta"):
            network = card.new_network()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"the card in {path} describes no valid network: {error}") from error
    check_fit(network, state, path)
    if card.condition and embedding.keys() != ImageEmbedding.STATE:
        raise DataError(f"{path} holds no embedding, on which its network is conditioned")
    return Prior(card, state, digest, embedding=embedding)


def _find(source: str | Path) -> Path:
    shipped = {path.stem: path for path in SHIPPED.glob(f"*{SAFETENSORS}")}
    if str(source) in shipped:
        return shipped[str(source)]
    path = Path(source)
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        raise DataError(f"{path} holds no prior: {FILE} is missing; make one with sfumato prior train")
    if path.suffix == SAFETENSORS and path.is_file():
        return path
    if path.is_file():
        raise DataError(f"{path} is not a safetensors file; a prior is never read from a pickled file")
    near = get_close_matches(str(source), shipped, 1)
    known = f"did you mean {near[0]!r}?" if near else f"available: {', '.join(sorted(shipped)) or 'none'}; or a path"
    raise DataError(f"there is no prior {str(source)!r}; {known}")


def _card(path: Path) -> PriorCard:
    content = read_card(path, FORMAT)
    try:
        sha256 = tuple(content.get("autoencoder_sha256", ()))
        return PriorCard(**{**content, "widths": tuple(content["widths"]), "autoencoder_sha256": sha256})
    except (KeyError, TypeError) as error:
        raise DataError(f"the card in {path} is incomplete or invalid: {error}") from error
