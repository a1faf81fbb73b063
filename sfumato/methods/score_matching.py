"""Score matching for `pge`: noisy views of an image, gradients of the loss, and the learned density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from sfumato.engine.cuda_graph import Graph, NoBundle
from sfumato.features import codebook
from sfumato.features.codebook import CodebookEncoder
from sfumato.methods.checkpoints import Checkpoints
from sfumato.methods.warm_start import WarmStartSettings
from sfumato.nets.samplers import Target
from sfumato.nets.score import ScoreNetwork, denoising_loss, sliced_loss
from sfumato.nets.training import Trainer, use_average, warm_cosine
from sfumato.priors.latent_space import DrawingSpace


@dataclass(frozen=True)
class ScoreSettings:
    """Settings of score matching.

    - objective: `denoising` or `sliced` score matching.
    - centre: median of the noise levels in training.
    - spread: standard deviation of their logarithm.
    - lowest: last noise level of the sampler.
    - highest: first noise level of the sampler.
    - mask: part of the code that is hidden in residual enhancement.
    """

    objective: Literal["denoising", "sliced"] = "denoising"
    centre: float = 1.5
    spread: float = 1.2
    lowest: float = 0.05
    highest: float = 20.0
    mask: float = 0.75


class NoisyViews:
    """Views of an image for score matching: noise levels, slices, and a masked code.

    `rows` converts an image once: pixels or latents, with its code appended. The losses take such rows, and standard
    normal numbers for each view of them.

    - space: of what is learned: pixels or latents.
    - middle: size of the U-Net's smallest map, which the code has.
    - code: encoder of residual enhancement, or None.
    """

    def __init__(
        self,
        settings: ScoreSettings,
        space: DrawingSpace,
        middle: tuple[int, int],
        *,
        code: CodebookEncoder | None = None,
        slices: bool | None = None,
    ) -> None:
        self.settings, self.shape, self._middle = settings, space.maps, middle
        self.dimension = math.prod(self.shape)
        self._code, self._space = code, space
        self.changed = code is not None or space.changes
        places = math.prod(middle) if code is not None else 0
        sliced = settings.objective == "sliced" if slices is None else slices
        self._sizes = [1, 1, self.dimension, self.dimension if sliced else 0, places, places * codebook.WIDTH]
        self.draws = sum(self._sizes)

    def rows(self, images: torch.Tensor) -> torch.Tensor:
        """Return images [N, C, H, W] in the form that is learned, flat if a code is appended."""
        with torch.no_grad():
            maps = self._space.encode(images)
            if self._code is None:
                return maps
            return torch.cat([maps.flatten(1), self._code(images).flatten(1)], 1)

    def loss(self, network: nn.Module, rows: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        """Return the score-matching loss of each row, [N]."""
        images, noise, levels, slices, code = self.split(rows, normals)
        assert isinstance(network, ScoreNetwork)
        if self.settings.objective == "denoising":
            return denoising_loss(network, images, noise, levels, labels, code)
        return sliced_loss(network, images + levels.view(-1, 1, 1, 1) * noise, slices, levels, labels, code)

    def split(
        self, rows: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (images, noise, levels, slices, code); the code is masked in part, and in half of the views whole."""
        level, whole, noise, slices, hidden, instead = normals.split(self._sizes, 1)
        settings = self.settings
        levels = settings.centre * torch.exp(settings.spread * level[:, 0])
        levels = levels.clamp(settings.lowest / 2, 2 * settings.highest)
        noise = noise.unflatten(1, self.shape)
        slices = slices.unflatten(1, self.shape) if slices.shape[1] else slices
        if self._code is None:
            return rows, noise, levels, slices, None
        images, code = rows.split([self.dimension, rows.shape[1] - self.dimension], 1)
        code, instead = (part.unflatten(1, (codebook.WIDTH, *self._middle)) for part in (code, instead))
        visible = (torch.special.ndtr(hidden) > settings.mask) & (whole > 0)
        code = torch.where(visible.unflatten(1, (1, *self._middle)), code, instead)
        return images.unflatten(1, self.shape), noise, levels, slices, code


def pretrain(
    trainer: Trainer,
    rows: torch.Tensor,
    labels: torch.Tensor,
    views: NoisyViews,
    settings: WarmStartSettings,
    generator: torch.Generator,
    checkpoints: Checkpoints,
) -> None:
    """Train on public rows without noise. The network ends as its average, with a fresh optimizer."""
    network, device = trainer.network, generator.device
    assert isinstance(network, ScoreNetwork)
    gradients = LossGradient(views.loss, network, low_precision=network.kind == "score")
    for step in checkpoints.loop("warm start", settings.steps, trainer=trainer, generator=generator):
        chosen = torch.randint(len(rows), (settings.batch_size,), generator=generator, device=device)
        normals = torch.randn(settings.batch_size, views.draws, generator=generator, device=device)
        trainer.set_rate(settings.learning_rate * warm_cosine(step, settings.steps))
        trainer.step(gradients(rows[chosen], labels[chosen], normals))
    trainer.reset()
    use_average(trainer)


class LossGradient:
    """The gradient of a mean loss, without clipping or noise: for public rows, and for the published form.

    On a GPU it is one CUDA graph, in bfloat16 if `low_precision`.
    """

    def __init__(
        self, loss: Callable[..., torch.Tensor], network: ScoreNetwork, *, low_precision: bool = False
    ) -> None:
        self._loss, self._network, self._low_precision = loss, network, low_precision
        self._parameters = {name: value for name, value in network.named_parameters() if value.requires_grad}
        self._graph = Graph(self._compute)

    def __call__(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return gradients by name of the parameter; the next call overwrites them."""
        flat = self._graph(NoBundle(), *tensors)
        assert flat is not None
        parts = flat.split([parameter.numel() for parameter in self._parameters.values()])
        return {name: part.view_as(self._parameters[name]) for name, part in zip(self._parameters, parts, strict=True)}

    def _compute(self, _: NoBundle, *tensors: torch.Tensor) -> torch.Tensor:
        low = self._low_precision and tensors[0].device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
            loss = self._loss(self._network, *tensors).mean()
        gradients = torch.autograd.grad(loss, list(self._parameters.values()))
        return torch.cat([gradient.flatten() for gradient in gradients])


class LearnedDensity:
    """The density of noisy images of given labels at each level; on a GPU each evaluation is one CUDA graph.

    Scores are computed in bfloat16 there. Energies, of which small differences matter, are computed in float32.
    """

    def __init__(self, network: ScoreNetwork, labels: torch.Tensor, code: torch.Tensor | None) -> None:
        low = labels.device.type == "cuda" and network.kind == "score"
        self._network = copy.deepcopy(network).bfloat16() if low else network
        self._labels, self._code = labels, code
        self._graph = Graph(self._compute)

    def __call__(self, level: float) -> Target:
        levels = torch.full((len(self._labels),), level, device=self._labels.device)

        def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            both = self._graph(NoBundle(), x, levels)
            assert both is not None
            score = both[:, : x[0].numel()].clone().view(x.shape)  # the next replay overwrites the result
            return score, both[:, -1].clone() if self._network.kind == "energy" else None

        return target

    def _compute(self, _: NoBundle, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return scores, and a last column of energies."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            score, energy = self._network.with_energy(x, levels, self._labels, self._code)
        column = x.new_zeros(len(x)) if energy is None else energy
        return torch.cat([score.flatten(1), column[:, None]], 1)
