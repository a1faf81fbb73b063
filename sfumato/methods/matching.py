"""Score matching for `pge`: what the network is shown of an image, its steps, and the landscape that it learned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sfumato.data import PublicFacts
from sfumato.encoders import codebook
from sfumato.encoders.autoencoder import Autoencoder, load_autoencoder
from sfumato.methods.generating import warm_cosine
from sfumato.methods.hamiltonian import Target
from sfumato.nets.graph import Alone, Graph
from sfumato.nets.score import Score, denoising_loss, sliced_loss

if TYPE_CHECKING:
    from sfumato.methods.pge import GradientEstimation


class Views:
    """What the network is shown of an image: noise levels, slices, and a part of its code.

    `rows` makes of an image what is learned (pixels or an autoencoder's maps) with its code behind it, once; the losses
    take such rows, and standard normal numbers for each view of them.
    """

    def __init__(self, method: GradientEstimation, public: PublicFacts) -> None:
        self.method, self.shape = method, method._space(public)
        self.dimension = math.prod(self.shape)
        self._code = method._code(public) if method.residual else None
        self._middle = method._middle(public)
        self._encoder: Autoencoder | None = load_autoencoder(method.torch_device) if method.autoencoder else None
        self.changed = self._code is not None or self._encoder is not None
        places = math.prod(self._middle) if self._code is not None else 0
        sliced = self.dimension if method.objective == "sliced" and method.form == "sound" else 0
        self._sizes = [1, 1, self.dimension, sliced, places, places * codebook.WIDTH]
        self.draws = sum(self._sizes)

    def rows(self, images: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] as they are learned, flat if a code follows."""
        with torch.no_grad():
            maps = images if self._encoder is None else self._encoder.encode(images)
            if self._code is None:
                return maps
            return torch.cat([maps.flatten(1), self._code(images).flatten(1)], 1)

    def loss(self, network: nn.Module, rows: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
        """Score matching for each row, [N]."""
        images, noise, levels, slices, code = self._shown(rows, normals)
        assert isinstance(network, Score)
        if self.method.objective == "denoising":
            return denoising_loss(network, images, noise, levels, labels, code)
        return sliced_loss(network, images + levels.view(-1, 1, 1, 1) * noise, slices, levels, labels, code)

    def published_loss(
        self,
        network: Score,
        rows: torch.Tensor,
        labels: torch.Tensor,
        normals: torch.Tensor,
        slices: torch.Tensor,
        answers: torch.Tensor,
    ) -> torch.Tensor:
        """Eq. 8 for each row, [N]: R(v) . d score/dx R(v) + (v . score)^2 / 2."""
        images, noise, levels, _, code = self._shown(rows, normals)
        v, r = (some.unflatten(1, self.shape) for some in (slices, answers))
        noisy = images + levels.view(-1, 1, 1, 1) * noise
        return sliced_loss(network, noisy, r, levels, labels, code, projected=v)

    def _shown(
        self, rows: torch.Tensor, normals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(images, noise, levels, slices, code): the code hidden in part, and in half of the views as a whole."""
        level, whole, noise, slices, hidden, instead = normals.split(self._sizes, 1)
        lowest, highest = self.method.levels
        levels = (self.method.centre * torch.exp(self.method.spread * level[:, 0])).clamp(lowest / 2, 2 * highest)
        noise = noise.unflatten(1, self.shape)
        slices = slices.unflatten(1, self.shape) if slices.shape[1] else slices
        if self._code is None:
            return rows, noise, levels, slices, None
        images, code = rows.split([self.dimension, rows.shape[1] - self.dimension], 1)
        code, instead = (part.unflatten(1, (codebook.WIDTH, *self._middle)) for part in (code, instead))
        seen = (torch.special.ndtr(hidden) > self.method.mask) & (whole > 0)
        code = torch.where(seen.unflatten(1, (1, *self._middle)), code, instead)
        return images.unflatten(1, self.shape), noise, levels, slices, code


class Training:
    """A network under way: Adam with gradients from wherever they come, and an average of the weights."""

    def __init__(self, network: Score, method: GradientEstimation) -> None:
        self.network, self.average = network, copy.deepcopy(network).requires_grad_(False)
        self.parameters = dict(network.named_parameters())
        self._ema, self._taken = method.ema, torch.zeros((), dtype=torch.int64)
        self._optimizer = torch.optim.Adam(list(self.parameters.values()), fused=True)

    def state_parts(self) -> dict[str, Any]:
        """What a step changes, for checkpoints."""
        return {
            "network": self.network,
            "average": self.average,
            "optimizer": self._optimizer,
            "taken": self._taken,
        }

    def step(self, gradients: dict[str, torch.Tensor], rate: float) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name].to(parameter)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        self._taken += 1
        keep = min(self._ema, (1 + int(self._taken)) / (10 + int(self._taken)))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.parameters.values()), 1 - keep)

    def learn(
        self,
        rows: torch.Tensor,
        labels: torch.Tensor,
        views: Views,
        steps: int,
        batch: int,
        rate: float,
        generator: torch.Generator,
        loop: Callable[..., Iterator[int]],
    ) -> None:
        """Ordinary training on public rows; the optimizer begins afresh afterwards."""
        device = generator.device
        slope = Slope(views.loss, self.network, fast=self.network.kind == "score")
        for step in loop("warm start", steps, training=self, generator=generator):
            chosen = torch.randint(len(rows), (batch,), generator=generator, device=device)
            normals = torch.randn(batch, views.draws, generator=generator, device=device)
            self.step(slope(rows[chosen], labels[chosen], normals), rate * warm_cosine(step, steps))
        self._optimizer = torch.optim.Adam(list(self.parameters.values()), fused=True)
        self._taken.zero_()
        with torch.no_grad():
            for parameter, mean in zip(self.network.parameters(), self.average.parameters(), strict=True):
                parameter.copy_(mean)


class Slope:
    """Gradients of a loss, its mean over rows; on a GPU one launch, and in bfloat16 if `fast`.

    Nothing is clipped or noised: for rows that are not private, and for the published form, which promises nothing.
    """

    def __init__(self, loss: Callable[..., torch.Tensor], network: Score, *, fast: bool = False) -> None:
        self._loss, self._network, self._fast = loss, network, fast
        self._parameters = dict(network.named_parameters())
        self._take = Graph(self._taken)

    def __call__(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """By name of the parameter; overwritten by the next call."""
        flat = self._take(Alone(), *tensors)
        assert flat is not None
        parts = flat.split([parameter.numel() for parameter in self._parameters.values()])
        return {name: part.view_as(self._parameters[name]) for name, part in zip(self._parameters, parts, strict=True)}

    def _taken(self, _: Alone, *tensors: torch.Tensor) -> torch.Tensor:
        fast = self._fast and tensors[0].device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if fast else nullcontext():
            loss = self._loss(self._network, *tensors).mean()
        gradients = torch.autograd.grad(loss, list(self._parameters.values()))
        return torch.cat([gradient.flatten() for gradient in gradients])


class Landscape:
    """The density of noisy images of given labels at each level; on a GPU each evaluation is one launch.

    Scores are taken in bfloat16 there, norms and all, which halves what is read and written; energies, of which small
    differences matter, in float32.
    """

    def __init__(self, network: Score, labels: torch.Tensor, code: torch.Tensor | None) -> None:
        fast = labels.device.type == "cuda" and network.kind == "score"
        self._network = copy.deepcopy(network).bfloat16() if fast else network
        self._labels, self._code = labels, code
        self._evaluate = Graph(self._evaluated)

    def __call__(self, level: float) -> Target:
        levels = torch.full((len(self._labels),), level, device=self._labels.device)

        def target(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            both = self._evaluate(Alone(), x, levels)
            assert both is not None
            score = both[:, : x[0].numel()].clone().view(x.shape)  # a graph's result is overwritten by the next
            return score, both[:, -1].clone() if self._network.kind == "energy" else None

        return target

    def _evaluated(self, _: Alone, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Scores, and a last column of energies."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            score, energy = self._network.with_energy(x, levels, self._labels, self._code)
        column = x.new_zeros(len(x)) if energy is None else energy
        return torch.cat([score.flatten(1), column[:, None]], 1)
