"""Score network with the preconditioning of Karras et al. (2022), and its score-matching losses.

A noisy image is x = x0 + s n, with x0 of scale d (`SIGMA_DATA`) and standard normal n. Its score is (D - x) / s²,
where D is the conditional mean of x0 given x. The network F enters as D = a x + b F(c x), with a, b and c such that the
target of F has unit variance at every noise level s.

- `score`: F is the output of the U-Net G.
- `energy`: F is the gradient of <u, G(u)>. The score is then minus the gradient of the energy
  U(x) = |x|² / (2 (s² + d²)) - (d / s) <u, G(u)> with u = c x. Since U is known, a Metropolis test is exact.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.func import grad_and_value, vjp

from sfumato.nets.unet import UNet

SIGMA_DATA = 0.5  # d: assumed standard deviation of the images, public
SCORE_KINDS = ("score", "energy")
LABELS = "unet.context.0.weight"  # [context, frequencies + condition + classes]: the last columns embed the classes


class ScoreNetwork(nn.Module):
    """Map noisy images [N, C, H, W], noise levels [N], labels [N], and codes or conditions, to scores [N, C, H, W].

    - channels: of the images.
    - classes: number of classes.
    - kind: "score" (default) or "energy".
    - options: of the U-Net: `widths`, `context`, `attention`, `code`, `condition`.
    """

    def __init__(self, channels: int, classes: int, *, kind: str = "score", **options: Any) -> None:
        super().__init__()
        self.kind = kind
        self.unet = UNet(channels, classes, **options)

    def with_classes(self, shares: torch.Tensor, *, code: int = 0) -> ScoreNetwork:
        """Return a copy for other classes, each of them embedded as a mixture of the network's own.

        - shares: [new classes, own classes], rows of sum one.
        - code: channels of codes that the copy takes, without effect at first; 0 (default): none.
        """
        unet, state = self.unet, dict(self.state_dict())
        embedded, labels = state[LABELS].split([state[LABELS].shape[1] - unet.classes, unet.classes], 1)
        state[LABELS] = torch.cat([embedded, labels @ shares.to(labels).T], 1)
        options: dict[str, Any] = {
            "widths": unet.widths,
            "context": unet.context_width,
            "attention": unet.attention,
            "condition": unet.condition_width,
        }
        changed = ScoreNetwork(unet.entry.in_channels, len(shares), kind=self.kind, code=code, **options)
        if changed.unet.code_projection is not None:
            shapes = changed.unet.code_projection.state_dict(prefix="unet.code_projection.")
            state |= {name: torch.zeros_like(value) for name, value in shapes.items()}
        changed.to(labels.device).load_state_dict(state)
        return changed

    def forward(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.with_energy(noisy, levels, labels, code, condition)[0]

    def with_energy(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scores, and energies [N] if `kind` is "energy".

        The energy is the negative log-density up to a constant for each noise level and label.
        """
        s = levels.view(-1, 1, 1, 1)
        variance = s.square() + SIGMA_DATA**2
        field, potential = self.field(noisy, levels, labels, code, condition)
        score = SIGMA_DATA / (s * variance.sqrt()) * field - noisy / variance
        if potential is None:
            return score, None
        return score, (noisy.square() / (2 * variance)).flatten(1).sum(1) - SIGMA_DATA / levels * potential

    def field(
        self,
        noisy: torch.Tensor,
        levels: torch.Tensor,
        labels: torch.Tensor,
        code: torch.Tensor | None = None,
        condition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return F, and the potential whose gradient is F if `kind` is "energy"."""
        inputs = noisy / (levels.view(-1, 1, 1, 1).square() + SIGMA_DATA**2).sqrt()
        inputs = inputs.to(next(self.unet.context.parameters()).dtype)
        log_levels = levels.log() / 4
        if self.kind == "score":
            field: torch.Tensor = self.unet(inputs, log_levels, labels, code, condition)
            return field.float(), None

        def potential(u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = _dot(u, self.unet(u, log_levels, labels, code, condition).float())
            return values.sum(), values

        gradient, (_, values) = grad_and_value(potential, has_aux=True)(inputs)
        return gradient.float(), values


def denoising_loss(
    network: ScoreNetwork,
    images: torch.Tensor,
    noise: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    code: torch.Tensor | None = None,
    condition: torch.Tensor | None = None,
) -> torch.Tensor:
    """Denoising score matching (Vincent 2011), [N]: half the mean squared error of F, a weighted |score + n / s|² / 2.

    It uses the whole error; a random projection would have the same mean and a larger variance.
    """
    s = levels.view(-1, 1, 1, 1)
    variance = s.square() + SIGMA_DATA**2
    noisy = images + s * noise
    target = (images - SIGMA_DATA**2 / variance * noisy) * variance.sqrt() / (s * SIGMA_DATA)
    return (network.field(noisy, levels, labels, code, condition)[0] - target).square().flatten(1).mean(1) / 2


def sliced_loss(
    network: ScoreNetwork,
    noisy: torch.Tensor,
    slices: torch.Tensor,
    levels: torch.Tensor,
    labels: torch.Tensor,
    code: torch.Tensor | None = None,
    projected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sliced score matching (Song et al. 2019), [N]: s² (v . d score/dx v + |score|² / 2), divided by the dimension.

    The expected gradient is that of `denoising_loss` times d² / (s² + d²). With equal weights the variance of the
    random projections would grow without bound with the noise level.

    - slices: directions v.
    - projected: directions u; the second term is then (u . score)² / 2. Default: its expectation |score|² / 2.
    """
    # v . J v = v . J' v: the vector-Jacobian product can be traced.
    score, vector_jacobian = cast(Any, vjp(lambda x: network(x, levels, labels, code), noisy))
    (product,) = vector_jacobian(slices)
    weight = levels.square() / noisy[0].numel()
    squares = _dot(score, score) if projected is None else _dot(projected, score).square()
    return weight * (_dot(slices, product) + squares / 2)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).flatten(1).sum(1)
