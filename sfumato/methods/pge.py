"""PGE: private gradient estimation ("Private Gradient Estimation is Useful for Generative Modeling", MM 2024).

The idea: learn the score of the images, the slope of their log-density, at many noise levels; then draw images by
Hamiltonian dynamics in the landscape that it describes, from noise down to none.

Released: at each of `steps` steps, the noisy sum of per-example gradients of score matching over a Poisson sample;
several noise levels and slices of an image are averaged before its gradient is clipped. Noisy class counts unless sizes
are declared. With `warm`, first the releases of another method, charged in the same plan: the network is pre-trained on
what that method's generator draws.
Public: image shape, class names; initial weights (from the seed); networks named in `residual` and `autoencoder`.
Events: Poisson-subsampled Gaussian sums, one for each step; those of the warm start.

What the paper does is not private. Its randomised response is on projection vectors, which do not depend on the data;
the exact images stand in both terms of the loss. `form="published"` runs it, and its certificate says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.encoders import autoencoder as autoencoders
from sfumato.encoders import codebook
from sfumato.encoders.autoencoder import load_autoencoder, maps_shape
from sfumato.encoders.codebook import Code
from sfumato.engine import Performance, Vault
from sfumato.methods.generating import equal_batches, warm_cosine
from sfumato.methods.hamiltonian import MOMENTA, SAMPLERS, annealed, noise_levels
from sfumato.methods.matching import Landscape, Slope, Training, Views
from sfumato.methods.warming import WarmStart
from sfumato.nets.score import KINDS, Score
from sfumato.nets.unet import middle_size
from sfumato.privacy import Release

LARGEST_SIDE = 64  # of what the network sees: larger images go through an autoencoder
MIDDLE = 4  # pixels across in the middle of the network, at most
PUBLISHED_BATCH = 256
AT_ONCE = 1024  # views whose gradients are taken at once, on a GPU: ten megabytes each
FORMS = ("sound", "published")
OBJECTIVES = ("denoising", "sliced")
LEAK = (
    "randomised response is applied to projection vectors, which do not depend on the data; the exact image stands in "
    "both terms of the loss, its gradient unbounded. Given the vectors a step has finitely many outcomes, those of "
    "neighbouring batches are disjoint, and nothing is composed over steps; no finite epsilon holds"
)


@dataclass(kw_only=True, eq=False)
class GradientEstimation(WarmStart):
    """A score network trained on noisy gradients, and Hamiltonian sampling.

    form: `sound`, or `published`, the paper's training, which is not private: its certificate says so.
    network: `score`, or `energy`, whose slope the score then is: slower, with an exact Metropolis test.
    objective: `denoising` or `sliced` score matching. centre, spread: median of the noise levels that are learned, and
    the standard deviation of their logarithm. views: levels (and slices) of an image, averaged before clipping.
    steps, sampling_prob, bound, learning_rate, ema: of the private training. at_once: images at a time (0: as the
    device likes). width: channels at full resolution.

    warm and what begins with it: of a warm start, as `WarmStart` has them; `create` has other defaults without one.
    residual: a public network for residual enhancement (`taef2`, or as `load_perceptual` takes it); mask: the part of
    the code that is hidden. autoencoder: `taef2`, to learn its maps in place of pixels.

    sampler: `hamiltonian`, `langevin`, or `ode`, the probability flow. levels: lowest and highest; sampling_levels: how
    many. step_size, leapfrogs: of the dynamics at each level. momentum: `gaussian`, `rayleigh` or `uniform`.
    nearest: k of the published form.
    """

    key: ClassVar[str] = "pge"
    paper: ClassVar[str] = "Private Gradient Estimation is Useful for Generative Modeling (Liu et al., MM 2024)"
    summary: ClassVar[str] = "a score network from noisy gradients, and images by Hamiltonian dynamics; wants a GPU"
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed", "at_once"})
    suited: ClassVar[dict[tuple[str, Any], dict[str, Any]]] = {
        ("form", "published"): {"warm": "none", "steps": 2000},
        ("autoencoder", "taef2"): {"warm": "none"},
        ("warm", "none"): {"steps": 400, "learning_rate": 1e-3},
    }
    on_cpu: ClassVar[dict[str, Any]] = {
        "warm": "dp-merf",
        "sampling_prob": 0.01,
        "width": 16,
        "warm_steps": 600,
        "warm_batch": 64,
    }

    form: str = "sound"
    network: str = "score"
    objective: str = "denoising"
    steps: int = 60
    sampling_prob: float = 0.1
    views: int = 2
    bound: float = 0.1
    learning_rate: float = 1e-4
    ema: float = 0.99
    width: int = 32
    warm: str = "dp-kernel"
    warm_share: float = 0.8
    centre: float = 1.5
    spread: float = 1.2
    at_once: int = 0
    residual: str = ""
    mask: float = 0.75
    autoencoder: str = ""
    sampler: str = "hamiltonian"
    sampling_levels: int = 20
    levels: tuple[float, float] = (0.05, 20.0)
    step_size: float = 1.0
    leapfrogs: int = 5
    momentum: str = "gaussian"
    nearest: int = 10

    @property
    def claimed(self) -> dict[str, Any] | None:  # type: ignore[override]
        if self.form != "published" or not self._budget().private:
            return None
        return {"epsilon": self.epsilon, "delta": 0.0, "by": self.paper, "why": LEAK}

    @property
    def _protected(self) -> bool:
        return self.form != "published"

    def validate(self) -> Self:
        named = {
            "form": FORMS,
            "network": KINDS,
            "objective": OBJECTIVES,
            "sampler": SAMPLERS,
            "momentum": MOMENTA,
            "autoencoder": ("", *autoencoders.NAMES),
        }
        for name, known in named.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("mask", "ema"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}")
        super().validate()
        if not self.levels[0] < self.levels[1]:
            raise ValueError(f"levels must be the lowest and the highest, got {self.levels!r}")
        if self.steps < 2 or self.nearest < 2 or self.width % 8:
            raise ValueError("steps and nearest must be at least 2, and width a multiple of 8")
        if self.form == "published" and self.warm != "none":
            raise ValueError("the published form has no warm start; pass warm='none'")
        return self

    # -- the plan -----------------------------------------------------------------------------------------

    def _releases(self, public: PublicFacts) -> list[Release]:
        space = self._space(public)
        if max(space[1:]) > LARGEST_SIDE:
            raise DataError(
                f"pge is for images of up to {LARGEST_SIDE} pixels a side, or eight times that with "
                "autoencoder='taef2'; pass a smaller size (--size)"
            )
        if self.form == "published":
            return []
        return self._preceded(public, Release("gradients", self.steps, self.sampling_prob))

    def _facts(self, public: PublicFacts) -> dict[str, Any]:
        facts = super()._facts(public)
        if self.residual:
            facts["residual"] = codebook.facts(self.residual)
        if self.autoencoder:
            facts["autoencoder"] = load_autoencoder().facts
        return facts

    # -- training -----------------------------------------------------------------------------------------

    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        generator = torch.Generator(self.torch_device).manual_seed(self.seed)
        views = Views(self, public)
        stated = (vault.ledger.opening or {}).get("public_facts", {})
        if any(stated.get(name) != fact for name, fact in self._facts(public).items()):
            raise DataError("a public network's file was changed under way; nothing was spent, start again")
        training = Training(self._network(public), self)
        if self.form == "published":
            self.counts_ = torch.ones(len(public.classes), device=self.torch_device)
            self._train_as_published(vault, views, training, generator)
        else:
            self.counts_, painted = self._begin(vault, public)
            if painted is not None:
                self._learn(painted, views, training, generator)
            self._train(vault.map(views.rows) if views.changed else vault, views, training)
        self.network_ = training.average.eval()

    def _train(self, vault: Vault, views: Views, training: Training) -> None:
        """DP-SGD on score matching: noisy sums of clipped gradients over the expected number of images."""
        expected = self.sampling_prob * float(self.counts_.sum())
        on_gpu = self.torch_device.type == "cuda"
        fast = on_gpu and self.network == "score" and self.objective == "denoising"
        at_once = self.at_once or (equal_batches(expected, max(8, AT_ONCE // self.views)) if on_gpu else None)
        performance = Performance(batch_size=at_once, precision=torch.bfloat16 if fast else torch.float32)
        for step in self._checkpoints.loop("network", self.steps, training=training):
            sums = vault.gradient(
                training.network,
                views.loss,
                release="gradients",
                bound=self.bound,
                with_labels=True,
                views=self.views,
                draws=views.draws,
                performance=performance,
            )
            rate = self.learning_rate * warm_cosine(step, self.steps)
            training.step({name: total / expected for name, total in sums.items()}, rate)

    def _learn(self, painted: ImageSet, views: Views, training: Training, generator: torch.Generator) -> None:
        """The network is taught by another method's images."""
        images = painted.images.float() / 127.5 - 1
        labels = torch.zeros(len(images), dtype=torch.int64) if painted.labels is None else painted.labels
        rows = torch.cat([views.rows(part.to(self.torch_device)) for part in images.split(500)])
        sizes = (self.warm_steps, self.warm_batch, self.warm_rate)
        training.learn(rows, labels.to(rows.device), views, *sizes, generator, self._checkpoints.loop)

    def _train_as_published(self, vault: Vault, views: Views, training: Training, generator: torch.Generator) -> None:
        """Algorithm 1, for comparison, at several noise levels: the exact images in both terms of Eq. 8."""
        images, labels = vault.unprotected(f"as published: {LEAK}")
        labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        device, size = self.torch_device, min(PUBLISHED_BATCH, len(images))
        slope = Slope(views.published_loss, training.network)
        for step in self._checkpoints.loop("network", self.steps, training=training, generator=generator):
            chosen = torch.randint(len(images), (size,), generator=generator, device=device)
            batch = images[chosen.to(images.device)].to(device).float() / 127.5 - 1
            kinds = labels[chosen.to(labels.device)].to(device)
            normals = torch.randn(size, views.draws, generator=generator, device=device)
            slices = torch.randn(size, views.dimension, generator=generator, device=device)
            answers = randomised_response(slices, self.epsilon, self.nearest, generator)
            gradients = slope(views.rows(batch), kinds, normals, slices, slices[answers])
            training.step(gradients, self.learning_rate * warm_cosine(step, self.steps))

    # -- parts --------------------------------------------------------------------------------------------

    def _space(self, public: PublicFacts) -> tuple[int, int, int]:
        """What the network sees: the image's shape, or that of an autoencoder's maps."""
        return maps_shape(public.shape) if self.autoencoder else public.shape

    def _widths(self, public: PublicFacts) -> tuple[int, ...]:
        halvings = max(1, math.ceil(math.log2(max(self._space(public)[1:]) / MIDDLE)))
        return (self.width, *[2 * self.width] * halvings)

    def _middle(self, public: PublicFacts) -> tuple[int, int]:
        _, height, width = self._space(public)
        return middle_size((height, width), self._widths(public))

    def _code(self, public: PublicFacts) -> Code:
        return Code(self.residual, public.shape, self._middle(public), self.torch_device)

    def _network(self, public: PublicFacts) -> Score:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = Score(
                self._space(public)[0],
                len(public.classes),
                kind=self.network,
                widths=self._widths(public),
                code=codebook.WIDTH if self.residual else 0,
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
        if not self.autoencoder:
            return maps
        return load_autoencoder(self.torch_device).decode(maps, self._fitted().shape)

    def draw(self, labels: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, float]:
        """(images or an autoencoder's maps for these labels, share of trajectories that were accepted)."""
        public, device = self._fitted(), self.torch_device
        levels = noise_levels(self.sampling_levels, *self.levels)
        x = levels[0] * torch.randn(len(labels), *self._space(public), generator=generator, device=device)
        code = None
        if self.residual:  # noise in the place of a code (paper, Fig. 3); one for each image
            size = (len(labels), codebook.WIDTH, *self._middle(public))
            code = torch.randn(size, generator=generator, device=device)
        return annealed(
            Landscape(self.network_, labels, code),
            x,
            levels,
            generator,
            sampler=self.sampler,
            step_size=self.step_size,
            steps=self.leapfrogs,
            momentum=self.momentum,
        )

    def _state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts_, **self.network_.state_dict(prefix="network.")}

    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        self.counts_ = state["counts"]
        self.network_ = self._network(public).requires_grad_(False).eval()
        own = {name.removeprefix("network."): value for name, value in state.items() if name != "counts"}
        self.network_.load_state_dict(own)


def randomised_response(vectors: torch.Tensor, epsilon: float, k: int, generator: torch.Generator) -> torch.Tensor:
    """Eq. 6: each vector's own index, or that of another of its `k` nearest by cosine, [N].

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
