"""Generator steps per second of `dp-mepf` beside its authors' own program, on one device in one run.

    python benchmarks/dp_mepf_speed.py --authors FOLDER --json benchmarks/results/dp_mepf_speed.json
    python benchmarks/dp_mepf_speed.py --authors FOLDER --device cpu --steps 2 --repeats 1 --images 240 --data random

FOLDER is a clone of github.com/ParkLabML/DP-MEPF. Its `main` runs as it is, up to the end of the last step that counts.
What is replaced: reading data (whole batches, ready on the device); the download of VGG-19 (torchvision's network, with
the random weights that ours has too; where torchvision is missing, the same layers); modules that serve logging,
accounting and evaluation only, none of which its loop or its pass over the images calls. Noise is given, not searched.

Both: CIFAR-10 with labels, all activations of VGG-19, GFMN's generator (90 latent numbers and a label) and its moving
average, 12 images of each class in a step (theirs would fill 128 up by chance). Steps are timed between two marks only,
after a warm-up: private sums, early stopping and evaluation are outside. `ours, float32` computes as theirs does
(TF32 in convolutions, as PyTorch has it by default); `ours` is what the method does on a GPU: bfloat16. Ours averages
weights as well. `small` is the network of the encoders that this package brings. `default`: wavelet scattering, squared
distance, residual generator, 10 images of each class. Runs alternate.

`images_per_second`: of the one pass over private images, noise included. Ours is `vault.sum`, with probes, ledger and
clipping, and fast noise; `exact noise`, one run with `--exact-noise`, is the default, discrete one: its cost goes with
coordinates and not with images. `difference`: of the class means of both programs without noise, relative.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.encoders import load_perceptual
from sfumato.encoders.perceptual import NETWORKS, PerceptualCard, save_perceptual
from sfumato.encoders.vgg import VGG
from sfumato.encoders.weights import read_state
from sfumato.methods import dp_mepf
from sfumato.methods.generating import Training
from sfumato.privacy import Vault

WARM_UP = 20  # steps, or as many as are timed if that is fewer
EACH, CLASSES = 12, 10
PAPER = {
    "layers": "paper",
    "loss": "moving",
    "network": "mepf",
    "latent": 90,
    "width": 64,
    "batch_size": EACH * CLASSES,
}
MOMENTS = {2: "m1_and_m2", 1: "mean"}
SUFFIX = {2: "", 1: ", first moment"}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNUSED = (  # in their loop: third parties, then modules of theirs
    *("colorlog", "filelock", "pandas", "torch.utils.tensorboard"),
    *("dp_analysis", "eval_accuracy", "eval_fid", "eval_prdc", "mnist_synth_data_benchmark"),
)
TORCHVISION = ("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.transforms")


class Finished(Exception):
    """The last step that counts is done."""


class Clock:
    """Seconds from the beginning of step `first` to that of step `last`, and those of the private pass."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self._device, self.first, self.last = device, first, last
        self._steps, self._marks = 0, list[float]()
        self.seconds, self.results = 0.0, list[Any]()

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> bool:
        """To be called when a step begins; whether it was the last call that counts."""
        if self._steps in (self.first, self.last):
            self._marks.append(self.now())
        self._steps += 1
        return self._steps > self.last

    def listening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds and its results kept here."""

        def timed(*args: Any, **named: Any) -> Any:
            started = self.now()
            self.results.append(function(*args, **named))
            self.seconds += self.now() - started
            return self.results[-1]

        return timed

    def steps_per_second(self) -> float:
        began, ended = self._marks
        return (self.last - self.first) / (ended - began)


@dataclass(frozen=True)
class Timing:
    """One run: generator steps and private images per second, and class means of the first moment."""

    steps: float
    images: float
    means: torch.Tensor


# -- theirs ------------------------------------------------------------------------------------------------------------


def program(folder: Path) -> ModuleType:
    """Their main module."""
    sys.path.insert(0, str(folder / "code"))
    left_out = (*UNUSED, *(() if importlib.util.find_spec("torchvision") else TORCHVISION))
    before = {name: sys.modules.get(name) for name in left_out}
    sys.modules.update({name: MagicMock(__spec__=ModuleSpec(name, None)) for name in left_out})
    found = importlib.import_module("dp_mepf")
    for name in ("feature_matching", "model_builder", "util"):
        setattr(found, name, importlib.import_module(name))
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    return found


def authors(main: ModuleType, images: ImageSet, weights: Path, moments: int, clock: Clock) -> Timing:
    assert images.labels is not None
    pixels, labels = images.images.to(clock._device).float() / 255, images.labels.to(clock._device)
    batches = list(zip(pixels.split(EACH * CLASSES), labels.split(EACH * CLASSES), strict=True))
    plain = main.util.GeneratorNoiseMaker.generator_noise

    def noise(maker: Any) -> Any:
        if clock.step():
            raise Finished
        return plain(maker)

    options = f"--dataset cifar10 --labeled --n_iter {clock.last + 1} --batch_size {EACH * CLASSES} --seed 1"
    options += f" --matched_moments {MOMENTS[moments]} --dp_noise 10 --dp_val_noise 100 --val_enc vgg19"
    options += " --extra_input_scaling imagenet_norm --lr 1e-3 --m_avg_lr 1e-4 --no_io_files --no_tensorboard"
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Finished),
        patch.object(sys, "argv", ["program", *options.split(), "--log_dir", scratch]),
        patch.object(main, "load_dataset", lambda *_: (batches, CLASSES)),
        patch.object(main.feature_matching, "load_dataset", lambda *_, **__: (batches[:1], None)),  # for stopping
        patch.object(main.model_builder.pt_models, "vgg19", vgg19(main.model_builder.pt_models, weights)),
        patch.object(main.util.GeneratorNoiseMaker, "generator_noise", noise),
        patch.object(main, "GeneratorNoiseMaker", main.util.GeneratorNoiseMaker),
        patch.object(main, "compute_data_embedding", clock.listening(main.compute_data_embedding)),
        patch.object(main, "dp_dataset_feature_release", clock.listening(main.dp_dataset_feature_release)),
        patch.object(torch.cuda, "get_device_name", lambda *_: ""),  # asked for without a GPU too
    ):
        main.main()
    return Timing(clock.steps_per_second(), len(images) / clock.seconds, clock.results[0][0])


def vgg19(models: ModuleType, weights: Path) -> Callable[..., nn.Module]:
    """What builds theirs, from the file that ours reads; nothing looks at the dense layers' outcome."""
    plain, state = models.vgg19, {name: value.float() for name, value in read_state(weights).items()}

    def build(**_: Any) -> nn.Module:
        network: nn.Module = stand_in() if isinstance(models, MagicMock) else plain(weights=None)
        strangers = network.load_state_dict(state, strict=False)
        assert not strangers.unexpected_keys
        assert all(name.startswith("classifier.") for name in strangers.missing_keys)
        return network

    return build


