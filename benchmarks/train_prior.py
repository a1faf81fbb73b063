"""Train a prior of the package, and write it with its card and a picture of samples.

    python -m benchmarks train-encoder small_random_process --folder DATA --out WEIGHTS/small_random_process.safetensors
    SFUMATO_WEIGHTS=WEIGHTS python -m benchmarks train-prior random-process --out build/random-process
    python -m benchmarks train-prior tiny-imagenet --folder DATA --out build/tiny-imagenet
    python -m benchmarks train-prior tiny-imagenet --start tiny-imagenet --steps 4400 --folder DATA --out build/more

The first makes the encoder of `random-process`, by contrast, of procedural images. The last one continues the training
of the prior that is in the package. DATA is a folder with
tiny_imagenet32_train.npz: Tiny-ImageNet at 32 pixels (`make-data`). The package holds the file
prior.safetensors of that folder as sfumato/priors/data/NAME.safetensors. The figures go to
`benchmarks/results/priors-training.json`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sfumato as sf
from benchmarks.runner import about_run, timed
from benchmarks.store import append
from sfumato.data import ImageSet
from sfumato.methods.parameters import chosen_device
from sfumato.priors import load_prior, train_prior
from sfumato.priors.denoising import PriorTraining
from sfumato.priors.random_process import random_process

SIZE, PROCEDURAL_IMAGES = 32, 200_000
SETTINGS = {"batch_size": 1024, "learning_rate": 6e-4, "flip": True}


@dataclass(frozen=True)
class Recipe:
    """How a prior of the package is made."""

    trained_on: str
    licence: str
    settings: PriorTraining
    encoder: str = ""


RECIPES = {
    "random-process": Recipe(
        "procedural images of random processes: no data of anybody",
        "Apache-2.0",
        PriorTraining(steps=3000, widths=(96, 192, 192, 192), **SETTINGS),
        "small_random_process",
    ),
    "tiny-imagenet": Recipe(
        "Tiny-ImageNet training images (100,000 photographs, 200 classes) at 32 pixels",
        "research use: Tiny-ImageNet is a subset of ImageNet, whose images are for non-commercial research",
        PriorTraining(steps=14_156, **SETTINGS),
        "effnet_lite0",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DATA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--start", help="a prior, by name or path, whose training is continued")
    parser.add_argument("--steps", type=int, help="default: those of the recipe")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    recipe, device = RECIPES[options.name], chosen_device(options.device)
    settings = replace(recipe.settings, steps=options.steps or recipe.settings.steps)
    start = load_prior(options.start) if options.start else None
    card: dict[str, Any] = {"trained_on": recipe.trained_on, "licence": recipe.licence, "encoder": recipe.encoder}

    def images() -> ImageSet:
        if options.name == "random-process":
            return random_process(PROCEDURAL_IMAGES, SIZE, device=device)
        return sf.load_images(options.folder / "tiny_imagenet32_train.npz", mode="rgb")

    def train() -> None:
        prior = train_prior(
            images(), options.out, name=options.name, start=start, settings=settings, resume=True, device=device, **card
        )
        notes.update(prior.card.notes)

    notes: dict[str, Any] = {}
    seconds = timed(train)
    params = {"steps": settings.steps, **SETTINGS, **({"start": start.sha256} if start else {})}
    row = {"job": options.name, "method": "prior", "data": options.name, "epsilon": None, "params": params, "seed": 0}
    losses = {name: notes[name] for name in ("held_out_loss", "held_out_loss_conditioned")}
    measured = {**losses, "images_seen": notes["images_seen"], "seconds": round(seconds, 1)}
    command = f"python -m benchmarks train-prior {options.name}"
    append("priors-training", [{**row, "measured": measured}], about_run(command, options))
    return 0


if __name__ == "__main__":
    main()
