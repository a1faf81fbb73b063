"""Generator steps per second of DP-MEPF beside the authors' program, at its settings.

Its `main` runs up to the last step that counts. Replaced are reading of data (batches on the device), the download of
VGG-19 (the same random weights as ours), and modules for logging, accounting and evaluation, which the loop does not
call. Both: 10,000 random images of 32 pixels with ten labels, all activations of VGG-19, two moments, the paper's
generator and moving average, 12 images of each class in a step; no early stopping. `ours, float32` computes as theirs
does; `ours` in bfloat16. `images_per_second` is that of the pass over the private images, noise included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

import sfumato as sf
from benchmarks.speed.authors import program
from benchmarks.timing import beside_authors, wait
from sfumato.data import ImageSet
from sfumato.features import load_perceptual
from sfumato.features.perceptual import ENCODER_NETWORKS, PerceptualCard, save_perceptual
from sfumato.features.vgg import VGG
from sfumato.features.weights import read_state
from sfumato.methods import dp_mepf
from sfumato.methods.generator_method import GeneratorSizes, GeneratorTraining
from sfumato.privacy import Vault

AUTHORS = "github.com/ParkLabML/DP-MEPF"
WARM_UP, LAST = 20, 140  # the steps between them count
IMAGES, EACH, CLASSES = 10_000, 12, 10
PAPER = {"preset": "paper", "batch_size": EACH * CLASSES}
GENERATOR = {"generator": GeneratorSizes("mepf", 90, 500, 64)}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNUSED = ("colorlog", "filelock", "pandas", "torch.utils.tensorboard", "dp_analysis", "eval_accuracy", "eval_fid")
UNUSED += ("eval_prdc", "mnist_synth_data_benchmark", "torchvision", "torchvision.datasets", "torchvision.models")
UNUSED += ("torchvision.transforms",)
OPTIONS = f"--dataset cifar10 --labeled --batch_size {EACH * CLASSES} --seed 1 --dp_noise 10 --dp_val_noise 100 "
OPTIONS += "--val_enc vgg19 --extra_input_scaling imagenet_norm --lr 1e-3 --m_avg_lr 1e-4 --no_io_files "
OPTIONS += "--no_tensorboard --log_dir ."


class Finished(Exception):
    """The last step that counts is done."""


@dataclass
class Run:
    """Count the steps and time the private pass of one run."""

    device: str
    steps: int = 0
    marks: list[float] = field(default_factory=list)
    pass_seconds: float = 0.0

    def step(self) -> bool:
        """Count the beginning of a step; return whether it was the last that counts."""
        if self.steps in (WARM_UP, LAST):
            wait(self.device)
            self.marks.append(time.perf_counter())
        self.steps += 1
        return self.steps > LAST

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            wait(self.device)
            started = time.perf_counter()
            result = function(*args, **named)
            wait(self.device)
            self.pass_seconds += time.perf_counter() - started
            return result

        return call

    @property
    def per_second(self) -> float:
        return (LAST - WARM_UP) / (self.marks[1] - self.marks[0])


def theirs(folder: Path, images: ImageSet, weights: Path, run: Run) -> Run:
    pixels, labels = images.images.to(run.device).float() / 255, images.labels.to(run.device)
    batches = list(zip(pixels.split(EACH * CLASSES), labels.split(EACH * CLASSES), strict=True))
    options = f"{OPTIONS} --n_iter {LAST + 1} --matched_moments m1_and_m2"
    with contextlib.ExitStack() as stack:
        stack.enter_context(program(folder / "code", options))
        fakes = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in UNUSED}
        with patch.dict(sys.modules, fakes):
            main, matching, builder, util = map(
                importlib.import_module, ("dp_mepf", "feature_matching", "model_builder", "util")
            )
        noise_maker, plain = util.GeneratorNoiseMaker, util.GeneratorNoiseMaker.generator_noise

        def noise(maker: Any) -> Any:
            if run.step():
                raise Finished
            return plain(maker)

        for owner, name, value in (
            (main, "load_dataset", lambda *_: (batches, CLASSES)),
            (matching, "load_dataset", lambda *_, **__: (batches[:1], None)),  # for early stopping
            (builder.pt_models, "vgg19", partial(vgg19, weights)),
            (noise_maker, "generator_noise", noise),
            (main, "compute_data_embedding", run.timed(main.compute_data_embedding)),
            (main, "dp_dataset_feature_release", run.timed(main.dp_dataset_feature_release)),
            (torch.cuda, "get_device_name", lambda *_: ""),  # called without a GPU too
        ):
            stack.enter_context(patch.object(owner, name, value))
        with contextlib.suppress(Finished):
            main.main()
    return run


def vgg19(weights: Path, **_: Any) -> nn.Module:
    """Build torchvision's VGG-19 layer by layer, with the weights that ours reads; its dense layers do not matter."""
    features = [nn.ReLU(inplace=True) if isinstance(layer, nn.ReLU) else layer for layer in VGG(19).features]
    dense = [
        nn.Linear(512 * 49, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
    ]
    network = nn.Sequential()
    network.add_module("features", nn.Sequential(*features, nn.MaxPool2d(2)))
    network.add_module("avgpool", nn.AdaptiveAvgPool2d(7))
    network.add_module("flatten", nn.Flatten())
    network.add_module("classifier", nn.Sequential(*dense, nn.Dropout(), nn.Linear(4096, 1000)))
    state = {name: value.float() for name, value in read_state(weights).items()}
    left = network.load_state_dict(state, strict=False)
    if left.unexpected_keys or not all(name.startswith("classifier.") for name in left.missing_keys):
        raise SystemExit(f"the weights do not fit: {left}")
    return network


def ours(images: ImageSet, run: Run, *, float32: bool = False, constants: Any = None, **params: Any) -> Run:
    given = {"epsilon": 1.0, "secure": False, "public_size": True, "early_stopping": False, **params}
    model = sf.create("dp-mepf", steps=LAST, device=run.device, **given).with_constants(**(constants or {}))
    latent, autocast, private = GeneratorTraining.latent, torch.autocast, run.timed(Vault.sum)

    def drawn(training: GeneratorTraining) -> Any:
        run.step()
        return latent(training)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(GeneratorTraining, "latent", drawn))
        stack.enter_context(patch.object(Vault, "sum", lambda *args, **named: private(*args, **named)))
        if float32:
            stack.enter_context(patch.object(dp_mepf, "load_perceptual", lambda *args: load_perceptual(*args[:2])))
            stack.enter_context(patch.object(torch, "autocast", lambda kind, *_, **__: autocast(kind, enabled=False)))
        model.fit(images)
    return run


