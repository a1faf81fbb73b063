"""Programs of other authors on our protocol: their images, our data sets, classifiers and distances.

    python -m benchmarks peers --authors FOLDER --folder DATA

FOLDER holds clones by the names of their repositories. Programs run as they are, at their authors' settings; replaced
are the reading of data (the same images) and what follows the images (their own evaluation, plots).

- DP-MERF (github.com/ParkLabML/DP-MERF, `code_balanced/mnist_sr_gen.py`): five epochs, 10,000 features, noise 25 and 5
  for ε = 0.2 and 1, as its README says; sensitivity 2 / n, so that one image may be replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch

from benchmarks.runner import Job, jobs
from benchmarks.speed.authors import program
from sfumato.data import ImageSet
from sfumato.methods.parameters import chosen_device

MEASURES = ("small_cnn", "convnet", "resnet18", "fidelity", "fid")
NOISE = {0.2: 25.0, 1.0: 5.0}
NAMES = {"mnist": "digits", "fashion-mnist": "fashion"}  # data sets, as DP-MERF calls them
UNUSED = ("torchvision", "torchvision.datasets", "torchvision.transforms", "xgboost")
UNUSED += ("matplotlib", "matplotlib.pyplot", "matplotlib.cm", "matplotlib.colors")


class Batches(list[tuple[torch.Tensor, torch.Tensor]]):
    """What their program takes from a data loader."""

    batch_size: int

    def __init__(self, images: ImageSet, batch_size: int, device: torch.device) -> None:
        assert images.labels is not None
        pixels = images.images.to(device).float() / 255
        super().__init__(zip(pixels.split(batch_size), images.labels.to(device).split(batch_size), strict=True))
        self.batch_size = batch_size


def dp_merf(job: Job, seed: int, options: argparse.Namespace, train: ImageSet, _: ImageSet) -> ImageSet:
    if options.authors is None:
        raise SystemExit("pass --authors FOLDER, which holds a clone named DP-MERF")
    device = chosen_device(options.device)
    arguments = f"--data {NAMES[job.data]} --noise-factor {NOISE[job.epsilon or 0]} --seed {seed} --log-dir ./"
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(program(options.authors.resolve() / "DP-MERF" / "code_balanced", arguments))
        fakes = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in UNUSED}
        with patch.dict(sys.modules, fakes):
            main: Any = importlib.import_module("mnist_sr_gen")

        def loaders(size: int, *_: Any, **__: Any) -> tuple[Batches, None]:
            return Batches(train, size, device), None

        for name, value in (("get_mnist_dataloaders", loaders), ("test", MagicMock())):
            stack.enter_context(patch.object(main, name, value))
        for name in ("test_gen_data", "log_final_score"):
            stack.enter_context(patch.object(main, name))
        main.main()
        with np.load(scratch / "synthetic_mnist.npz") as held:
            pixels, labels = held["data"].reshape(-1, 1, 28, 28), held["labels"].reshape(-1)
    drawn = torch.from_numpy(pixels).mul(255).round().clamp(0, 255).byte()
    return ImageSet(drawn, torch.from_numpy(labels), train.classes)


JOBS = jobs("DP-MERF", None, list(NAMES), list(NOISE), draw=dp_merf, measures=MEASURES)
