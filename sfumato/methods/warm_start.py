"""A warm start for methods that train a network on noisy gradients: another method's generator trains it first.

Released: what the other method releases, in the same plan, for a share of the budget; its class counts serve both.
Public: what the other method takes as public; the certificate names the method and all its settings.
Events: those of the other method. What its generator draws, and all that is learned from it, is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from sfumato.data import ImageSet, PublicFacts
from sfumato.engine import GradientVault, with_share
from sfumato.methods.base import Synthesizer
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.generator_method import GeneratorMethod
from sfumato.methods.parameters import NO_PRESET
from sfumato.methods.registry import create
from sfumato.privacy import Release

NONE = "none"
WarmMethod = Literal["none", "dp-merf", "dp-mepf", "dp-kernel"]
SHARED_PARAMETERS = ("epsilon", "delta", "adjacency", "public_size", "secure", "device", "seed")


@dataclass(frozen=True)
class WarmStartSettings:
    """Settings of a warm start.

    - share: part of the budget for the other method, as a share of 1/noise².
    - images: drawn from its generator, equally many of each class.
    - steps: training steps on these images.
    - batch_size: images in a step.
    - learning_rate: learning rate of these steps.
    """

    share: float = 0.8
    images: int = 60_000
    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 2e-3


class WarmStart:
    """What comes before the private gradients: another method's releases and images, or only class counts.

    - method: key of the other method; `none`: no warm start.
    - settings: `WarmStartSettings`.
    - owner: the method that is warmed up; budget, device and seed are its own.
    - public: facts of the images.
    - parameters: of the other method, where they differ from its defaults.
    """

    def __init__(
        self,
        method: str,
        settings: WarmStartSettings,
        owner: Synthesizer,
        public: PublicFacts,
        parameters: Mapping[str, Any],
    ) -> None:
        self.settings, self._owner, self._public = settings, owner, public
        self.first: GeneratorMethod | None = None
        if method != NONE:
            shared = {name: getattr(owner, name) for name in SHARED_PARAMETERS}
            shared |= {"preset": NO_PRESET} if owner.preset == NO_PRESET else {}
            self.first = cast(GeneratorMethod, create(method, **shared, **parameters)._resolved(public))

    def releases(self, gradients: Release) -> list[Release]:
        """Return the releases before the gradients, then the gradients.

        The first method's noise is what it would have alone, increased so that it takes its share; the rest is
        calibrated.
        """
        if self.first is not None:
            first = self.first._releases(self._public)
            return [*with_share(first, self._owner._budget(self._public.unit), self.settings.share), gradients]
        weight = 1 / (gradients.sampling_prob * math.sqrt(gradients.times))
        return [*counts_release(self._public, weight), gradients]

    def facts(self) -> dict[str, Any]:
        """Return the first method's public facts and settings, for the certificate."""
        if self.first is None:
            return {}
        return {**self.first._facts(self._public), "warm": self.first._json_params()}

    def begin(self, vault: GradientVault, checkpoints: Checkpoints) -> tuple[torch.Tensor, ImageSet | None]:
        """Return class counts, and images drawn from the first method, class by class, if there is one."""
        if self.first is None:
            return class_counts(vault, self._public), None
        first = self.first
        first._checkpoints = checkpoints
        first._fit(vault, self._public)
        first._learned(first)
        first.public_ = self._public
        classes = len(self._public.classes)
        labels = torch.arange(classes).repeat_interleave(math.ceil(self.settings.images / classes))
        return first.counts_, first.sample(len(labels), labels=labels.tolist(), seed=self._owner.seed)