def random_vgg(folder: Path) -> Path:
    """Write untrained weights of VGG-19."""
    torch.manual_seed(0)
    made = ENCODER_NETWORKS["vgg19"]()
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    card = PerceptualCard("random_vgg19", "vgg19", "nothing", "Apache-2.0", *IMAGENET)
    save_perceptual(folder / "vgg19.safetensors", card, made.state_dict())
    return folder / "vgg19.safetensors"


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, folder = options.device, options.authors.resolve()
    pixels = torch.randint(256, (IMAGES, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    images = ImageSet(pixels, torch.arange(IMAGES) % CLASSES, [str(number) for number in range(CLASSES)])
    with tempfile.TemporaryDirectory() as name:
        weights = random_vgg(Path(name))
        same = {"encoder": str(weights), "constants": GENERATOR, **PAPER}
        ways: dict[str, Callable[[], Run]] = {
            "authors": lambda: theirs(folder, images, weights, Run(device)),
            "ours, float32": lambda: ours(images, Run(device), float32=True, **same),
            "ours": lambda: ours(images, Run(device), **same),
            "ours, default settings": lambda: ours(images, Run(device)),
        }
        runs: dict[str, list[Run]] = {way: [] for way in ways}
        for _ in range(options.repeats):
            for way, work in ways.items():
                runs[way].append(work())
    for row in beside_authors(
        "dp-mepf", {way: [one.per_second for one in some] for way, some in runs.items()}, options.repeats
    ):
        rates = [IMAGES / one.pass_seconds for one in runs[row["job"]]]
        row["measured"]["images_per_second"] = round(statistics.fmean(rates))
        yield row
