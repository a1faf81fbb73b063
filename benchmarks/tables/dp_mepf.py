"""DP-MEPF at several budgets: accuracy, a larger encoder, no labels, early stopping.

The larger encoder is resnet18_tinyimagenet.safetensors in $SFUMATO_WEIGHTS (`benchmarks/train_encoder.py`). The paper's
kind of encoder is vgg19_adain.safetensors, or vgg16_lpips.safetensors, there (`benchmarks/vgg_weights.py`). FID needs
the extra `fid`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf
from typing import Any
from unittest import mock

import torch

import sfumato as sf
from benchmarks.measures import Fitted, measure
from benchmarks.runner import Job, jobs, load_sets
from sfumato.data import ImageSet
from sfumato.data.pixels import to_bytes
from sfumato.methods import dp_mepf

PARAMS = {"public_size": True, "secure": False}
LARGE = {**PARAMS, "encoder": "resnet18_tinyimagenet"}
SIMPLE = ("logistic", "mlp", "small_cnn")
SNAPSHOT_IMAGES = 5_000


def unlabelled(images: ImageSet, test: ImageSet) -> tuple[ImageSet, ImageSet]:
    return ImageSet(images.images), ImageSet(test.images)


def early_stopping(job: Job, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the snapshot nearest to the release, the last one, and the best one, which is not private."""
    images, test = load_sets(job, options.folder)
    model = sf.create("dp-mepf", seed=seed, epsilon=job.epsilon, device=options.device, **job.params)
    private, measured = {}, {}

    class Watched(dp_mepf.EarlyStopping):
        def measure(self, training: Any, step: int) -> None:
            super().measure(training, step)
            made: list[torch.Tensor] = []
            while sum(map(len, made)) < SNAPSHOT_IMAGES:
                made.append(to_bytes(training.average_images()).cpu())
            fitted = Fitted(model, *unlabelled(images, test), ImageSet(torch.cat(made)), seed, job.data, options.device)
            measured[step] = measure("fidelity", fitted)["fd_effnet_lite0"]
            private[step] = self.distances[step]

    with mock.patch.object(dp_mepf, "EarlyStopping", Watched):
        model.fit(images)
    nearest, last = min(private, key=lambda step: private[step]), max(measured)
    return {job.name: {"fd_nearest": measured[nearest], "fd_last": measured[last], "fd_best": min(measured.values())}}


JOBS = [
    *jobs("default", "dp-mepf", ["mnist", "fashion-mnist"], [1.0, 10.0, 0.2, inf], params=PARAMS, measures=SIMPLE),
    *jobs("default", "dp-mepf", ["cifar10"], [1.0, 10.0], params=PARAMS, measures=(*SIMPLE, "convnet", "resnet18")),
    *jobs("default", "dp-mepf", ["cifar10"], [0.2, inf], params=PARAMS, measures=SIMPLE),
    *jobs(
        "default", "dp-mepf", ["celeba", "mednist", "celeba64"], [1.0, 10.0, 0.2, inf], params=PARAMS, measures=SIMPLE
    ),
    *jobs("resnet18 encoder", "dp-mepf", ["cifar10"], [1.0], params=LARGE, measures=SIMPLE, seeds=1),
    *jobs(
        "resnet18 encoder",
        "dp-mepf",
        ["cifar10"],
        [10.0],
        params=LARGE,
        measures=(*SIMPLE, "convnet", "resnet18", "resnet9", "resnet9, annealed"),
    ),
    *jobs(
        "vgg19 encoder",
        "dp-mepf",
        ["cifar10"],
        [1.0, 10.0, 0.2],
        params={**PARAMS, "encoder": "vgg19_adain"},
        measures=("small_cnn", "resnet9, annealed", "fidelity", "fid"),
    ),
    *jobs(
        "vgg19 encoder",
        "dp-mepf",
        ["celeba"],
        [1.0, 10.0, 0.2],
        params={**PARAMS, "encoder": "vgg19_adain"},
        measures=("small_cnn", "fidelity", "fid"),
    ),
    *jobs(
        "vgg16 encoder",
        "dp-mepf",
        ["cifar10", "celeba"],
        [1.0, 10.0, 0.2],
        params={**PARAMS, "encoder": "vgg16_lpips"},
        measures=("small_cnn", "fidelity", "fid"),
        seeds=1,
    ),
    *jobs(
        "unlabelled",
        "dp-mepf",
        ["cifar10"],
        [1.0, 10.0, 0.2, inf],
        params=PARAMS,
        measures=("fidelity",),
        prepare=unlabelled,
    ),
    *(
        replace(job, run=early_stopping)
        for job in jobs("early stopping", "dp-mepf", ["cifar10", "celeba"], [0.2, 1.0, 10.0], params=PARAMS, seeds=1)
    ),
]
