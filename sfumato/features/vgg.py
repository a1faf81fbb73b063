"""VGG-11, 13, 16 and 19 (Simonyan and Zisserman 2015), with and without batch norm, down to the last convolution.

Names and shapes match torchvision's, so its weight files load without conversion. The three dense layers (124 million
parameters) are omitted: no activation depends on them, and `load_weights` skips them.
"""

from __future__ import annotations

import torch
from torch import nn

from sfumato.features.batch_norm_folding import ActivationHook, fold_batch_norm, no_hook

STAGES = {  # depth: convolutions per stage; 2×2 max pooling between stages
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
WIDTHS = (64, 128, 256, 512, 512)
MIN_SIDE = 16  # pixels: four poolings


class VGG(nn.Module):
    """The convolutional part of VGG, with torchvision's layer numbers: `features.0`, `features.2`, …"""

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
        self.features = nn.Sequential(*layers[:-1])  # no activation follows the last pooling

    def trunk(self, x: torch.Tensor, hook: ActivationHook = no_hook) -> torch.Tensor:
        """Return the last activation; call `hook` with the output of every ReLU."""
        if min(x.shape[2:]) < MIN_SIDE:
            raise ValueError(f"VGG needs images of at least {MIN_SIDE} pixels per side, got {tuple(x.shape[2:])}")
        for layer in self.features:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                hook(x)
        return x

    def fold(self) -> None:
        """Fold every batch norm into its convolution, for inference."""
        for index in range(1, len(self.features)):
            fold_batch_norm(self.features, str(index - 1), str(index))