def stand_in() -> nn.Module:
    """torchvision's VGG-19, layer by layer."""
    features = [nn.ReLU(inplace=True) if isinstance(layer, nn.ReLU) else layer for layer in VGG(19).features]
    hidden = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    classifier = nn.Sequential(*hidden, nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout())
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features, nn.MaxPool2d(2)),
            avgpool=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            classifier=classifier.append(nn.Linear(4096, 1000)),
        )
    )


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(images: ImageSet, clock: Clock, *, plain_floats: bool = False, **params: Any) -> Timing:
    """A fit without early stopping; on a GPU in bfloat16 unless `plain_floats`."""
    given = {"epsilon": 1.0, "secure": False, "public_size": True, "stopping": False, **params}
    model = sf.create("dp-mepf", steps=clock.last, device=str(clock._device), **given)
    latent, total, autocast = Training.latent, clock.listening(Vault.sum), torch.autocast

    def drawn(training: Training) -> Any:
        clock.step()
        return latent(training)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Training, "latent", drawn))
        patches.enter_context(patch.object(Vault, "sum", lambda *args, **named: total(*args, **named)))
        if plain_floats:
            patches.enter_context(patch.object(dp_mepf, "load_perceptual", lambda *args: load_perceptual(*args[:2])))
            plain = lambda kind, *_, **__: autocast(kind, enabled=False)  # noqa: E731
            patches.enter_context(patch.object(torch, "autocast", plain))
        model.fit(images)
    sizes = torch.bincount(images.labels, minlength=CLASSES).to(clock._device) if images.labelled else torch.ones(1)
    return Timing(clock.steps_per_second(), len(images) / clock.seconds, clock.results[0] / sizes[:, None])


