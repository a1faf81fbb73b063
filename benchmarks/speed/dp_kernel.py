"""Steps per second of DP-kernel beside the authors' program, at its settings.

Only its reading of data is replaced, by one that has the images ready as tensors. Both: MNIST at 32 pixels, batches of
60, Gaussian kernels on pixels, the paper's generator. Ours are whole fits with all releases.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator
from typing import Any

import torch

import sfumato as sf
from benchmarks.runner import timed
from benchmarks.speed.authors import Clock, program
from benchmarks.timing import alternating, beside_authors
from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import PainterSettings

AUTHORS = "github.com/dihjiang/DP-kernel"
STEPS, WARM_UP = 300, 50
OPTIONS = f"--dataset mnist --max_iter {STEPS} --vis_step 1000000 --sigma_list 1 2 4 8 16 --noise 0.6 --experiment ."
PAPER = GeneratorSizes("mmd-gan", latent=10, hidden=10, width=64)
PIXELS = PainterSettings(scattering_share=0.0, features=500)


def theirs(options: argparse.Namespace, images: ImageSet) -> float:
    ready = torch.utils.data.TensorDataset(to_unit_range(images.images), images.labels)
    clock = Clock(options.device, WARM_UP)
    pictures = {"torchvision": {}, "torchvision.utils": {}}  # they only write pictures
    with program(options.authors.resolve(), OPTIONS, datasets={"set_datasets": lambda *_: (ready, None)}, **pictures):
        from pyvacy import sampling

        plain = sampling.get_data_loaders
        sampling.get_data_loaders = lambda *args: (clock.listening((found := plain(*args))[0], each=True), found[1])
        try:
            runpy.run_path(str(options.authors.resolve() / "DPCondmmdG_kernel_prod.py"))
        finally:
            sampling.get_data_loaders = plain
    return clock.per_second()


def ours(
    images: ImageSet, steps: int, device: str, method: str = "dp-kernel", constants: Any = None, **params: Any
) -> float:
    model = sf.create(method, epsilon=10.0, steps=steps, public_size=True, device=device, **params)
    model.with_constants(**(constants or {}))
    return steps / timed(lambda: model.fit(images))


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    large, plain, device = sf.load_images("mnist", size=32), sf.load_images("mnist"), options.device
    constants = {"generator": PAPER, "painter": PIXELS}
    published = {"method": "dp-kernel-as-published", "constants": {"generator": PAPER}}
    speeds = alternating(
        {
            "authors": lambda: theirs(options, large),
            "ours": lambda: ours(large, 10 * STEPS, device, constants=constants, batch_size=60),
            "ours, as published": lambda: ours(large, 3 * STEPS, device, **published),
            "ours, default settings": lambda: ours(plain, 2000, device),
        },
        options.repeats,
    )
    yield from beside_authors("dp-kernel", speeds, options.repeats)
