"""Iterations per second of NDPDC beside the authors' program, at the paper's settings.

Only its reading of data and of the GPU's number is replaced. Both: MNIST, 50 images per class, samples of 50, clipping
norm and noise multiplier 1, augmentation. Ours goes through the vault. The iterations after a warm-up count. Their
program needs torchvision.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import sfumato as sf
from benchmarks.speed.authors import Clock, program
from benchmarks.timing import alternating, beside_authors
from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.methods.condensation import Matcher

AUTHORS = "github.com/SecMLSys/Differentially-Private-Dataset-Condensation"
ITERATIONS = 60  # of the authors' program; ours takes twenty times as many
STRIDE, WARM_UP = 10, 2  # the authors print the time every ten iterations
OPTIONS = f"--ipc 50 --num_exp 1 --epoch_eval_train 0 --eval_mode none --init noise --Iteration {ITERATIONS} "
OPTIONS += "--dsa_strategy color_crop_cutout_scale_rotate --save_path . --data_path ."


def theirs(options: argparse.Namespace, images: ImageSet) -> float:
    clock = Clock(options.device, WARM_UP + 1, STRIDE)  # the first tick is that training begins
    with program(options.authors.resolve(), OPTIONS, setGPU={}):
        main, utils = importlib.import_module("main_dpdc"), importlib.import_module("utils")
        pixels, (channels, *size) = to_unit_range(images.images), images.shape
        few = torch.utils.data.DataLoader(utils.TensorDataset(pixels[:100], images.labels[:100]), batch_size=100)
        about = (channels, tuple(size), len(images.classes), images.classes, [0.5] * channels, [0.5] * channels)
        main.get_dataset = lambda *_: (*about, utils.TensorDataset(pixels, images.labels), None, few)
        main.get_time = clock.tick
        main.main()
    return clock.per_second()


def ours(options: argparse.Namespace, images: ImageSet, **params: Any) -> float:
    clock, plain, done = Clock(options.device, WARM_UP, STRIDE), Matcher.step, [0]

    def step(self: Matcher, *args: Any) -> None:
        plain(self, *args)
        done[0] += 1
        if done[0] % STRIDE == 0:
            clock.tick()

    given = {"epsilon": 1000.0, "public_size": True, "group_size": 50, "noise_multiplier": 1.0, **params}
    model = sf.create("ndpdc", iterations=20 * ITERATIONS, device=options.device, **given)
    with mock.patch.object(Matcher, "step", step):
        model.fit(images)
    return clock.per_second()


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    images = sf.load_images("mnist")
    speeds = alternating(
        {
            "authors": lambda: theirs(options, images),
            "ours": lambda: ours(options, images, preset="paper"),
            "ours, default settings": lambda: ours(options, images),
        },
        options.repeats,
    )
    yield from beside_authors("ndpdc", speeds, options.repeats)