def channels_first(means: torch.Tensor, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    """Our order of activations, places first, to theirs."""
    parts = means.split([math.prod(shape) for shape in shapes], 1)
    return torch.cat(
        [p.view(-1, h, w, c).permute(0, 3, 1, 2).flatten(1) for p, (c, h, w) in zip(parts, shapes, strict=True)], 1
    )


def random_weights(network: str, folder: Path) -> Path:
    """A file of weights that nobody trained, as large as activations like them (He et al. 2015)."""
    torch.manual_seed(0)
    made = NETWORKS[network]()
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    mean, std = IMAGENET
    card = PerceptualCard(f"random_{network}", network, "nothing", "Apache-2.0", mean, std)
    save_perceptual(folder / f"{network}.safetensors", card, made.state_dict())
    return folder / f"{network}.safetensors"


# -- both --------------------------------------------------------------------------------------------------------------


def data(name: str, count: int) -> ImageSet:
    if name == "random":
        pixels = torch.randint(256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
        return ImageSet(pixels.byte(), torch.arange(count) % CLASSES, [str(number) for number in range(CLASSES)])
    images = sf.load_images(name)
    return images.subset(range(min(count, len(images))))


def row(timings: list[Timing], theirs: list[Timing]) -> dict[str, float]:
    def part(values: list[float], others: list[float], name: str) -> dict[str, float]:
        mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        return {
            f"{name}_per_second": round(mean, 2),
            f"{name}_sd": round(sd, 2),
            f"{name}_ratio": round(mean / statistics.fmean(others), 2),
        }

    steps = part([one.steps for one in timings], [one.steps for one in theirs], "steps")
    return {**steps, **part([one.images for one in timings], [one.images for one in theirs], "images")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=int, default=50_000, help="private ones, at most")
    parser.add_argument("--data", default="cifar10", help="or `random`: pixels have no part in speed")
    parser.add_argument("--moments", type=int, nargs="+", default=[2, 1], choices=(2, 1))
    parser.add_argument("--exact-noise", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, images = torch.device(options.device), data(options.data, options.images)
    theirs, warm = program(options.authors.resolve()), min(WARM_UP, options.steps)

    def clock() -> Clock:
        return Clock(device, warm, warm + options.steps)

    timings: dict[str, list[Timing]] = {}

    def add(name: str, timing: Timing) -> None:
        timings.setdefault(name, []).append(timing)
        print(f"{name}: {timing.steps:.2f} steps/s, {timing.images:.0f} images/s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        vgg, small = random_weights("vgg19", Path(folder)), random_weights("small", Path(folder))
        for _ in range(options.repeats):
            for moments in options.moments:
                paper, suffix = {**PAPER, "moments": moments, "encoder": str(vgg)}, SUFFIX[moments]
                add(f"authors{suffix}", authors(theirs, images, vgg, moments, clock()))
                add(f"ours, float32{suffix}", ours(images, clock(), plain_floats=True, **paper))
                add(f"ours{suffix}", ours(images, clock(), **paper))
                add(f"ours, small{suffix}", ours(images, clock(), **{**paper, "encoder": str(small)}))
            add("ours, default", ours(images, clock()))
        if options.exact_noise:
            paper = {**PAPER, "moments": options.moments[0], "encoder": str(vgg)}
            add("ours, exact noise", ours(images, clock(), secure=True, **paper))
        exact = {**PAPER, "epsilon": math.inf, "moments": 1, "encoder": str(vgg)}
        first = authors(theirs, images, vgg, 1, Clock(device, 0, 1)).means
        mine = ours(images, Clock(device, 0, 1), plain_floats=True, **exact).means
        difference = channels_first(mine, load_perceptual(vgg).shapes(images.shape)) - first

    rows = {}
    for name, some in timings.items():
        beside = f"authors{SUFFIX[1]}" if name.endswith(SUFFIX[1]) else f"authors{SUFFIX[options.moments[0]]}"
        rows[name] = row(some, timings[beside])
    content = {
        "command": "python benchmarks/dp_mepf_speed.py (see its docstring)",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU",
        "data": options.data,
        "images": len(images),
        "steps": options.steps,
        "repeats": options.repeats,
        "difference": float(f"{float(difference.norm() / first.norm()):.2g}"),
        "rows": rows,
    }
    print(json.dumps(content))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
