"""A warm start for methods that train a network on noisy gradients: another method's generator teaches it first.

Released: what the other method releases, in the same plan, for a share of the budget; its class counts serve both.
Public: what the other method takes as public; the certificate names the method and all of its parameters.
Events: those of the other method. What its generator draws, and all that is learned from it, is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch

from sfumato.data import ImageSet, PublicFacts
from sfumato.engine import Vault, calibrate
from sfumato.methods.base import Synthesizer
from sfumato.methods.generating import GeneratorMethod
from sfumato.privacy import Release

COUNTS_WEIGHT = 4.0  # noise of the counts over that of all gradients together
WARM = ("none", "dp-merf", "dp-mepf", "dp-kernel")
SHARED = ("epsilon", "delta", "adjacency", "public_size", "secure", "device", "seed")


@dataclass(kw_only=True, eq=False)
class WarmStart(Synthesizer):
    """A method whose network may be taught by another method's generator before its own gradients.

    warm: that method, or `none`. warm_share: the part of the budget that it gets, as a share of 1/noise^2. warm_images:
    drawn from its generator, as many of each class. warm_steps, warm_batch, warm_rate: of the teaching.
    """

    warm_params: ClassVar[dict[str, Any]] = {}  # of the other method

    warm: str = "none"
    warm_share: float = 0.5
    warm_images: int = 60_000
    warm_steps: int = 3000
    warm_batch: int = 512
    warm_rate: float = 2e-3

    def validate(self) -> Self:
        if self.warm not in WARM:
            raise ValueError(f"warm must be one of {', '.join(WARM)}, got {self.warm!r}")
        super().validate()
        if not self.warm_share < 1:
            raise ValueError(f"warm_share must lie between 0 and 1, got {self.warm_share!r}")
        return self

    def _first(self) -> GeneratorMethod | None:
        """The method of the warm start. Only its releases are new; they are in this method's plan."""
        if self.warm == "none":
            return None
        from sfumato.methods.registry import create  # it knows this method, too

        shared = {name: getattr(self, name) for name in SHARED}
        return cast(GeneratorMethod, create(self.warm, **{**shared, **self.warm_params}))

    def _preceded(self, public: PublicFacts, gradients: Release) -> list[Release]:
        """The gradients, and what comes before them: the first method's releases, or class counts.

        The first method's noise is what it would have alone, increased so that it takes its share; the rest is
        calibrated.
        """
        if (first := self._first()) is not None:
            alone = calibrate(first._releases(public), self._budget()).releases
            charged = [replace(each, noise_multiplier=each.noise / math.sqrt(self.warm_share)) for each in alone]
            return [*charged, gradients]
        weight = COUNTS_WEIGHT / (gradients.sampling_prob * math.sqrt(gradients.times))
        counts = [] if public.sizes else [Release("counts", weight=weight, nonnegative=True)]
        return [*counts, gradients]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        first = self._first()
        return {} if first is None else {**first._facts(public), "warm": first._json_params()}

    def _begin(self, vault: Vault, public: PublicFacts) -> tuple[torch.Tensor, ImageSet | None]:
        """Class counts, released or declared; and what the first method draws, class by class, if there is one."""
        if (first := self._first()) is None:
            counts = torch.tensor(public.sizes, device=self.torch_device) if public.sizes else vault.counts()
            return counts.float().clamp_min(1), None
        first._checkpoints = self._checkpoints
        first._fit(vault, public)
        first.public_ = public
        classes = len(public.classes)
        labels = torch.arange(classes).repeat_interleave(math.ceil(self.warm_images / classes))
        return first.counts_.float().clamp_min(1), first.sample(len(labels), labels=labels.tolist(), seed=self.seed)
