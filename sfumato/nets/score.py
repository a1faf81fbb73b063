"""The score of noisy images: a U-Net in proportions that suit every noise level, itself or as the slope of an energy.

Images x0 of about unit scale, with noise of standard deviation s on them, x = x0 + s n. The score is that of x, i.e.
(D - x) / s^2 for D the mean of x0 given x. Proportions are those of Karras et al. (2022): D = a x + b F(c x), and what
F should be has unit variance at every level.

`score`: F is what the U-Net G gives. `energy`: F is the slope of <u, G(u)>, so the score is minus the slope of
U(x) = |x|^2 / (2 (s^2 + d^2)) - (d / s) <u, G(u)>, u = c x, which is at hand: a Metropolis test is then exact.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.func import grad_and_value, vjp

from sfumato.nets.unet import UNet

DATA = 0.5  # d: the scale of images, public
KINDS = ("score", "energy")


class Score(nn.Module):
    """Noisy images [N, C, H, W], levels s [N], labels [N], codes or None, to scores [N, C, H, W]."""

    def __init__(
        self, channels: int, classes: int, *, kind: str = "score", widths: tuple[int, ...] = (32, 64, 64), code: int = 0
    ) -> None:
        super().__init__()
        self.kind = kind
        self.unet = UNet(channels, classes, widths=widths, code=code)

    def forward(
        self, noisy: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor, code: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.with_energy(noisy, levels, labels, code)[0]

    def with_energy(
        self, noisy: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor, code: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores, and energies [N] if there are any: minus the logarithm of a density, up to a constant of each level
        and label."""
        s = levels.view(-1, 1, 1, 1)
        total = s.square() + DATA**2
        field, value = self.field(noisy, levels, labels, code)
        score = DATA / (s * total.sqrt()) * field - noisy / total
        if value is None:
            return score, None
        return score, (noisy.square() / (2 * total)).flatten(1).sum(1) - DATA / levels * value

    def field(
        self, noisy: torch.Tensor, levels: torch.Tensor, labels: torch.Tensor, code: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """F, and what it is the slope of."""
        inputs = (noisy / (levels.view(-1, 1, 1, 1).square() + DATA**2).sqrt()).to(self.unet.entry.weight.dtype)
        told = levels.log() / 4
        if self.kind == "score":
            field: torch.Tensor = self.unet(inputs, told, labels, code)
            return field.float(), None

        def potential(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            each = _dot(u, self.unet(u, told, labels, code).float())
            return each.sum(), each

        slope, (_, each) = grad_and_value(potential, has_aux=True)(inputs)
        return slope.float(), each


# -- what F is to learn ---------------------------------------------------------------------------------------


def denoising_loss(
    network: Score,
    images: torch.Tensor,
    noise: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    code: torch.Tensor | None = None,
) -> torch.Tensor:
    """Denoising score matching, [N]: half the mean square by which F misses, w/2 |score + n/s|^2 in other words.

    Over all directions at once; a slice of it would have the same mean, and more variance.
    """
    s = levels.view(-1, 1, 1, 1)
    total = s.square() + DATA**2
    noisy = images + s * noise
    wanted = (images - DATA**2 / total * noisy) * total.sqrt() / (s * DATA)
    return (network.field(noisy, levels, labels, code)[0] - wanted).square().flatten(1).mean(1) / 2


def sliced_loss(
    network: Score,
    noisy: torch.Tensor,
    slices: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    code: torch.Tensor | None = None,
    projected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sliced score matching, [N]: s^2 (v . d score/dx v + |score|^2 / 2), a mean over pixels.

    On average its slope is that of denoising times d^2 / (s^2 + d^2): with equal weights the variance of slices would
    grow without bound from level to level.

    `projected`: directions u for a second term (u . score)^2 / 2, in place of its mean over directions.
    """
    # v . J v = v . J' v, and a product with the transpose can be traced.
    score, back = cast(Any, vjp(lambda x: network(x, levels, labels, code), noisy))
    (turned,) = back(slices)
    weight = levels.square() / noisy[0].numel()
    squares = _dot(score, score) if projected is None else _dot(projected, score).square()
    return weight * (_dot(slices, turned) + squares / 2)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).flatten(1).sum(1)
