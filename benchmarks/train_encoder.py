"""Train an encoder of our own on public images, and write it with its card.

    python benchmarks/train_encoder.py --data cifar10 --network small --epochs 60 \\
        --out sfumato/encoders/data/small_cifar10.safetensors --json benchmarks/results/small_cifar10.json
    python benchmarks/train_encoder.py --data tiny_imagenet32_train.parquet --network small --epochs 40 \\
        --out sfumato/encoders/data/small_tinyimagenet.safetensors --json benchmarks/results/small_tinyimagenet.json

An ordinary classifier: SGD with Nesterov momentum, one cycle of the rate, smoothed labels, images shifted, mirrored and
with a square cut out, an exponential average of the weights. All images stay on the device as bytes, and the random
choices of an epoch are drawn at once. Epochs are fixed beforehand; the test images are looked at once, at the end, with
the weights as they are written. For a Parquet file `…train….parquet` the test images are `…val….parquet` beside it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.encoders import PerceptualCard, save_perceptual
from sfumato.encoders.resnet import resnet18_cifar, small
from sfumato.encoders.weights import half
from sfumato.evaluate.classifiers import aligned

NETWORKS = {"small": ("small", small), "resnet18": ("resnet18_cifar", resnet18_cifar)}
TITLES = {"cifar10": "CIFAR-10", "tiny_imagenet32_train": "Tiny-ImageNet at 32 pixels"}
MOMENTUM, WEIGHT_DECAY, SMOOTHING = 0.9, 5e-4, 0.1
WARM_UP = 0.25  # part of the steps in which the rate rises
SCORING_BATCH = 1000

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def load(data: str, test: str | None, limit: int | None, seed: int) -> tuple[ImageSet, ImageSet]:
    path = Path(data)
    if path.suffix and not test:
        test = str(path.with_name(path.name.replace("train", "val")))
        if test == data:
            raise SystemExit(f"{data}: say with --test which images to test on")
    images = sf.load_images(data, mode="rgb")
    held_out = aligned(sf.load_images(test or data, mode="rgb", split="test"), images)
    generator = torch.Generator().manual_seed(seed)
    some = [part.subset(torch.randperm(len(part), generator=generator)[:limit]) for part in (images, held_out)]
    return some[0], some[1]


def colours(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel, pixels being in [0, 1], to four digits."""
    pixels = images.flatten(2).transpose(0, 1).flatten(1)
    parts = [(part.double().sum(1), part.double().square().sum(1)) for part in pixels.split(1 << 24, 1)]
    first, second = (sum(part) / pixels.shape[1] / 255**power for power, part in enumerate(zip(*parts, strict=True), 1))
    return first.float().round(decimals=4), (second - first.square()).sqrt().float().round(decimals=4)


def reflected(places: torch.Tensor, length: int) -> torch.Tensor:
    """Places outside of 0 … length - 1, mirrored back at the border."""
    return length - 1 - (length - 1 - places.abs()).abs()


