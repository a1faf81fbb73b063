"""VGG-11, 13, 16 and 19 (Simonyan and Zisserman 2015), with and without batch norm, down to the last convolution.

Names and shapes are torchvision's, so that its weight files load as they are. The three dense layers behind the
convolutions, 124 million parameters, have no part in activations: they are not built, and left out when a file is read.
"""

from __future__ import annotations

import torch
from torch import nn

from .layers import Keep, fold, forget

STAGES = {  # depth: convolutions of each stage, a pool by 2 between them
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
WIDTHS = (64, 128, 256, 512, 512)
LEAST_SIDE = 16  # four pools


class VGG(nn.Module):
    """The convolutions of VGG, numbered as in torchvision: `features.0`, `features.2`, …"""

    def __init__(self, depth: int, norms: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for convolutions, width in zip(STAGES[depth], WIDTHS, strict=True):
            for _ in range(convolutions):
                layers += [
                    nn.Conv2d(inputs, width, 3, padding=1),
                    *([nn.BatchNorm2d(width)] if norms else []),
                    nn.ReLU(),
                ]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers[:-1])  # behind the last pool there is nothing left to see

    def trunk(self, x: torch.Tensor, keep: Keep = forget) -> torch.Tensor:
        """The last activation; `keep` is handed the outcome of every ReLU."""
        if min(x.shape[2:]) < LEAST_SIDE:
            raise ValueError(f"VGG needs images of at least {LEAST_SIDE} pixels a side, got {tuple(x.shape[2:])}")
        for layer in self.features:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                keep(x)
        return x

    def fold(self) -> None:
        """Put every batch norm into its convolution; afterwards the network is for inference only."""
        for place in range(1, len(self.features)):
            fold(self.features, str(place - 1), str(place))
