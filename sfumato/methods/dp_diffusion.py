"""dp-diffusion: a public diffusion model, fine-tuned on private images.

The family of DPDM (Dockhorn et al., TMLR 2023), PDP-Diffusion (Ghalebikesabi et al., 2023) and PrivImage (Li et al.,
USENIX Security 2024) on one network: a diffusion model is pre-trained on public images, practises on those of its own
images that resemble the private ones, and is then trained by DP-SGD. `curriculum_painter.py` has the steps.

Released: noisy class means of an embedding, once; the noisy sum of per-example gradients of denoising score matching
over a Poisson sample, at each of `steps` steps. Noisy class counts unless sizes are declared.
Public: image shape, class names; the prior and the encoder, which the certificate names with their training data.
Events: Gaussian sums over all images; Poisson-subsampled Gaussian sums, one for each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from sfumato.data import PublicFacts
from sfumato.engine import GradientVault, with_share
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.class_counts import class_counts, counts_release
from sfumato.methods.curriculum_painter import CurriculumPainter
from sfumato.methods.prior_painter import CPU_TRAINING, PainterTraining, Tune, gpu_sample_batch
from sfumato.nets.training import state_below
from sfumato.priors import load_prior
from sfumato.privacy import Release

CPU_SAMPLE_BATCH = 250
COUNTS_ONLY_SHARE = 0.01  # of the budget, for the counts, where there is no curriculum


@dataclass(kw_only=True, eq=False)
class DPDiffusion(Synthesizer):
    """A public diffusion model, fine-tuned by a curriculum on its own images and by noisy gradients.

    - prior: text, `random-process`; a name of `sfumato prior list`, or the folder of `sfumato prior train`.
    - encoder: text; a public network for the embedding, as `load_perceptual` takes it; none: the prior's own.
    - curriculum: bool, True; train first on those images of the prior that resemble the private ones.
    - means_share: float, 0.2; part of the budget for the class means that the curriculum needs.
    - steps: int, 50; number of private gradients; 0: none.
    - sampling_prob: float, 0.1; probability of an image to be in one.
    - tune: parameters that the gradients train: `few` (default: embeddings, norms, first and last layer), `low-rank`
      adapters of the convolutions, or `all`.

    Presets: `cpu`.
    """

    key: ClassVar[str] = "dp-diffusion"
    paper: ClassVar[str] = "Dockhorn et al., TMLR 2023; Li et al., USENIX Security 2024"
    summary: ClassVar[str] = "fine-tune a diffusion model of public images by a curriculum on its own images and DP-SGD"
    may_be_zero: ClassVar[frozenset[str]] = Synthesizer.may_be_zero | {"steps"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {"steps": 5, "sampling_prob": 0.002, "adaptation": CPU_TRAINING},
    }

    prior: str = "random-process"
    encoder: str = ""
    curriculum: bool = True
    means_share: float = 0.2
    steps: int = 50
    sampling_prob: float = 0.1
    tune: Tune = "few"
    adaptation: PainterTraining = constant(PainterTraining())

    def validate(self) -> Self:
        super().validate()
        if self.steps == 1:
            raise ValueError("steps must be at least 2, or 0 for no private gradients")
        if not self.means_share < 1:
            raise ValueError(f"means_share must lie between 0 and 1, got {self.means_share!r}")
        return self

    def _painter(self, public: PublicFacts) -> CurriculumPainter:
        return CurriculumPainter(
            load_prior(self.prior),
            self.adaptation if self.curriculum else replace(self.adaptation, rounds=0),
            public,
            steps=self.steps,
            sampling_prob=self.sampling_prob,
            tune=self.tune,
            encoder=self.encoder,
            seed=self.seed,
            device=self.torch_device,
        )

    def explain_plan(self, public: PublicFacts) -> list[str]:
        return self._painter(public).notes()

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:
        without = () if self.curriculum else ("means_share", "adaptation.pool", "adaptation.rounds")
        tune = () if self.steps else ("tune",)
        return self._painter(public).in_use() | dict.fromkeys(("adaptation.tries", *without, *tune))

    def _releases(self, public: PublicFacts) -> list[Release]:
        painter = self._painter(public)
        share = self.means_share if self.curriculum else COUNTS_ONLY_SHARE
        first = [*counts_release(public), *painter.moments(1.0)]
        if not painter.gradients() or not first:
            return [*first, *painter.gradients()]
        return [*with_share(first, self._budget(public.unit), share), *painter.gradients()]

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        return self._painter(public).facts()

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        painter = self._painter(public)
        painter.check_unchanged(vault)
        self.counts_ = class_counts(vault, public)
        embedding, embedded = painter.embed(vault, self._checkpoints) if self.curriculum else (None, None)
        self.network_ = painter.adapt(vault, embedded, embedding, self.counts_, self._checkpoints).eval()

    @property
    def sample_batch(self) -> int:  # type: ignore[override]
        return gpu_sample_batch(self._fitted().shape) if self.torch_device.type == "cuda" else CPU_SAMPLE_BATCH

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return self._painter(self._fitted()).paint(self.network_, labels, generator)

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.network_.state_dict(prefix="network.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.network_ = self._painter(public).new_generator().requires_grad_(False).eval()
        self.network_.load_state_dict(state_below(state, "network."))
