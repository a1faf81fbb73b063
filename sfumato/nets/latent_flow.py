"""DP-LFlow's network: a convolutional autoencoder with a RealNVP on its codes, or a RealNVP on pixels or on codes."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from sfumato.nets.conv_autoencoder import ConvDecoder, ConvEncoder
from sfumato.nets.flow import RealNVP

Shape = tuple[int, int, int]


class LatentNetwork(nn.Module):
    """An autoencoder with a flow on its codes, or a flow on pixels, or on codes that come in place of images.

    - shape: of images.
    - space: `latent`, `pixels` or `codes`.
    - classes: number of classes that decoder and flow are conditioned on; 0: unconditional.
    - code: size of a code.
    - width: channels of the first convolution.
    - couplings, hidden: of the flow.
    """

    def __init__(
        self, shape: Shape, space: str, classes: int, *, code: int, width: int, couplings: int, hidden: int
    ) -> None:
        super().__init__()
        self.shape, self.classes = shape, classes
        self.autoencoder: nn.ModuleDict | None = None
        self.size = math.prod(shape) if space == "pixels" else code
        if space == "latent":
            decoder = ConvDecoder(shape, code=code, width=width, context=classes)
            encoder = ConvEncoder(shape, code=code, width=width)
            self.autoencoder = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        mixed = space != "pixels"  # a matrix over all pixels would be larger than the rest
        self.flow = RealNVP(self.size, couplings=couplings, hidden=hidden, context=classes, mixed=mixed)

    def forward(
        self, images: torch.Tensor, jitter: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-likelihood of each image given its code, and the log-density of the code plus `jitter`.

        The first is that of Bernoulli pixels, less its value for a perfect reconstruction: 0 is the best.
        """
        context = self._context(labels)
        if self.autoencoder is None:
            return torch.zeros_like(jitter[:, 0]), self.flow.log_prob(images.flatten(1) + jitter, context)
        codes = self.autoencoder["encoder"](images) + jitter
        logits, shades = self.autoencoder["decoder"](codes, context), (images + 1) / 2
        cross_entropy = functional.binary_cross_entropy_with_logits(logits, shades, reduction="none")
        entropy = -torch.xlogy(shades, shades) - torch.xlogy(1 - shades, 1 - shades)
        return (entropy - cross_entropy).flatten(1).sum(1), self.flow.log_prob(codes, context)

    def draw(self, normals: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Map standard normal numbers to images in [-1, 1]."""
        context = self._context(labels)
        codes = self.flow.inverse(normals, context)
        if self.autoencoder is None:
            return codes.view(-1, *self.shape)
        return torch.tanh(self.autoencoder["decoder"](codes, context) / 2)  # 2 sigmoid - 1

    def _context(self, labels: torch.Tensor | None) -> torch.Tensor | None:
        if labels is None or not self.classes:
            return None
        names = torch.arange(self.classes, device=labels.device)
        return (labels[:, None] == names).to(self.flow.shift.dtype)  # one-hot in a form that vmap supports


def sharpen(images: torch.Tensor, factor: float) -> torch.Tensor:
    """Smooth images, then sharpen them by `factor`: away from a second smoothing. 1 leaves the smooth images.

    The filter is a mean of 3 × 3 pixels in which the middle one has weight five; the border is unchanged.
    """
    smooth = _smooth(images)
    return torch.lerp(_smooth(smooth), smooth, factor).clamp(-1, 1)


def _smooth(images: torch.Tensor) -> torch.Tensor:
    channels = images.shape[1]
    kernel = torch.ones(3, 3, device=images.device, dtype=images.dtype)
    kernel[1, 1] = 5
    inside = functional.conv2d(images, (kernel / 13).expand(channels, 1, 3, 3), groups=channels)
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = inside
    return result
