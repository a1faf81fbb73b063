"""Time and memory of one private gradient, beside the gradient without privacy and beside Opacus, in one run.

    python benchmarks/gradient_speed.py --json benchmarks/results/gradient_speed.json
    python benchmarks/gradient_speed.py --device cpu --records 24000 --json benchmarks/results/gradient_speed_cpu.json

Networks: DP-LFlow's autoencoder (166k parameters) and RealNVP (472k), one for each of ten classes, on
Poisson samples of a tenth of MNIST; one of these alone, on as many images as a class has; a small class-conditional
U-Net with group norms, on --unet images.

Measured: what makes a gradient, from drawing the sample to the noised sum (without privacy: forward and backward on a
fixed batch of the expected size; Opacus: forward, backward, clipping and noise on that batch, one class after another,
with one bound for all parameters). No optimiser's step. Runs alternate; the median counts. `vmap` and `linear` are
`gradient` with no rules for layers, or none for convolutions; `recorded`: `Performance(record=True)`, `as a graph`
the step without privacy as a CUDA graph, too (their memory is held between steps and not in the figure); `bf16` has the
network in bfloat16. Ratios are to the faster step without privacy and without a graph. Opacus (1.6.0,
with opt_einsum and scipy; nothing else of it is needed) is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.engine import Performance, Vault
from sfumato.engine.layers import Call
from sfumato.nets.stacked import one, stacked
from sfumato.nets.unet import UNet
from sfumato.privacy import Budget, Plan, Release

WARM_UP = 3
SHARE = 0.1  # of all images in a sample
STEPS = 10**6  # planned, so that the budget does not end
OPACUS = ("hooks", "functorch", "ghost", "fast gradient clipping")

Step = Callable[[], Any]


class Flow(nn.Module):
    """RealNVP of nine couplings, as DP-LFlow's authors have it: one network for scale and shift."""

    def __init__(self, size: int = 20, hidden: int = 200, couplings: int = 9) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2 * size)
            )
            for _ in range(couplings)
        )
        masks = torch.stack([(torch.randperm(size) < size // 2).float() for _ in range(couplings)])
        self.register_buffer("masks", masks)

    def forward(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        growth = torch.zeros_like(codes[:, 0])
        for network, mask in zip(self.couplings, self.get_buffer("masks"), strict=True):
            scale, shift = network(codes * mask).chunk(2, 1)
            scale = torch.tanh(scale) * (1 - mask)
            codes, growth = codes * scale.exp() + shift * (1 - mask), growth + scale.sum(1)
        return codes, growth


class LatentFlow(nn.Module):
    """Autoencoder and flow."""

    def __init__(self) -> None:
        super().__init__()
        encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 20),
        )
        decoder = nn.Sequential(
            nn.Linear(20, 3136),
            nn.ReLU(),
            nn.Unflatten(1, (64, 7, 7)),
            nn.ConvTranspose2d(64, 32, 3, 2, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 3, 2, 1, 1),
        )
        self.autoencoder = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        self.flow = Flow()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = self.autoencoder["encoder"](images)
        return self.autoencoder["decoder"](codes), *self.flow(codes)


def latent_loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    made, normals, growth = model(images)
    error = functional.binary_cross_entropy_with_logits(made, (images + 1) / 2, reduction="none").mean((1, 2, 3))
    return 100 * error + normals.square().sum(1) / 2 - growth


def score_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, normals: torch.Tensor) -> torch.Tensor:
    noise, levels = normals[:, 1:].view_as(images), normals[:, 0].sigmoid()
    noisy = images + levels[:, None, None, None] * noise
    return (model(noisy, levels, labels) - noise).square().mean((1, 2, 3))


class Whole(nn.Module):
    """A network with its loss: what Opacus wraps."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._loss(self.model, *inputs)


@dataclass
class Task:
    """A network, its loss, and batches of the expected size: one, or one for each class."""

    name: str
    models: list[nn.Module]
    loss: Callable[..., torch.Tensor]
    batches: list[list[torch.Tensor]]
    share: float
    options: dict[str, Any]

    @property
    def by_class(self) -> bool:
        return len(self.models) > 1

    @property
    def images(self) -> int:
        return sum(len(batch[0]) for batch in self.batches)


def tasks(images: ImageSet, options: argparse.Namespace) -> Iterator[Task]:
    device, cpu = options.device, options.device == "cpu"
    assert images.labels is not None
    labels = images.labels.to(device)
    pixels = images.images.to(device).float() / 127.5 - 1
    expected = round(SHARE * len(images))
    groups = {"bound": {"autoencoder": 1.0, "flow": 1.0}}
    if "classes" in options.tasks:
        each = expected // 10
        batches = [[pixels[labels == label][:each]] for label in range(10)]
        largest = round(1.15 * each + 4 * math.sqrt(each))  # of MNIST's classes and their samples
        at_once = options.at_once or (128 if cpu else largest)
        models = [LatentFlow().to(device) for _ in range(10)]
        yield Task("lflow, ten classes", models, latent_loss, batches, SHARE, {**groups, "at_once": at_once})
    if "one" in options.tasks:
        at_once = options.at_once or (128 if cpu else expected // 10 + 4 * math.isqrt(expected // 10))
        batch = [pixels[: expected // 10]]
        asked = {**groups, "at_once": at_once}
        yield Task("lflow", [LatentFlow().to(device)], latent_loss, [batch], SHARE / 10, asked)
    if "unet" in options.tasks:
        draws = 1 + math.prod(images.shape)
        # Room for nearly every sample in one batch: one more for a few images would blur the comparison. On a CPU
        # batches are small, and what is filled up is little.
        at_once = options.at_once or (32 if cpu else math.ceil(options.unet + 4 * math.sqrt(options.unet)))
        normals = torch.randn(options.unet, draws, device=device)
        batch = [pixels[: options.unet], labels[: options.unet], normals]
        asked = {"bound": 1.0, "with_labels": True, "draws": draws, "at_once": at_once}
        model = UNet(1, 10).to(device)
        yield Task("u-net", [model], score_loss, [batch], options.unet / len(images), asked)


# -- steps ------------------------------------------------------------------------------------------------


def plain(task: Task, cast: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Without privacy, one network after another."""

    def step() -> None:
        for model, batch in zip(task.models, task.batches, strict=True):
            with cast():
                losses = task.loss(model, *batch)
            torch.autograd.grad(losses.sum(), list(model.parameters()))

    return step


def side_by_side(task: Task, cast: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Without privacy, all networks at once."""
    whole = Whole(stacked(task.models), task.loss)
    inputs = [torch.stack(parts) for parts in zip(*task.batches, strict=True)]
    state = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}

    def step() -> None:
        with cast():
            losses = torch.vmap(lambda weights, *batch: functional_call(whole, weights, batch))(state, *inputs)
        torch.autograd.grad(losses.sum(), list(whole.parameters()))

    return step


def replayed(step: Step) -> Step:
    """The same step as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def private(task: Task, images: ImageSet, device: str, rules: str = "all", **more: Any) -> Step:
    """`Vault.gradient`, with all rules for layers, those for linear ones, or none."""
    plan = Plan((Release("gradients", STEPS, task.share, 1e3),), Budget(10.0))
    vault = Vault(images, plan, device=device)
    model = stacked(task.models) if task.by_class else task.models[0]
    usual = Call.pays

    def pays(call: Call, place: torch.device) -> bool:
        return usual(call, place) if rules == "all" else rules == "linear" == call.kind

    asked = dict(task.options)
    chosen = {"batch_size": asked.pop("at_once"), "record": False, **more}
    performance = Performance(**chosen)

    def step() -> None:
        with mock.patch.object(Call, "pays", pays):
            vault.gradient(
                model, task.loss, release="gradients", by_class=task.by_class, performance=performance, **asked
            )

    return step


def opacus(task: Task, mode: str) -> Step:
    """Opacus's modules and optimisers, up to where the step would be taken."""
    from opacus.grad_sample import (  # type: ignore[import-not-found]
        GradSampleModule,
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import (  # type: ignore[import-not-found]
        DPOptimizer,
        DPOptimizerFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import (  # type: ignore[import-not-found]
        DPTensorFastGradientClipping,
    )

    fast = mode in ("ghost", "fast gradient clipping")
    pairs = []
    for model in task.models:
        whole = Whole(one(stacked([model]), 0), task.loss)
        asked: dict[str, Any] = {"loss_reduction": "sum", "strict": False}
        if fast:
            asked |= {"use_ghost_clipping": mode == "ghost", "max_grad_norm": 1.0}
        module = (GradSampleModuleFastGradientClipping if fast else GradSampleModule)(
            whole, force_functorch=mode == "functorch", **asked
        )
        optimizer = (DPOptimizerFastGradientClipping if fast else DPOptimizer)(
            torch.optim.SGD(module.parameters(), lr=0.0),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        pairs.append((module, optimizer))

    def step() -> None:
        for (module, optimizer), batch in zip(pairs, task.batches, strict=True):
            losses = module(*batch)
            (DPTensorFastGradientClipping(module, optimizer, losses, "sum") if fast else losses.sum()).backward()
            optimizer.pre_step()
            optimizer.zero_grad(set_to_none=True)

    return step


def steps(task: Task, images: ImageSet, options: argparse.Namespace) -> dict[str, Step]:
    device = options.device

    def half() -> Any:
        return torch.autocast(device, dtype=torch.bfloat16)

    found = {"not private": plain(task)}
    if task.by_class:
        found["not private, side by side"] = side_by_side(task)
    found["vault"] = private(task, images, device)
    if device != "cpu":
        found["not private, as a graph"] = replayed((side_by_side if task.by_class else plain)(task))
        found["vault, recorded"] = private(task, images, device, record=True)
        found["vault, recorded, bf16"] = private(task, images, device, record=True, precision=torch.bfloat16)
    if not options.quick:
        found["vault, linear"] = private(task, images, device, "linear")
        found["vault, vmap"] = private(task, images, device, "none", batch_size=options.vmap)
    if device != "cpu":
        found["not private, bf16"] = (side_by_side if task.by_class else plain)(task, half)
        found["vault, bf16"] = private(task, images, device, precision=torch.bfloat16)
    if importlib.util.find_spec("opacus"):
        found |= {f"opacus, {mode}": opacus(task, mode) for mode in options.opacus}
    return found


# -- clocks -----------------------------------------------------------------------------------------------


def timed(step: Step, device: str) -> float:
    """Seconds; on a CPU those that the process worked on all cores, since a machine may be shared."""
    if device == "cpu":
        started = time.process_time()
        step()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def peak(step: Step, device: str) -> float | None:
    """MiB that a step takes beyond what was there before it."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        timed(step, device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    status, references = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier steps have freed goes back
        references.write_text("5")  # the peak begins anew
        before = _kilobytes(status, "VmRSS")
        step()
        return (_kilobytes(status, "VmHWM") - before) / 2**10
    except OSError:
        return None


def _kilobytes(status: Path, field: str) -> float:
    return float(next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1])


def measure(found: dict[str, Step], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, step in list(found.items()):
        try:
            for _ in range(1 if options.device == "cpu" else WARM_UP):
                step()
            rows[name] = {"peak_mib": None if (high := peak(step, options.device)) is None else round(high)}
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # of Opacus: said, not hidden
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
            del found[name]
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(options.repeats):
        for name, step in found.items():
            times[name].append(timed(step, options.device))
    fastest = min(
        statistics.median(times[name]) for name in ("not private", "not private, side by side") if name in times
    )
    for name, some in times.items():
        middle = statistics.median(some)
        rows[name] |= {
            "ms": round(1000 * middle, 2),
            "least_ms": round(1000 * min(some), 2),
            "ratio": round(middle / fastest, 2),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--unet", type=int, help="images in a sample for the U-Net; 1024, or 128 on a CPU")
    parser.add_argument("--at-once", type=int, help="images (of each class) at a time")
    parser.add_argument("--vmap", type=int, default=32, help="the same for `vmap`, which writes all gradients down")
    parser.add_argument("--tasks", nargs="+", default=["classes", "one", "unet"], choices=["classes", "one", "unet"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--quick", action="store_true", help="leave `linear` and `vmap` out")
    parser.add_argument("--opacus", nargs="*", default=list(OPACUS), choices=OPACUS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.unet = options.unet or (128 if options.device == "cpu" else 1024)
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="opacus|torch")
    torch.manual_seed(0)
    images = sf.load_images("mnist")
    if options.records < len(images):
        images = images.subset(torch.arange(options.records))
    content: dict[str, Any] = {
        "command": "python benchmarks/gradient_speed.py (see its docstring)",
        "device": platform.machine() + ", CPU" if options.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads() if options.device == "cpu" else None,
        "torch": torch.__version__,
        "repeats": options.repeats,
        "tasks": {},
    }
    for task in tasks(images, options):
        rows = measure(steps(task, images, options), options)
        parameters = sum(p.numel() for model in task.models for p in model.parameters())
        content["tasks"][task.name] = {"images": task.images, "parameters": parameters, "rows": rows}
        print(json.dumps({task.name: content["tasks"][task.name]}, indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
