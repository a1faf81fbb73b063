"""PGE as published. Not private: its randomised response is applied to vectors that do not depend on the data.

Released: images made with the raw ones. Public: nothing is protected. Events: none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch

from sfumato.data import PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault
from sfumato.methods.base import constant
from sfumato.methods.pge import GradientEstimation
from sfumato.methods.score_matching import LossGradient, NoisyViews
from sfumato.methods.warm_start import NONE, WarmMethod
from sfumato.nets.score import ScoreNetwork, sliced_loss
from sfumato.nets.training import Trainer, warm_cosine
from sfumato.privacy import Release

LEAK = (
    "randomised response is applied to projection vectors, which do not depend on the data; the exact image is in both "
    "terms of the loss, whose gradient has no bound. Given the projection vectors, a step has finitely many outcomes, "
    "and those of neighbouring batches do not overlap. So no finite epsilon holds. The paper also does not compose "
    "over steps."
)


@dataclass(kw_only=True, eq=False)
class PublishedGradientEstimation(GradientEstimation):
    """The training of the paper (Algorithm 1), at several noise levels; sampling is that of `pge`.

    - steps: int, 2000; training steps.
    - warm: `none`; the paper has no warm start.
    """

    key: ClassVar[str] = "pge-as-published"
    summary: ClassVar[str] = "train pge as its authors do; not private"
    guarantee: ClassVar[str] = "none"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"cpu": {"width": 16}}

    steps: int = 2000
    warm: WarmMethod = "none"
    batch_size: int = constant(256)
    learning_rate: float = constant(1e-3)
    nearest: int = constant(10)  # k of the randomised response

    @property
    def claimed(self) -> dict[str, Any] | None:  # type: ignore[override]
        if not self._budget().private:
            return None
        return {"epsilon": self.epsilon, "delta": 0.0, "by": self.paper, "why": LEAK}

    def validate(self) -> Self:
        super().validate()
        if self.warm != NONE:
            raise ValueError("the published form has no warm start; pass warm='none'")
        if self.nearest < 2:
            raise ValueError(f"nearest must be at least 2, got {self.nearest}")
        return self

    def _auto_presets(self, public: PublicFacts) -> list[str]:  # noqa: ARG002
        return ["cpu"] if self.torch_device.type == "cpu" else []

    def _releases(self, public: PublicFacts) -> list[Release]:
        self._check_size(public)
        return []

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        device, views = self.torch_device, self._views(public, slices=False)  # the loss is given other vectors
        generator = torch.Generator(device).manual_seed(self.seed)
        trainer = Trainer(self._new_network(public), ema=self.ema, warm_up=True)
        self.counts_ = torch.ones(len(public.classes), device=device)
        images, all_labels = vault.unprotected(f"as published: {LEAK}")
        all_labels = torch.zeros(len(images), dtype=torch.int64) if all_labels is None else all_labels
        size = min(self.batch_size, len(images))
        gradients = LossGradient(PublishedLoss(views), cast(ScoreNetwork, trainer.network))
        for step in self._checkpoints.loop("network", self.steps, trainer=trainer, generator=generator):
            chosen = torch.randint(len(images), (size,), generator=generator, device=device)
            batch = to_unit_range(images[chosen.to(images.device)].to(device))
            labels = all_labels[chosen.to(all_labels.device)].to(device)
            normals = torch.randn(size, views.draws, generator=generator, device=device)
            slices = torch.randn(size, views.dimension, generator=generator, device=device)
            response_index = randomised_response(slices, self.epsilon, self.nearest, generator)
            trainer.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            trainer.step(gradients(views.rows(batch), labels, normals, slices, slices[response_index]))
        self.network_ = cast(ScoreNetwork, trainer.average.eval())


class PublishedLoss:
    """Eq. 8 for each row, [N]: R(v) . d score/dx R(v) + (v . score)^2 / 2."""

    def __init__(self, views: NoisyViews) -> None:
        self._views = views

    def __call__(
        self,
        network: ScoreNetwork,
        rows: torch.Tensor,
        labels: torch.Tensor,
        normals: torch.Tensor,
        slices: torch.Tensor,
        responses: torch.Tensor,
    ) -> torch.Tensor:
        images, noise, levels, _, code = self._views.split(rows, normals)
        v, r = (some.unflatten(1, self._views.shape) for some in (slices, responses))
        noisy = images + levels.view(-1, 1, 1, 1) * noise
        return sliced_loss(network, noisy, r, levels, labels, code, projected=v)


def randomised_response(vectors: torch.Tensor, epsilon: float, k: int, generator: torch.Generator) -> torch.Tensor:
    """Return, by Eq. 6, each vector's own index, or that of another of its `k` nearest by cosine, [N].

    It perturbs vectors that were drawn without the data. That is the leak: nothing of the data is perturbed.
    """
    unit = torch.nn.functional.normalize(vectors, dim=1)
    near = (unit @ unit.T).topk(min(k, len(vectors)), 1).indices
    own = torch.arange(len(vectors), device=vectors.device)
    others = near[near != own[:, None]].view(len(vectors), -1)
    keep = 1 / (1 + others.shape[1] * math.exp(-epsilon))
    kept = torch.rand(len(vectors), generator=generator, device=vectors.device) < keep
    pick = torch.randint(others.shape[1], (len(vectors), 1), generator=generator, device=vectors.device)
    return torch.where(kept, own, others.gather(1, pick)[:, 0])
