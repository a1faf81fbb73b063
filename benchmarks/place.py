"""How much a row, or a clipped gradient, depends on its place in a batch, by rounding: what `PLACE_MARGIN` is for.

    python benchmarks/place.py --json benchmarks/results/place.json

Real images (MNIST) go through the traced graphs that the vault runs, in batches of the sizes that it takes; then again
in other orders. The figure is the largest distance between a row and the same image's row at another place, relative to
the row's norm; for gradients, between clipped gradients of one image that stands at other places among others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sfumato as sf
from sfumato.engine import Performance
from sfumato.methods.seeing import Vectors
from sfumato.nets.random_convnet import draw_networks, embed
from sfumato.nets.unet import UNet
from sfumato.privacy.clipping import clipped_sum
from sfumato.privacy.tracing import per_record, trace

SIZES = {"cpu": (128,), "cuda": (512, 128)}
ORDERS = 5


def rows(feature: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> float:
    """Largest relative distance between an image's rows at different places."""
    with torch.no_grad():
        feature(images[:1])  # it may fill caches
        graph = trace(lambda image: feature(image[None])[0], images[0])
        run = per_record(graph, 0, 1)
        first, worst = run(images).double().flatten(1), 0.0
        for seed in range(ORDERS):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
            apart = (run(images[order]).double().flatten(1) - first[order]).norm(dim=1) / first[order].norm(dim=1)
            worst = max(worst, float(apart.max()))
    return worst


def gradients(model: nn.Module, loss: Any, records: list[torch.Tensor], precision: torch.dtype) -> float:
    """Largest distance between clipped gradients of one record at different places, relative to the bound."""
    found = Performance(precision=precision).differentiate(model, loss, 1.0, None, 1, [part[:3] for part in records])
    state = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    worst = 0.0
    with torch.no_grad():
        graph = trace(found.function, state, *(part[0] for part in records))
        run = per_record(graph, 1, len(records))

        def alone(order: torch.Tensor, place: int) -> torch.Tensor:
            made = run(state, *(part[order] for part in records))
            weights = torch.zeros(1, len(order), device=order.device)
            weights[0, place] = 1
            lanes = torch.utils._pytree.tree_map(lambda part: part[None], made)
            return clipped_sum(lanes, found.groups, weights).double()

        plain = torch.arange(len(records[0]), device=records[0].device)
        for place in (0, 1, 5, len(plain) // 2, len(plain) - 1):
            for other in (0, 3, len(plain) - 1):
                order = plain.clone()
                order[other], order[place] = place, other
                worst = max(worst, float((alone(plain, place) - alone(order, other)).norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = options.device
    found: dict[str, dict[str, float]] = {}
    whole = sf.load_images("mnist")
    assert whole.labels is not None
    generator = torch.Generator(device).manual_seed(0)
    frequencies = torch.randn(4000, 784, generator=generator, device=device) / 28
    networks = [weights[0] for weights in draw_networks(1, (1, 28, 28), generator)]
    vectors = Vectors((1, 28, 28)).to(device)
    for size in SIZES[device]:
        images = whole.images[:size].to(device).float() / 127.5 - 1
        labels = whole.labels[:size].to(device)
        normals = torch.randn(size, 1, 785, generator=generator, device=device)

        def fourier(x: torch.Tensor) -> torch.Tensor:
            phase = x.flatten(1) @ frequencies.T
            return torch.cat([phase.cos(), phase.sin()], 1)

        def score_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            noise, levels = n[:, 1:].view_as(x), n[:, 0].sigmoid()
            return (model(x + levels[:, None, None, None] * noise, levels, y) - noise).square().mean((1, 2, 3))

        def entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x), y, reduction="none")

        linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(device)
        convolutions = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1, 1), nn.GroupNorm(8, 64), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 14 * 14, 10)),
        ).to(device)
        unet = UNet(1, 10).to(device)
        row = {
            "Fourier features": rows(fourier, images),
            "scattering": rows(vectors, images),
            "random ConvNet (ndpdc)": rows(lambda x: embed(x, networks), images),
            "gradient, linear": gradients(linear, entropy, [images, labels], torch.float32),
            "gradient, convolutions": gradients(convolutions, entropy, [images, labels], torch.float32),
            "gradient, U-Net": gradients(unet, score_loss, [images, labels, normals], torch.float32),
        }
        if device == "cuda":
            row["gradient, U-Net, bf16"] = gradients(unet, score_loss, [images, labels, normals], torch.bfloat16)
        found[f"batches of {size}"] = row
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    content = {"command": "python benchmarks/place.py", "device": name, "torch": torch.__version__, "largest": found}
    print(json.dumps(content, indent=1))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
