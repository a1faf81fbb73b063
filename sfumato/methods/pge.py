"""PGE: private gradient estimation ("Private Gradient Estimation is Useful for Generative Modeling", MM 2024).

Idea: learn the score of the images (the gradient of their log-density) at many noise levels, then draw images by
Hamiltonian dynamics in the density that it describes, from noise down to none.

Released: at each of `steps` steps, the noisy sum of per-example gradients of score matching over a Poisson sample;
several noise levels and slices of an image are averaged before its gradient is clipped. Noisy class counts unless sizes
are declared. With `warm`, first the releases of another method, charged in the same plan: the network is pre-trained on
what that method's generator draws. With `prior`, the network begins as a public diffusion model instead, and the
gradients train few of its parameters.
Public: image shape, class names; initial weights (from the seed); networks named in `prior`, `residual` and
`autoencoder`.
Events: Poisson-subsampled Gaussian sums, one for each step; those of the warm start.

The form as published is not private: `as_published/published_pge.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

import torch

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault
from sfumato.features import codebook
from sfumato.features.codebook import CodebookEncoder
from sfumato.features.public_autoencoder import latent_shape, load_autoencoder
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.checkpoints import check_public_files
from sfumato.methods.prior_painter import FEW_PARAMETERS_LABELLED, gradient_performance
from sfumato.methods.score_matching import LearnedDensity, NoisyViews, ScoreSettings, pretrain
from sfumato.methods.warm_start import NONE, WarmMethod, WarmStart, WarmStartSettings
from sfumato.nets.samplers import annealed_sampling, noise_levels
from sfumato.nets.score import ScoreNetwork
from sfumato.nets.training import Trainer, state_below, warm_cosine
from sfumato.nets.unet import middle_size
from sfumato.priors import Prior, load_prior
from sfumato.priors.latent_space import DrawingSpace, Pixels, PublicAutoencoderMaps
from sfumato.privacy import Release

MAX_SIDE = 64  # of what the network sees; larger images go through an autoencoder
MAX_MIDDLE_SIDE = 4  # pixels across in the middle of the network, at most
TRAINED_PARAMETERS = (*FEW_PARAMETERS_LABELLED, ".code_projection.")  # parameters of a prior that are trained
VIEWS_PER_BATCH = 1024  # whose gradients are computed at once on a GPU: ten megabytes each


@dataclass(frozen=True)
class SamplerSettings:
    """Settings of the annealed sampler.

    - levels: number of noise levels.
    - step_size: step size of the dynamics at each level.
    - leapfrogs: leapfrog steps of a trajectory.
    - momentum: `gaussian`, `rayleigh` or `uniform`; only the first keeps the exact law.
    """

    levels: int = 20
    step_size: float = 1.0
    leapfrogs: int = 5
    momentum: Literal["gaussian", "rayleigh", "uniform"] = "gaussian"


@dataclass(kw_only=True, eq=False)
class GradientEstimation(Synthesizer):
    """A score network trained on noisy gradients, and Hamiltonian sampling.

    - prior: text; a public diffusion model that the network begins as: a name of `sfumato prior list`, or the folder of
      `sfumato prior train`; none.
    - steps: int, 60; number of private gradients.
    - sampling_prob: float, 0.1; probability of an image to be in one.
    - warm: `dp-kernel` (default), `dp-merf`, `dp-mepf` or `none`; the method of the warm start.
    - residual: text; a public network for residual enhancement (`taef2`, or as `load_perceptual` takes it); none.
    - autoencoder: `taef2` to learn its latents instead of pixels, for images above 64 pixels; none.
    - sampler: `hamiltonian` (default), `langevin`, or `ode`, the probability flow.

    Presets: `cpu`; `no-warm-start`: more steps at a higher rate; `prior`: no warm start; `energy`: a network whose
    gradient is the score, slower, with an exact Metropolis test.
    """

    key: ClassVar[str] = "pge"
    paper: ClassVar[str] = "Liu et al., MM 2024"
    summary: ClassVar[str] = "train a score network by DP-SGD; sample by Hamiltonian dynamics; GPU advised"
    warm_parameters: ClassVar[dict[str, Any]] = {}  # of the warm start's method
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cpu": {
            "warm": "dp-merf",
            "sampling_prob": 0.01,
            "width": 16,
            "warm_start": WarmStartSettings(steps=600, batch_size=64),
        },
        "no-warm-start": {"warm": NONE, "steps": 400, "learning_rate": 1e-3},
        "prior": {"warm": NONE, "learning_rate": 5e-4, "ema": 0.96},
        "energy": {"network": "energy"},
    }

    prior: str = ""
    steps: int = 60
    sampling_prob: float = 0.1
    warm: WarmMethod = "dp-kernel"
    residual: str = ""
    autoencoder: Literal["", "taef2"] = ""
    sampler: Literal["hamiltonian", "langevin", "ode"] = "hamiltonian"
    network: Literal["score", "energy"] = constant("score")
    warm_start: WarmStartSettings = constant(WarmStartSettings())
    score_settings: ScoreSettings = constant(ScoreSettings())
    sampling: SamplerSettings = constant(SamplerSettings())
    views: int = constant(2)  # noise levels (and slices) of an image, averaged before clipping
    bound: float = constant(0.1)  # clipping norm
    learning_rate: float = constant(1e-4)
    ema: float = constant(0.99)
    width: int = constant(32)  # channels at full resolution

    def validate(self) -> Self:
        super().validate()
        if self.steps < 2 or self.width % 8:
            raise ValueError("steps must be at least 2, and width a multiple of 8")
        if self.prior and (self.autoencoder or self.network == "energy" or self.preset == "energy"):
            raise ValueError("a prior brings its own autoencoder or none; leave out autoencoder and preset=energy")
        return self

    def _auto_presets(self, public: PublicFacts) -> list[str]:
        if self.prior:
            return [*super()._auto_presets(public), "prior"]
        # The autoencoder's latents are no images that another method could generate.
        without = self.autoencoder or ("warm" in self._given and self.warm == NONE)
        return [*super()._auto_presets(public), *(["no-warm-start"] if without else [])]

    # -- the plan -----------------------------------------------------------------------------------------

    def _warm_start(self, public: PublicFacts) -> WarmStart:
        return WarmStart(self.warm, self.warm_start, self, public, self.warm_parameters)

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:  # noqa: ARG002
        off = {"warm_start": self.warm == NONE, "score_settings.mask": not self.residual}
        off |= dict.fromkeys(("width", "network"), bool(self.prior))
        return dict.fromkeys(name for name in off if off[name])

    def _releases(self, public: PublicFacts) -> list[Release]:
        self._check_size(public)
        return self._warm_start(public).releases(Release("gradients", self.steps, self.sampling_prob))

    def _check_size(self, public: PublicFacts) -> None:
        if max(self._maps(public)[1:]) > MAX_SIDE:
            raise DataError(
                f"pge takes images of up to {MAX_SIDE} pixels a side, or eight times that with autoencoder='taef2' or "
                "a prior that has it; pass a smaller size (--size)"
            )

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        facts = self._warm_start(public).facts()
        if self.prior:
            facts["prior"] = self._load_prior(public).facts
            self._space(public)  # other files than those of its training are refused before a run begins
        if self.residual:
            facts["residual"] = codebook.facts(self.residual)
        if self.autoencoder:
            facts["autoencoder"] = load_autoencoder().facts
        return facts

    # -- training -----------------------------------------------------------------------------------------

    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        views = self._views(public)
        check_public_files(vault, self._facts(public))
        trainer = Trainer(self._new_network(public), ema=self.ema, warm_up=True)
        self.counts_, generated = self._warm_start(public).begin(vault, self._checkpoints)
        if generated is not None:
            self._pretrain(generated, views, trainer, generator)
        self._train(vault.map(views.rows) if views.changed else vault, views, trainer)
        self.network_ = cast(ScoreNetwork, trainer.average.eval())

    def _train(self, vault: GradientVault, views: NoisyViews, trainer: Trainer) -> None:
        """Train by DP-SGD on score matching, in place of the randomised response of Eq. 6 to 8.

        The noisy sum of clipped gradients is divided by the expected number of images.
        """
        expected = self.sampling_prob * float(self.counts_.sum())
        low = self.network == "score" and self.score_settings.objective == "denoising"
        performance = gradient_performance(self.torch_device, expected, VIEWS_PER_BATCH // self.views, low=low)
        for step in self._checkpoints.loop("network", self.steps, trainer=trainer):
            sums = vault.gradient(
                trainer.network,
                views.loss,
                release="gradients",
                bound=self.bound,
                with_labels=True,
                views=self.views,
                draws=views.draws,
                performance=performance,
            )
            trainer.set_rate(self.learning_rate * warm_cosine(step, self.steps))
            trainer.step({name: total / expected for name, total in sums.items()})

    def _pretrain(self, generated: ImageSet, views: NoisyViews, trainer: Trainer, generator: torch.Generator) -> None:
        """Train the network on another method's images."""
        images = to_unit_range(generated.images)
        labels = torch.zeros(len(images), dtype=torch.int64) if generated.labels is None else generated.labels
        rows = torch.cat([views.rows(part.to(self.torch_device)) for part in images.split(500)])
        pretrain(trainer, rows, labels.to(rows.device), views, self.warm_start, generator, self._checkpoints)

    # -- parts --------------------------------------------------------------------------------------------

    def _maps(self, public: PublicFacts) -> tuple[int, int, int]:
        """Return the shape that the network sees: of images, or of an autoencoder's latents. Needs no weights."""
        card = load_prior(self.prior).card if self.prior else None
        if card.autoencoder if card else self.autoencoder:
            return latent_shape(public.shape)
        return (card.channels, *public.shape[1:]) if card else public.shape

    def _space(self, public: PublicFacts) -> DrawingSpace:
        """Return what the network sees. Raise `DataError` if an autoencoder's files are not those of the prior."""
        if self.prior:
            return self._load_prior(public).space(public.shape, self.torch_device)
        if self.autoencoder:
            return PublicAutoencoderMaps(public.shape, load_autoencoder(self.torch_device))
        return Pixels(public.shape)

    def _load_prior(self, public: PublicFacts) -> Prior:
        prior = load_prior(self.prior)
        prior.check_shape(public.shape)
        if prior.foreign:
            raise DataError(f"pge does not take the prior {prior.card.name}, a checkpoint of diffusers")
        return prior

    def _widths(self, public: PublicFacts) -> tuple[int, ...]:
        if self.prior:
            return tuple(self._load_prior(public).card.widths)
        halvings = max(1, math.ceil(math.log2(max(self._maps(public)[1:]) / MAX_MIDDLE_SIDE)))
        return (self.width, *[2 * self.width] * halvings)

    def _middle(self, public: PublicFacts) -> tuple[int, int]:
        _, height, width = self._maps(public)
        return middle_size((height, width), self._widths(public))

    def _views(self, public: PublicFacts, **options: Any) -> NoisyViews:
        middle, device = self._middle(public), self.torch_device
        code = CodebookEncoder(self.residual, public.shape, middle, device) if self.residual else None
        return NoisyViews(self.score_settings, self._space(public), middle, code=code, **options)

    def _new_network(self, public: PublicFacts) -> ScoreNetwork:
        code = codebook.WIDTH if self.residual else 0
        if self.prior:
            prior = self._load_prior(public)
            shares = torch.full((len(public.classes), prior.card.classes), 1 / prior.card.classes)
            network = prior.network().with_classes(shares, code=code)
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(any(part in name for part in TRAINED_PARAMETERS))
            return network.to(self.torch_device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = ScoreNetwork(
                self._maps(public)[0],
                len(public.classes),
                kind=self.network,
                widths=self._widths(public),
                code=code,
            )
        return network.to(self.torch_device)

    # -- sampling -----------------------------------------------------------------------------------------

    @property
    def sample_batch(self) -> int:  # type: ignore[override]
        return 4000 if self.torch_device.type == "cuda" else 500

    def _proportions(self) -> torch.Tensor:
        return self.counts_.cpu()

    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        maps, _ = self.draw(labels, generator)
        return self._space(self._fitted()).decode(maps)

    def draw(self, labels: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, float]:
        """Draw by Algorithm 2, corrected; return images or latents, and the share of accepted trajectories."""
        public, device, settings = self._fitted(), self.torch_device, self.sampling
        levels = noise_levels(settings.levels, self.score_settings.lowest, self.score_settings.highest)
        x = levels[0] * torch.randn(len(labels), *self._maps(public), generator=generator, device=device)
        code = None
        if self.residual:  # noise in place of a code (paper, Fig. 3); one for each image
            size = (len(labels), codebook.WIDTH, *self._middle(public))
            code = torch.randn(size, generator=generator, device=device)
        return annealed_sampling(
            LearnedDensity(self.network_, labels, code),
            x,
            levels,
            generator,
            sampler=self.sampler,
            step_size=settings.step_size,
            steps=settings.leapfrogs,
            momentum=settings.momentum,
        )

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.network_.state_dict(prefix="network.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.network_ = self._new_network(public).requires_grad_(False).eval()
        self.network_.load_state_dict(state_below(state, "network."))
