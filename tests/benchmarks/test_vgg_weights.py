"""Converted VGG weights compute what the original networks compute."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from benchmarks.vgg_weights import from_normalised, from_npz
from sfumato.features.perceptual import Perceptual
from sfumato.features.vgg import STAGES, VGG, WIDTHS


def convolutions(depth: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    widths = [3, *(width for count, width in zip(STAGES[depth], WIDTHS, strict=True) for _ in range(count))]
    shapes = [(after, before, 3, 3) for before, after in pairwise(widths)]
    return [(torch.randn(s, generator=generator) / (9 * s[1]) ** 0.5, torch.zeros(s[0])) for s in shapes]


def test_the_colour_layer_is_folded() -> None:
    """Swapped and shifted colours, then VGG-19 with zero padding: the first two activations agree everywhere."""
    colours = torch.tensor([[0.0, 0.0, 255.0], [0.0, 255.0, 0.0], [255.0, 0.0, 0.0]])
    shift = torch.tensor([-103.939, -116.779, -123.68])
    layers = convolutions(19)
    state = {"0.weight": colours[:, :, None, None], "0.bias": shift}
    for number, (weight, bias) in enumerate(layers):
        state |= {f"{2 + 3 * number}.weight": weight, f"{2 + 3 * number}.bias": bias}
    card, found = from_normalised(state)
    network = VGG(19)
    network.load_state_dict(found)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    ours = Perceptual(card, network)(2 * images - 1)
    y = torch.einsum("dc,nchw->ndhw", colours, images) + shift[:, None, None]
    for number, (weight, bias) in enumerate(layers[:2]):
        y = functional.conv2d(y, weight, bias, padding=1).relu()
        torch.testing.assert_close(ours[number], y, rtol=1e-4, atol=1e-2)
    assert len(ours) == 16


def test_arrays_are_named_in_order() -> None:
    layers = convolutions(16)
    arrays = {
        f"VGG16_0.Conv_{n}.{part}": v.numpy()
        for n, pair in enumerate(layers)
        for part, v in zip(("kernel", "bias"), pair, strict=True)
    }
    card, state = from_npz({**arrays, "NetLinLayer_0.Conv_0.kernel": np.zeros(1)})
    VGG(16).load_state_dict(state)
    assert card.network == "vgg16"
    assert torch.equal(state["features.28.weight"], layers[-1][0])
