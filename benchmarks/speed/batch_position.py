"""How much a row, or a clipped gradient, depends on its position in a batch, by rounding.

MNIST images go through the traced graphs that the vault runs, in several orders. Rows: largest distance between a row
and the same image's row at another position, relative to its norm. Gradients: the same for clipped gradients, in
clipping norms, at initial weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import sfumato as sf
from benchmarks.speed.gradients import score_loss
from sfumato.data.pixels import to_unit_range
from sfumato.engine import Performance
from sfumato.features.unit_norm import CNNFeatures, ScatteringAndPixels
from sfumato.nets.random_convnet import draw_networks, embed
from sfumato.nets.stacked import unstack
from sfumato.nets.unet import UNet
from sfumato.privacy.clipping import clipped_sum
from sfumato.privacy.tracing import per_record, trace

BATCH_SIZES = {"cpu": (128,), "cuda": (512, 128)}
ORDERS = 5


@torch.no_grad()
def row_difference(feature: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> float:
    feature(images[:1])  # it may fill caches
    apply = per_record(trace(lambda image: feature(image[None])[0], images[0]), 0, 1)
    first, largest = apply(images).double().flatten(1), 0.0
    for seed in range(ORDERS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
        apart = (apply(images[order]).double().flatten(1) - first[order]).norm(dim=1) / first[order].norm(dim=1)
        largest = max(largest, float(apart.max()))
    return largest


def gradient_difference(
    model: nn.Module,
    loss: Any,
    records: list[torch.Tensor],
    precision: torch.dtype,
    bound: float | dict[str, float] = 1.0,
) -> float:
    probes = [part[:3] for part in records]
    found = Performance(precision=precision).differentiate(model, loss, bound, None, 1, probes)
    state = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    largest = 0.0
    with torch.no_grad():
        apply = per_record(trace(found.function, state, *(part[0] for part in records)), 1, len(records))

        def alone(order: torch.Tensor, position: int) -> torch.Tensor:
            made = apply(state, *(part[order] for part in records))
            weights = torch.zeros(1, len(order), device=order.device)
            weights[0, position] = 1
            lanes = torch.utils._pytree.tree_map(lambda part: part[None], made)
            return clipped_sum(lanes, found.groups, weights).double()

        plain = torch.arange(len(records[0]), device=records[0].device)
        for position in (0, 1, 5, len(plain) // 2, len(plain) - 1):
            for other in (0, 3, len(plain) - 1):
                order = plain.clone()
                order[other], order[position] = position, other
                largest = max(largest, float((alone(plain, position) - alone(order, other)).norm()))
    return largest


def cross_entropy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, whole = options.device, sf.load_images("mnist")
    generator = torch.Generator(device).manual_seed(0)
    frequencies = torch.randn(4000, 784, generator=generator, device=device) / 28
    networks = [weights[0] for weights in draw_networks(1, (1, 28, 28), generator)]
    scattering, unet = ScatteringAndPixels((1, 28, 28)).to(device), UNet(1, 10).to(device)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(device)
    layers = [nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1, 1), nn.GroupNorm(8, 64), nn.ReLU()]
    encoder = sf.create("dp-mepf", encoder="small_tinyimagenet", device=device)._embedding(whole.public())
    others = to_unit_range(whole.images[2000:6000].to(device))  # in the place of generated images
    cnn = CNNFeatures(others, whole.labels[2000:6000].to(device), 10, generator)
    lflow = sf.create("dp-lflow", device=device)
    latent_flow = unstack(lflow._new_network(whole.public()), 0)
    convolutions = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 14 * 14, 10)).to(device)

    def fourier(x: torch.Tensor) -> torch.Tensor:
        phase = x.flatten(1) @ frequencies.T
        return torch.cat([phase.cos(), phase.sin()], 1)

    for size in BATCH_SIZES[device]:
        images, labels = to_unit_range(whole.images[:size].to(device)), whole.labels[:size].to(device)
        noisy = [images, labels, torch.randn(size, 1, 785, generator=generator, device=device)]
        jittered = [images, torch.randn(size, 1, lflow.code, generator=generator, device=device)]
        both = {"autoencoder": 1.0, "flow": 1.0}
        found = {
            "Fourier features": row_difference(fourier, images),
            "scattering": row_difference(scattering, images),
            "random ConvNet (ndpdc)": row_difference(lambda x: embed(x, networks), images),
            "perceptual encoder (dp-mepf), all layers": row_difference(
                lambda x: encoder.rows(x, range(1, 3), pooled=False), images
            ),
            "perceptual encoder (dp-mepf), pooled": row_difference(lambda x: encoder.pooled(x, range(1, 3)), images),
            "CNN features (teacher)": row_difference(cnn, images),
            "gradient, linear": gradient_difference(linear, cross_entropy, [images, labels], torch.float32),
            "gradient, convolutions": gradient_difference(convolutions, cross_entropy, [images, labels], torch.float32),
            "gradient, U-Net": gradient_difference(unet, score_loss, noisy, torch.float32),
            "gradient, dp-lflow": gradient_difference(latent_flow, lflow._loss, jittered, torch.float32, both),
        }
        if device == "cuda":
            found["gradient, U-Net, bf16"] = gradient_difference(unet, score_loss, noisy, torch.bfloat16)
        for job, value in found.items():
            yield {"job": job, "batch_size": size, "measured": {"largest_difference": value}}
