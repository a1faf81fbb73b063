"""Training of a prior on several workers: each computes the gradient of its part of a batch. Public images only.

The driver draws each batch as it does without workers, sends every worker its part and the weights, and adds up the
gradients. So the prior is that of one process up to rounding, for any number of workers, and a worker that dies costs
no more than its part of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch

from sfumato.nets.score import ScoreNetwork
from sfumato.priors.prior import PriorCard

Loss = Callable[..., torch.Tensor]


class Workers(Protocol):
    """Where parts are computed (`cluster.connect`)."""

    @property
    def number(self) -> int: ...

    def share(self, value: Any) -> Any:
        """Return what stands for a value among the arguments of calls, so that it travels once to each machine."""
        ...

    def compute(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]: ...


def batch_gradients(
    workers: Workers, loss: Loss, card: PriorCard, network: ScoreNetwork, batch: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss of a batch by name of the parameter; each worker takes an equal part.

    - loss: of a network and a part of the batch, a mean over its images.
    - card: makes such networks.
    - batch: tensors with one entry for each image.
    """
    named, count = dict(network.named_parameters()), len(batch[0])
    weights = workers.share(_joined(list(named.values())))
    split = (each.cpu().tensor_split(min(workers.number, count)) for each in batch)
    calls = [(weights, *(each.numpy() for each in part)) for part in zip(*split, strict=True)]
    function = partial(_part_gradient, loss, card, batch[0].device.type, count)
    total = np.zeros(sum(each.numel() for each in named.values()), np.float32)
    for found in workers.compute(function, calls):  # in order, so that the sum does not depend on who is faster
        total += found
    pieces = torch.from_numpy(total).split([each.numel() for each in named.values()])
    return {name: piece.view_as(value) for (name, value), piece in zip(named.items(), pieces, strict=True)}


def embed_parts(
    workers: Workers, rows: Callable[[torch.Tensor], torch.Tensor], pixels: torch.Tensor, size: int
) -> torch.Tensor:
    """Return `rows` of all images, computed on the workers in parts of `size`."""
    calls = [(part.cpu().numpy(),) for part in pixels.split(size)]
    found = workers.compute(partial(_part_rows, rows, pixels.device.type), calls)
    return torch.from_numpy(np.concatenate(list(found))).to(pixels.device)


def _part_rows(rows: Callable[[torch.Tensor], torch.Tensor], device: str, pixels: Any) -> Any:
    return rows(torch.from_numpy(pixels.copy()).to(device)).cpu().numpy()


def _part_gradient(loss: Loss, card: PriorCard, device: str, count: int, weights: Any, *part: Any) -> Any:
    """Return the gradient of a part's share of the mean loss, all parameters in one array."""
    network = _network(card, device)
    parameters: list[torch.Tensor] = list(network.parameters())
    values = torch.from_numpy(weights.copy()).to(device)
    with torch.no_grad():
        pieces = values.split([each.numel() for each in parameters])
        torch._foreach_copy_(parameters, [piece.view_as(each) for piece, each in zip(pieces, parameters, strict=True)])
    mean = loss(network, *(torch.from_numpy(each.copy()).to(device) for each in part))
    return _joined(torch.autograd.grad(mean * (len(part[0]) / count), parameters))


@lru_cache(maxsize=1)
def _network(card: PriorCard, device: str) -> ScoreNetwork:
    """Return the network of a worker, whose weights change with each call."""
    place: Any = {"memory_format": torch.channels_last}
    return card.new_network().to(device, **place)


def _joined(tensors: Sequence[torch.Tensor]) -> Any:
    return torch.cat([each.detach().reshape(-1) for each in tensors]).cpu().numpy()
