"""Start the training of a prior: its embedding, and the weights of another prior that is trained further."""

from __future__ import annotations

import torch

from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.features.embedding import ImageEmbedding, convert
from sfumato.features.perceptual import Perceptual
from sfumato.nets.score import LABELS
from sfumato.priors.prior import Prior, PriorCard

EMBEDDING_IMAGES, EMBEDDED_AT_ONCE = 20_000, 500  # public images from which the components of an embedding come
SCALE_SHIFT = ".scale_shift.weight"  # its last columns take the condition


def joined_description(new: str, before: str) -> str:
    """Return what holds for both trainings of a prior: a certificate has to name the images of each."""
    return new if new == before else f"{new}; before that, {before}"


def same_architecture(card: PriorCard, other: PriorCard) -> bool:
    """Return whether two priors have the same autoencoder, and networks of the same channels and widths."""
    return (card.autoencoder, card.channels, card.widths, card.context, card.attention) == (
        other.autoencoder,
        other.channels,
        tuple(other.widths),
        other.context,
        other.attention,
    )


def embedding_of(
    card: PriorCard,
    encoder: Perceptual | None,
    start: Prior | None,
    images: ImageSet,
    seed: int,
    device: torch.device,
) -> ImageEmbedding:
    """Return the embedding of the prior that the training starts from, if it is of the same kind; else fit one."""
    if start is not None and start.embedding and (start.card.encoder, start.card.size) == (card.encoder, card.size):
        return start.new_embedding(encoder, device)
    embedding = card.new_embedding(encoder, device)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:EMBEDDING_IMAGES]
    parts = images.images[chosen].split(EMBEDDED_AT_ONCE)
    embedding.fit(torch.cat([convert(to_unit_range(part.to(device)), embedding.shape) for part in parts]), seed)
    return embedding


def expand_state(start: Prior, card: PriorCard, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Expand the weights of a prior to the shapes of `state`: conditions that it does not know have no effect yet."""
    known = start.card.condition if (start.card.encoder, start.card.size) == (card.encoder, card.size) else 0
    for name, value in start.state.items():
        if name == LABELS:
            first, own, labels = value.split([card.context, start.card.condition, start.card.classes], 1)
            if start.card.classes != card.classes:
                labels = labels.mean(1, keepdim=True).expand(-1, card.classes)
            state[name] = torch.cat([first, _columns(own[:, :known], card.condition), labels], 1)
        elif name.endswith(SCALE_SHIFT):
            first, own = value.split([card.context, start.card.condition], 1)
            state[name] = torch.cat([first, _columns(own[:, :known], card.condition)], 1)
        else:
            state[name] = value
    return state


def _columns(columns: torch.Tensor, count: int) -> torch.Tensor:
    return columns if columns.shape[1] == count else columns.new_zeros(len(columns), count)
