"""Steps per second of DP-LFlow beside the authors' program, at its settings.

Only its reading of data and its pictures are replaced. Both: MNIST, 500 images of a class in a step, the paper's
networks. The authors' program trains one class; a step of ours trains all ten, in whole fits with all releases.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import sfumato as sf
from benchmarks.runner import timed
from benchmarks.speed.authors import Clock, program
from benchmarks.timing import alternating, beside_authors
from sfumato.data import ImageSet

AUTHORS = "github.com/dihjiang/DP-LFlow"
BATCH, STEPS, AUTHORS_STEPS = 500, 300, 6
PAPER = {"code": 20, "width": 32, "couplings": 9, "hidden": 200, "procedural_batches": 0}
OPTIONS = (
    "--dataset mnist --ae_lr 0.01 --nf_lr 0.005 --code_length 20 --ae_h 64 --nf_h 200 --num_blocks 9 --grad_clip 0.1 "
)
OPTIONS += f"--log_step 1000000 --batch_size {BATCH} --noise 1.25 --select 0 --iterations {AUTHORS_STEPS}"


def theirs(options: argparse.Namespace, images: ImageSet) -> float:
    chosen = (images.labels == 0).nonzero()[:5000, 0]
    ready = torch.utils.data.TensorDataset(images.images[chosen].float() / 255, images.labels[chosen])
    clock = Clock(options.device, 1)
    pictures = SimpleNamespace(make_grid=lambda *_, **__: None, save_image=lambda *_, **__: None)
    modules = {
        "datasets": {"set_datasets": lambda *_: (ready, None, None, np.arange(len(ready)))},
        "torchvision": {"utils": pictures},
        "six": {"integer_types": (int,)},  # a package for Python 2
    }
    with program(options.authors.resolve(), OPTIONS, **modules):
        from pyvacy import sampling

        plain = sampling.get_data_loaders
        sampling.get_data_loaders = lambda *args: ((found := plain(*args))[0], clock.listening(found[1], each=False))
        try:
            runpy.run_path(str(options.authors.resolve() / "train_DPAENF_unconditional.py"))
        finally:
            sampling.get_data_loaders = plain
    return clock.per_second()


def ours(images: ImageSet, device: str, constants: Any = None, **params: Any) -> float:
    share = BATCH * len(images.classes) / len(images)
    given = {"epsilon": 10.0, "public_size": True, "device": device, "steps": STEPS, "sampling_prob": share, **params}
    model = sf.create("dp-lflow", **given).with_constants(**(constants or {}))
    return STEPS / timed(lambda: model.fit(images))


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    images = sf.load_images("mnist")
    speeds = alternating(
        {
            "authors": lambda: theirs(options, images),
            "ours": lambda: ours(images, options.device, PAPER, warm="none"),
            "ours, default settings": lambda: ours(images, options.device),
        },
        options.repeats,
    )
    yield from beside_authors("dp-lflow", speeds, options.repeats)
