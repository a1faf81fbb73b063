"""An embedding of images: vectors of norm at most one that no private image has shaped.

Two parts. *Content*: rows of a public encoder (its last activation, averaged over pixels) or, without one, wavelet
scattering coefficients; of these the partially whitened principal components, computed on public images.
*Layout*: principal components of a thumbnail, which add colours and where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from sfumato.features.perceptual import Perceptual
from sfumato.features.unit_norm import Components, ScatteringAndPixels

ENCODER_SIDE = 128  # pixels to which images are enlarged for an encoder of large photographs
SMALL_IMAGE_NETWORKS = ("small", "resnet18_cifar")  # encoders of small images, which see images as they are
CONTENT, LAYOUT = 500, 48  # components
THUMBNAIL = (8, 8)  # pixels
LEAST_CONTENT = 0.25  # of the mean norm. Shorter rows stay shorter: made as long, their rounding errors would grow, too
LAYOUT_WEIGHT, MAX_LAYOUT = 0.5, 2.0  # largest norm, relative to that of the content; multiple of the mean norm
CONDITION = 128  # components of the content that a prior is conditioned on, with all of the layout
IMAGES_PER_BATCH = 500  # of the encoder


class ImageEmbedding(nn.Module):
    """Map images [N, C, H, W] in [-1, 1] to vectors [N, width] of norm at most one.

    - shape: that images are converted to.
    - encoder: a public encoder on the device; None: scattering coefficients.
    - components: number of the content's components, at most.

    `fit` must be called first, or a state be loaded.
    """

    STATE: ClassVar = {"centre", "axes", "layout_centre", "layout_axes", "spread"}
    centre: torch.Tensor
    axes: torch.Tensor
    layout_centre: torch.Tensor
    layout_axes: torch.Tensor
    spread: torch.Tensor  # variance of public conditions in each coordinate

    def __init__(
        self,
        shape: tuple[int, int, int],
        encoder: Perceptual | None,
        device: torch.device,
        components: int = CONTENT,
    ) -> None:
        super().__init__()
        self.shape = shape
        network = _encoder_rows(encoder, shape) if encoder is not None else None
        scattering = None if network else ScatteringAndPixels(shape).to(device)
        rows: Callable[[torch.Tensor], torch.Tensor] | None = network or (scattering.scattering if scattering else None)
        assert rows is not None
        self._rows = [rows]  # a list: public networks do not belong to the state
        with torch.no_grad():
            inputs, pixels = rows(torch.zeros(1, *shape, device=device)).shape[1], 3 * math.prod(THUMBNAIL)
        self.content = min(components, inputs)
        for name, width, count in (("", inputs, self.content), ("layout_", pixels, LAYOUT)):
            self.register_buffer(f"{name}centre", torch.zeros(width, device=device))
            self.register_buffer(f"{name}axes", torch.zeros(width, count, device=device))
        self.width = self.content + LAYOUT
        self.condition_width = min(CONDITION, self.content) + LAYOUT
        self.register_buffer("spread", torch.zeros(self.condition_width, device=device))

    @torch.no_grad()
    def fit(self, images: torch.Tensor, seed: int) -> None:
        """Find the principal components of public images, [N, C, H, W] in [-1, 1]."""
        parts = [convert(part, self.shape) for part in images.split(IMAGES_PER_BATCH)]
        rows, small = (
            torch.cat([self._rows[0](part) for part in parts]),
            torch.cat([_thumbnails(part) for part in parts]),
        )
        for centre, axes, each in ((self.centre, self.axes, rows), (self.layout_centre, self.layout_axes, small)):
            found = Components.of(each, axes.shape[1], seed)
            centre.copy_(found.centre)
            axes.zero_()
            axes[:, : found.axes.shape[1]] = found.axes
        self.spread.copy_(self.condition(self._join(rows, small)).var(0))

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._embed(part) for part in images.split(IMAGES_PER_BATCH)])

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        images = convert(images, self.shape)
        return self._join(self._rows[0](images), _thumbnails(images))

    def _join(self, rows: torch.Tensor, thumbnails: torch.Tensor) -> torch.Tensor:
        content = (rows - self.centre) @ self.axes
        content = content / content.norm(dim=1, keepdim=True).clamp_min(LEAST_CONTENT)
        layout = (thumbnails - self.layout_centre) @ self.layout_axes / MAX_LAYOUT
        layout = LAYOUT_WEIGHT * layout / layout.norm(dim=1, keepdim=True).clamp_min(1)
        return torch.cat([content, layout], 1) / math.sqrt(1 + LAYOUT_WEIGHT**2)

    def condition(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the part of rows that a prior is conditioned on: the content's main components, and the layout."""
        return torch.cat([rows[..., : min(CONDITION, self.content)], rows[..., self.content :]], -1)

    def with_condition(self, rows: torch.Tensor, conditions: torch.Tensor) -> torch.Tensor:
        """Return rows with other conditions: what `condition` returns of the result."""
        main, changed = min(CONDITION, self.content), rows.clone()
        changed[..., :main], changed[..., self.content :] = conditions[..., :main], conditions[..., main:]
        return changed


def convert(images: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return images [N, C, H, W] with other channels and another size."""
    images = with_channels(images, shape[0])
    if images.shape[2:] == shape[1:]:
        return images
    if images.shape[2] >= shape[1] and images.shape[3] >= shape[2]:
        return functional.adaptive_avg_pool2d(images, shape[1:])
    return functional.interpolate(images, shape[1:], mode="bicubic").clamp(-1, 1)


def with_channels(images: torch.Tensor, channels: int) -> torch.Tensor:
    """Return images [N, C, H, W] with so many channels: the mean of theirs in each, unless there are as many."""
    if images.shape[1] == channels:
        return images
    return images.mean(1, keepdim=True).expand(-1, channels, -1, -1)


def _thumbnails(images: torch.Tensor) -> torch.Tensor:
    """Return small colour images [N, pixels]; a grey image has three equal channels."""
    return functional.adaptive_avg_pool2d(images, THUMBNAIL).expand(-1, 3, -1, -1).flatten(1)


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
