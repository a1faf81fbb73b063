"""Train an encoder of the package on public images, and write it with its card.

    python -m benchmarks train-encoder small_cifar10 --out sfumato/features/data/small_cifar10.safetensors
    python -m benchmarks train-encoder small_tinyimagenet --folder DATA --out FILE

DATA is a folder with tiny_imagenet32_train.npz: training and test images of Tiny-ImageNet at 32 pixels. The figures go
to `benchmarks/results/encoders.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sfumato as sf
from benchmarks.runner import about_run, timed
from benchmarks.store import append
from sfumato.evaluate.utility import aligned
from sfumato.features import save_perceptual
from sfumato.features.train_encoder import train_encoder
from sfumato.methods.parameters import chosen_device

TINY = ("tiny_imagenet32_train", "Tiny-ImageNet at 32 pixels")
ENCODERS = {  # data, its title, network, epochs
    "small_cifar10": ("cifar10", "CIFAR-10", "small", 60),
    "small_tinyimagenet": (*TINY, "small", 40),
    "resnet18_tinyimagenet": (*TINY, "resnet18_cifar", 25),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENCODERS)
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    data, title, network, epochs = ENCODERS[options.name]
    source = str(options.folder / f"{data}.npz") if (options.folder / f"{data}.npz").exists() else data
    images = sf.load_images(source, mode="rgb")
    test = aligned(sf.load_images(source, mode="rgb", split="test"), images)
    command = f"python -m benchmarks train-encoder {options.name}"
    about = {"name": options.name, "trained_on": f"{title}, training images", "network": network, "epochs": epochs}

    def train() -> None:
        device = chosen_device(options.device)
        card, state = train_encoder(images, test, device=device, notes={"command": command}, **about)
        save_perceptual(options.out, card, state)
        notes.update(card.notes)

    notes: dict[str, object] = {}
    seconds = timed(train)
    measured = {key: notes[key] for key in ("test_accuracy", "images", "test_images", "classes")}
    row = {
        "job": options.name,
        "method": network,
        "data": data,
        "epsilon": None,
        "params": {"epochs": epochs},
        "seed": 0,
    }
    append("encoders", [{**row, "measured": {**measured, "seconds": round(seconds, 1)}}], about_run(command, options))
    return 0


if __name__ == "__main__":
    main()
