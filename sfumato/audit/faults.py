"""Planted faults: known mistakes of private programs. Tests show that the audit finds them.

A fault of the vault replaces the vault of any method; a fault of an author replaces the method `dp-merf`. Each is a
mistake that was found in published code or that reviewers look for. None is reachable except by an audit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.privacy import Release

UNCLIPPED = 1000.0  # times the bound: longer than any row of the methods


class HalfNoise(GradientVault):
    """Add half of the noise that is charged."""

    def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:
        return super()._noised(release, exact, sensitivity / 2, secure)


class NoNoise(GradientVault):
    """Add no noise, though it is charged."""

    def _noised(self, release: Release, exact: torch.Tensor, sensitivity: float, secure: bool) -> torch.Tensor:  # noqa: ARG002
        return exact.clone()


class NoClipping(GradientVault):
    """Clip rows to a norm far above the one that the noise is scaled to."""

    def _sum_query(self, release: Release, shared: Any, feature: Any, bound: float, *rest: Any) -> Any:
        query = super()._sum_query(release, shared, feature, bound * UNCLIPPED, *rest)
        return replace(query, sensitivity=query.sensitivity / UNCLIPPED)

    def _vector_query(self, function: Any, shared: Any, groups: Any, *rest: Any) -> Any:
        longer = [(bound * UNCLIPPED, indices) for bound, indices in groups]
        query = super()._vector_query(function, shared, longer, *rest)
        return replace(query, sensitivity=query.sensitivity / UNCLIPPED)


class PrivateMean(GradientVault):
    """Divide sums by the private number of units, and multiply them by a public number to keep the scale."""

    def _exact(self, *args: Any) -> torch.Tensor:
        return super()._exact(*args) * (1000 / max(self._units, 1))


class NoCharge(GradientVault):
    """Charge no release."""

    def _charge(self, release: Release, number: int) -> None:
        pass


class Shuffled(GradientVault):
    """Draw batches of fixed size in shuffled order, and account them as Poisson samples."""

    def _drawn(self, release: Release) -> torch.Tensor:
        if release.sampling_prob == 1:
            return super()._drawn(release)
        size = max(1, round(release.sampling_prob * self._units))
        queue: list[int] = self.__dict__.setdefault("_queue", [])
        if len(queue) < size:
            queue[:] = torch.randperm(self._units).tolist()
        chosen, queue[:size] = queue[:size], []
        return self._chosen[torch.isin(self._unit_of[self._chosen], torch.tensor(chosen))].sort().values


class BatchStatistics(GradientVault):
    """Subtract the mean of the batch from images, as batch norm does in training mode."""

    def _pixels(self, index: torch.Tensor) -> torch.Tensor:
        images = super()._pixels(index)
        return images - images.mean(index.ndim - 1, keepdim=True)


class Differentiable(GradientVault):
    """Return answers with a gradient graph, by which a method could differentiate the exact sum."""

    def _answer(self, *args: Any) -> torch.Tensor:
        return super()._answer(*args).requires_grad_()


class PrintedLoss(MeanEmbedding):
    """Print a mean without noise."""

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        super()._fit(vault, public)
        print("loss", float(vault._images.float().mean()))


class ExactCounts(MeanEmbedding):
    """Count class sizes from the labels, without noise."""

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        super()._fit(vault, public)
        assert vault._labels is not None
        self.counts_ = torch.bincount(vault._labels, minlength=len(public.classes)).float()


class BatchNormFeature(MeanEmbedding):
    """Release a feature that is normalised by the batch."""

    def _releases(self, public: PublicFacts) -> list[Release]:
        return [*super()._releases(public), Release("normalised")]

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        vault.sum(lambda images: (images - images.mean(0)).flatten(1), release="normalised", bound=1.0)
        super()._fit(vault, public)


@dataclass(frozen=True)
class Fault:
    """A planted fault: of the vault, or of an author's method; `statistical`: a lower bound shows it, too."""

    vault: type[GradientVault] | None = None
    method: type[MeanEmbedding] | None = None
    statistical: bool = False

    @property
    def description(self) -> str:
        kind: Callable[..., Any] | None = self.vault or self.method
        return (kind.__doc__ or "").strip()


FAULTS = {
    "half-noise": Fault(HalfNoise, statistical=True),
    "no-noise": Fault(NoNoise, statistical=True),
    "no-clipping": Fault(NoClipping, statistical=True),
    "private-mean": Fault(PrivateMean, statistical=True),
    "batch-statistics": Fault(BatchStatistics, statistical=True),
    "no-charge": Fault(NoCharge),
    "shuffled": Fault(Shuffled),
    "differentiable": Fault(Differentiable),
    "printed-loss": Fault(method=PrintedLoss),
    "exact-counts": Fault(method=ExactCounts),
    "batch-norm": Fault(method=BatchNormFeature),
}


def fault_named(name: str) -> Fault:
    """Return a planted fault by its name."""
    if name not in FAULTS:
        raise ValueError(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    return FAULTS[name]
