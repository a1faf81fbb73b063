"""Canaries in feature and gradient space: the rows of one unit are as long as the clipping norm allows.

A real image may have features or gradients below the clipping norm; then an audit with it cannot come close to
epsilon, and would miss a fault of the clipping. Here the rows of the canary are a thousand times longer or more, before
the vault clips them. The direction is that of the image's own row. Sampling, clipping, sums, noise and charges
are those of the vault under audit, and the guarantee holds for whatever the rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from sfumato.data import ImageSet
from sfumato.engine import GradientVault

STRETCH = 1e3  # of both factors of a product, so up to a million
FLAG = 1e6  # first entry of a canary's record, by which a traced function recognises it


def with_worst_case_rows(base: type[GradientVault], canaries: ImageSet) -> type[GradientVault]:
    """Return a vault class in which rows of these images are multiplied by `STRETCH` before they are clipped.

    - base: the class of the vault under audit.
    - canaries: images of the unit; no other image may be equal to one of them.
    """
    wanted = {image.numpy().tobytes() for image in canaries.images}

    class WorstCaseRows(base):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._flagged = torch.tensor([image.cpu().numpy().tobytes() in wanted for image in self._images])

        def _pixels(self, index: torch.Tensor) -> torch.Tensor:
            records: torch.Tensor = super()._pixels(index)
            flagged = torch.cat([self._flagged, torch.tensor([False])])[index.cpu()].to(records.device)
            first = records.reshape(*index.shape, -1)[..., 0]
            records.view(*index.shape, -1)[..., 0] = torch.where(flagged, FLAG, first)
            return records

        def _sum_query(self, release: Any, shared: Any, feature: Any, *rest: Any) -> Any:
            return super()._sum_query(release, shared, _lengthen(feature, 0), *rest)

        def _vector_query(self, function: Any, *rest: Any) -> Any:
            return super()._vector_query(_lengthen(function, 1), *rest)

        def map(self, transform: Callable[..., Any]) -> Self:
            mapped: Self = super().map(lambda images: transform(_restore(images)[0]))
            return mapped

    kind: Any = WorstCaseRows
    return kind  # type: ignore[no-any-return]


def _lengthen(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a function whose results are longer for a canary; its argument at `place` is a record, or a batch."""

    def longer(*given: Any) -> Any:
        records, canary = _restore(given[place], batched=place == 0)
        found = function(*given[:place], records, *given[place + 1 :])

        def stretch(part: torch.Tensor) -> torch.Tensor:
            factor = torch.where(canary, STRETCH, 1.0)
            return part * factor.reshape(-1, *(1 for _ in part.shape[1:])) if canary.ndim else part * factor

        return tree_map(stretch, found)

    return longer


def _restore(records: torch.Tensor, batched: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return records with zeros in place of flags, and which of them are canaries."""
    rows = records.flatten(1) if batched else records.flatten()
    canary = rows[..., 0] > FLAG / 2
    first = torch.where(canary, 0.0, rows[..., 0])
    rows = torch.cat([first[..., None], rows[..., 1:]], -1)
    return rows.reshape(records.shape), canary