def epoch(
    images: torch.Tensor, labels: torch.Tensor, size: int, shift: int, cut: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Batches of bytes [B, 3, H, W] in channels-last order, of the pixels to hide [B, 1, H, W], and of labels.

    `images` are [N, H, W, 3]. What does not fill a batch waits for another epoch.
    """
    count, device = len(images), images.device

    def drawn(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count, 1), generator=generator, device=device)

    order = torch.randperm(count, generator=generator, device=device)
    places, hidden = [], []
    for length in images.shape[1:3]:
        axis = torch.arange(length, device=device)
        places.append(reflected(axis + drawn(-shift, shift + 1), length))
        from_corner = axis - drawn(0, length) + cut // 2
        hidden.append((from_corner >= 0) & (from_corner < cut))
    rows, columns = places
    columns = torch.where(drawn(0, 2) == 1, columns.flip(1), columns)
    for start in range(0, count - size + 1, size):
        part = slice(start, start + size)
        index = order[part]
        pixels = images[index[:, None, None], rows[part, :, None], columns[part, None, :]]
        cut_out = hidden[0][part, None, :, None] & hidden[1][part, None, None, :]
        yield pixels.permute(0, 3, 1, 2), cut_out, labels[index]


def train(network: nn.Module, images: ImageSet, gain: torch.Tensor, bias: torch.Tensor, options: Any) -> nn.Module:
    """Train for `options.epochs`; gives the average of the weights, over an epoch's worth of steps."""
    device = torch.device(options.device)
    assert images.labels is not None
    pixels, labels = images.images.to(device).permute(0, 2, 3, 1).contiguous(), images.labels.to(device)
    size = min(options.batch_size, len(images))
    steps = len(images) // size
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None  # a counter that nobody reads, and a launch for each
    average = copy.deepcopy(network).requires_grad_(False)
    forward = torch.compile(network) if options.compile else network
    grouped: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in network.parameters():
        grouped[parameter.ndim > 1].append(parameter)
    optimizer = torch.optim.SGD(
        [{"params": grouped[True], "weight_decay": WEIGHT_DECAY}, {"params": grouped[False]}],
        options.rate * size / 512,
        momentum=MOMENTUM,
        nesterov=True,
        fused=device.type == "cuda",
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, total_steps=options.epochs * steps, pct_start=WARM_UP, cycle_momentum=False
    )
    generator = torch.Generator(device).manual_seed(options.seed)
    started = time.perf_counter()
    for number in range(1, options.epochs + 1):
        losses = torch.zeros((), device=device)
        for batch, hidden, truth in epoch(pixels, labels, size, options.shift, options.cut, generator):
            x = (batch * gain + bias).masked_fill(hidden, 0)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = functional.cross_entropy(forward(x), truth, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            update(average, network, 1 / min(steps, schedule.last_epoch))
            losses += loss.detach()
        done = time.perf_counter() - started  # after the loss is known: launches run ahead of the device
        print(f"epoch {number}/{options.epochs}  loss {losses.item() / steps:.3f}  {done:.0f} s", flush=True)
    return average


@torch.no_grad()
def update(average: nn.Module, network: nn.Module, weight: float) -> None:
    """Move weights and statistics towards the network's: one launch, and no waiting for the device."""
    kept, new = ([*module.parameters(), *module.buffers()] for module in (average, network))
    torch._foreach_lerp_(kept, new, weight)


@torch.no_grad()
def accuracy(network: nn.Module, images: ImageSet, gain: torch.Tensor, bias: torch.Tensor) -> float:
    """In percent."""
    assert images.labels is not None
    right = 0
    for batch, truth in zip(images.images.split(SCORING_BATCH), images.labels.split(SCORING_BATCH), strict=True):
        x = (batch.to(gain.device) * gain + bias).contiguous(memory_format=torch.channels_last)
        right += int((network(x).argmax(1).cpu() == truth).sum())
    return 100 * right / len(images)


def command(arguments: list[str]) -> str:
    """As it was given, without the folders of this machine."""
    return " ".join(["python benchmarks/train_encoder.py", *(Path(argument).name for argument in arguments)])


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a named set, or a file of images with labels")
    parser.add_argument("--test", help="the test images, if they are another file")
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.4, help="highest learning rate, for a batch of 512")
    parser.add_argument("--shift", type=int, default=4, help="pixels, at most")
    parser.add_argument("--cut", type=int, default=8, help="side of the square that is cut out, in pixels; 0 for none")
    parser.add_argument("--limit", type=int, help="take so many images only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--licence", default="Apache-2.0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    started = time.perf_counter()
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    images, test = load(options.data, options.test, options.limit, options.seed)
    mean, std = colours(images.images)
    gain, bias = (value.view(1, 3, 1, 1).to(options.device) for value in (1 / (255 * std), -mean / std))
    key, build = NETWORKS[options.network]
    network = build(len(images.classes)).to(options.device, memory_format=torch.channels_last)
    print(f"{len(images)} images of {len(images.classes)} classes, {time.perf_counter() - started:.0f} s", flush=True)

    began = time.perf_counter()
    trained = train(network, images, gain, bias, options).eval()
    seconds = time.perf_counter() - began
    trained.load_state_dict(half(trained.state_dict()), strict=False)  # scored as written; steps are not counted
    source = Path(options.data).stem
    notes = {
        "test_accuracy": round(accuracy(trained, test, gain, bias), 2),
        "images": len(images),
        "test_images": len(test),
        "classes": len(images.classes),
        "epochs": options.epochs,
        "command": command(arguments),
    }
    card = PerceptualCard(
        name=options.out.stem,
        network=key,
        trained_on=f"{TITLES.get(source, source)}, training images",
        licence=options.licence,
        mean=tuple(round(float(value), 4) for value in mean),
        std=tuple(round(float(value), 4) for value in std),
        notes=notes,
    )
    save_perceptual(options.out, card, trained.state_dict())
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    result = {"name": card.name, "network": key, **notes, "seconds": round(seconds, 1), "device": device}
    print(json.dumps(result), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
