"""A small conditional generator, quick on two cores."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

ACROSS = 8  # the first map is at most this many pixels across


class Generator(nn.Module):
    """Latent vectors and labels to images in [-1, 1].

    A linear entry for each class, a shared linear layer to a small map, transposed convolutions that double it until
    it covers the image, a binomial blur (pixels of images are smooth; noise in a target is not), tanh.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, latent: int = 64, hidden: int = 256, width: int = 32
    ) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        self.latent = latent
        self.entry = nn.Parameter(torch.randn(classes, latent, hidden) / math.sqrt(latent))
        self.bias = nn.Parameter(torch.randn(classes, hidden) / 2)
        doublings = max(1, math.ceil(math.log2(max(self.height, self.width) / ACROSS)))
        base = (math.ceil(self.height / 2**doublings), math.ceil(self.width / 2**doublings))
        layers: list[nn.Module] = [
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, width * base[0] * base[1]),
            nn.BatchNorm1d(width * base[0] * base[1]),
            nn.ReLU(),
            nn.Unflatten(1, (width, *base)),
        ]
        for doubling in range(doublings):
            last = doubling == doublings - 1
            narrower = channels if last else max(8, width // 2)
            layers.append(nn.ConvTranspose2d(width, narrower, 4, 2, 1))
            layers += [] if last else [nn.BatchNorm2d(narrower), nn.ReLU()]
            width = narrower
        self.trunk = nn.Sequential(*layers)
        self.register_buffer("blur_rows", _blur(self.height), persistent=False)
        self.register_buffer("blur_columns", _blur(self.width), persistent=False)

    def forward(self, latent: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`latent` [N, latent] and `labels` [N] to images [N, C, H, W]."""
        member = functional.one_hot(labels, len(self.entry)).to(latent.dtype)
        # One product for all classes: the latent vector stands in the block of its class.
        blocks = (member[:, :, None] * latent[:, None, :]).flatten(1)
        images = self.trunk(blocks @ self.entry.flatten(0, 1) + member @ self.bias)
        images = images[:, :, : self.height, : self.width]
        return torch.tanh(self.get_buffer("blur_rows") @ images @ self.get_buffer("blur_columns").T)


def refresh_batch_norm(network: nn.Module) -> None:
    """Makes batch norms forget their statistics and average those of the batches to come alike."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None


def _blur(size: int) -> torch.Tensor:
    """The binomial filter (1, 2, 1) / 4 as a matrix whose rows sum to one at the border too."""
    side = torch.ones(size - 1) / 2
    matrix = torch.eye(size) + torch.diag(side, 1) + torch.diag(side, -1)
    return matrix / matrix.sum(1, keepdim=True)
