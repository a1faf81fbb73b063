"""Train an encoder of the package on public images, and write it with its card.

    python -m benchmarks train-encoder small_cifar10 --out sfumato/features/data/small_cifar10.safetensors
    python -m benchmarks train-encoder small_tinyimagenet --folder DATA --out FILE
    python -m benchmarks train-encoder small_random_process --folder DATA --out FILE

DATA is a folder with tiny_imagenet32_train.npz: training and test images of Tiny-ImageNet at 32 pixels. The figures go
to `benchmarks/results/encoders.json`. `small_random_process` learns by contrast from procedural images; its figure is
that of a linear classifier on its features, ridge regression on Tiny-ImageNet.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import sfumato as sf
from benchmarks.runner import about_run, source_of, timed
from benchmarks.store import RESULTS, append
from sfumato.data import ImageSet
from sfumato.evaluate.utility import aligned
from sfumato.features import Perceptual, load_perceptual, save_perceptual
from sfumato.features.train_encoder import train_encoder
from sfumato.methods.parameters import chosen_device
from sfumato.priors.random_process import random_process

TINY = ("tiny_imagenet32_train", "Tiny-ImageNet at 32 pixels")
ENCODERS = {  # data, its title, network, epochs
    "small_cifar10": ("cifar10", "CIFAR-10", "small", 60),
    "small_tinyimagenet": (*TINY, "small", 40),
    "resnet18_tinyimagenet": (*TINY, "resnet18_cifar", 25),
}


PROCEDURAL = "random_process"
PROCEDURAL_IMAGES, SIZE, RIDGE = 400_000, 32, 1e-3
BY_CONTRAST: dict[str, Any] = {"epochs": 12, "batch_size": 1024, "learning_rate": 0.25}
ENCODERS["small_random_process"] = (PROCEDURAL, "procedural images: no data of anybody", "small", BY_CONTRAST["epochs"])


def linear_accuracy(encoder: Perceptual, train: ImageSet, test: ImageSet, device: torch.device) -> float:
    """Return the accuracy in percent of ridge regression on the averaged last activation."""
    assert train.labels is not None
    assert test.labels is not None
    wanted = functional.one_hot(train.labels, len(train.classes)).double().to(device)
    first, second = (_rows(encoder, each, device) for each in (train, test))
    centre = first.mean(0)
    first, second = first - centre, second - centre
    gram = first.T @ first
    gram += RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype, device=device)
    weights = torch.linalg.solve(gram, first.T @ (wanted - wanted.mean(0)))
    seen = (second @ weights + wanted.mean(0)).argmax(1).cpu()
    return round(100 * float((seen == test.labels).float().mean()), 2)


@torch.no_grad()
def _rows(encoder: Perceptual, images: ImageSet, device: torch.device) -> torch.Tensor:
    parts = (part.to(device).float() / 127.5 - 1 for part in images.images.split(1000))
    return torch.cat([encoder(part)[-1].mean((2, 3)).double() for part in parts])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENCODERS)
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, help="default: those of the recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    device = chosen_device(options.device)
    data, title, network, epochs = ENCODERS[options.name]
    epochs = options.epochs or epochs
    command = f"python -m benchmarks train-encoder {options.name}"
    about = {"name": options.name, "trained_on": title, "network": network, "notes": {"command": command}}
    measured: dict[str, object] = {}

    def train() -> None:
        if data == PROCEDURAL:
            images = ImageSet(random_process(PROCEDURAL_IMAGES, SIZE, device=device).images)
            compiled = device.type == "cuda"
            settings = {**BY_CONTRAST, "epochs": epochs, "compile_network": compiled}
            save_perceptual(options.out, *train_encoder(images, device=device, **settings, **about))
            return
        images, test = sets(data, options.folder)
        about["trained_on"] = f"{title}, training images"
        card, state = train_encoder(images, test, device=device, epochs=epochs, **about)
        save_perceptual(options.out, card, state)
        measured.update({key: card.notes[key] for key in ("test_accuracy", "images", "test_images", "classes")})

    seconds = timed(train)
    if data == PROCEDURAL:
        encoder = load_perceptual(options.out, device)
        measured["linear_accuracy, Tiny-ImageNet"] = linear_accuracy(encoder, *sets(TINY[0], options.folder), device)
        measured["images_seen"] = epochs * PROCEDURAL_IMAGES
    row = {
        "job": options.name,
        "method": network,
        "data": data,
        "epsilon": None,
        "params": {"epochs": epochs},
        "seed": 0,
    }
    rows = [{**row, "measured": {**measured, "seconds": round(seconds, 1)}}]
    append("encoders", rows, about_run(command, options), options.results)
    return 0


def sets(data: str, folder: Path) -> tuple[ImageSet, ImageSet]:
    source = source_of(data, folder)
    images = sf.load_images(source, mode="rgb")
    return images, aligned(sf.load_images(source, mode="rgb", split="test"), images)


if __name__ == "__main__":
    main()
