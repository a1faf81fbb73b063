"""An embedding of images: vectors of norm at most one that no private image has shaped.

Rows of a public encoder (its last activation, averaged over pixels) or, without one, wavelet scattering coefficients;
of these the principal components among public images, with the smaller ones enlarged; then a small thumbnail, which
adds colours and layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.components import Components
from sfumato.features.perceptual import Perceptual
from sfumato.features.unit_norm import ScatteringAndPixels

ENCODER_SIDE = 128  # pixels to which images are enlarged for an encoder of large photographs
SMALL_IMAGE_NETWORKS = ("small", "resnet18_cifar")  # encoders of small images, which see images as they are
COMPONENTS = 500
THUMBNAIL, THUMBNAIL_WEIGHT = 4, 0.5  # pixels a side; norm of the thumbnail relative to that of the components
IMAGES_PER_BATCH = 500  # of the encoder


class ImageEmbedding(nn.Module):
    """Map images [N, C, H, W] in [-1, 1] to vectors [N, width] of norm at most one.

    - shape: of the images. encoder: a public encoder on the device; None: scattering coefficients.
    - components: number of principal components, at most.

    `fit` must be called first, or a state be loaded.
    """

    centre: torch.Tensor
    axes: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, int, int],
        encoder: Perceptual | None,
        device: torch.device,
        components: int = COMPONENTS,
    ) -> None:
        super().__init__()
        self._shape = shape
        network = _encoder_rows(encoder, shape) if encoder is not None else None
        scattering = None if network else ScatteringAndPixels(shape).to(device)
        rows: Callable[[torch.Tensor], torch.Tensor] | None = network or (scattering.scattering if scattering else None)
        assert rows is not None
        self._rows = [rows]  # a list: public networks do not belong to the state
        with torch.no_grad():
            inputs = rows(torch.zeros(1, *shape, device=device)).shape[1]
        self.register_buffer("centre", torch.zeros(inputs, device=device))
        self.register_buffer("axes", torch.zeros(inputs, min(components, inputs), device=device))
        self.width = self.axes.shape[1] + shape[0] * THUMBNAIL**2

    @torch.no_grad()
    def fit(self, images: torch.Tensor, seed: int) -> None:
        """Find the principal components of public images, [N, C, H, W] in [-1, 1]."""
        rows = torch.cat([self._rows[0](part) for part in images.split(IMAGES_PER_BATCH)])
        found = Components.of(rows, self.axes.shape[1], seed)
        self.centre.copy_(found.centre)
        self.axes.zero_()
        self.axes[:, : found.axes.shape[1]] = found.axes

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._embed(part) for part in images.split(IMAGES_PER_BATCH)])

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        components = functional.normalize((self._rows[0](images) - self.centre) @ self.axes, dim=1)
        small = functional.adaptive_avg_pool2d(images, THUMBNAIL).flatten(1)
        small = THUMBNAIL_WEIGHT * small / math.sqrt(small.shape[1])
        return torch.cat([components, small], 1) / math.sqrt(1 + THUMBNAIL_WEIGHT**2)


def _encoder_rows(encoder: Perceptual, shape: tuple[int, int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the encoder's last activation, averaged over pixels, as a function of images."""
    enlarge = encoder.card.network not in SMALL_IMAGE_NETWORKS and min(shape[1:]) < ENCODER_SIDE

    def rows(images: torch.Tensor) -> torch.Tensor:
        if enlarge:
            images = functional.interpolate(images, (ENCODER_SIDE, ENCODER_SIDE), mode="bilinear")
        last: torch.Tensor = encoder(images)[-1]
        return last.float().mean((2, 3))

    return rows


def tilt(rows: torch.Tensor, means: torch.Tensor, strength: float) -> torch.Tensor:
    """Return weights [N, classes] of public rows [N, width] under which their mean approaches a class mean.

    Exponential tilting: the weights exp(w . row) with the least change in relative entropy for a given mean. w
    minimises log E exp(w . row) - w . mean + |w|² / (2 strength), a convex problem.

    - means: noisy means of the private classes, [classes, width].
    - strength: the larger, the closer the means, and the fewer images share the weight.
    """
    weights = torch.zeros_like(means).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        dual = torch.logsumexp(rows @ weights.T, 0) - (weights * means).sum(1)
        loss = (dual + weights.square().sum(1) / (2 * strength)).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return (rows @ weights.detach().T).softmax(0)
