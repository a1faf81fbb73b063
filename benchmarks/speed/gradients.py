"""Time and memory of one private gradient sum, beside the gradient without privacy and beside Opacus.

Networks: DP-LFlow's autoencoder and RealNVP (638k parameters), one for each of ten classes, on samples of a tenth of
MNIST (of 24,000 images on a CPU); one of them alone; a class-conditional U-Net. Measured is what makes a gradient, from
drawing the sample to the noised sum; without privacy forward and backward on a batch of the expected size; for Opacus
forward, backward, clipping and noise on that batch, one class after another. Steps alternate; the median counts. Ratios
are to the faster step without privacy and without a CUDA graph. On a CPU the time is that of the process on all cores.
Opacus (1.6.0) is left out where it is not installed. Memory of CUDA graphs is held between steps and not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

import sfumato as sf
from benchmarks.timing import alternating, wait
from sfumato.data import ImageSet
from sfumato.data.pixels import to_unit_range
from sfumato.engine import GradientVault, Performance
from sfumato.nets.stacked import stacked, unstack
from sfumato.nets.unet import UNet
from sfumato.privacy import Budget, Plan, Release

WARM_UP, SHARE, RECORDS, UNET_IMAGES = 3, 0.1, {"cpu": 24_000, "cuda": 60_000}, {"cpu": 128, "cuda": 1024}
VMAP_BATCH = 32  # without rules all per-example gradients are in memory
OPACUS = ("hooks", "functorch", "ghost", "fast gradient clipping")
Step = Callable[[], Any]


class Flow(nn.Module):
    """RealNVP of nine couplings with one network for scale and shift, as DP-LFlow's authors have it."""

    def __init__(self, size: int = 20, hidden: int = 200, couplings: int = 9) -> None:
        super().__init__()
        sizes = (size, hidden, hidden, 2 * size)
        networks = []
        for _ in range(couplings):
            layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
            networks.append(nn.Sequential(*layers[:-1]))
        self.couplings = nn.ModuleList(networks)
        self.register_buffer("masks", torch.stack([(torch.randperm(size) < size // 2).float() for _ in networks]))

    def forward(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        growth = torch.zeros_like(codes[:, 0])
        for network, mask in zip(self.couplings, self.masks, strict=True):
            scale, shift = network(codes * mask).chunk(2, 1)
            scale = torch.tanh(scale) * (1 - mask)
            codes, growth = codes * scale.exp() + shift * (1 - mask), growth + scale.sum(1)
        return codes, growth


class LatentFlow(nn.Module):
    """Autoencoder and flow of DP-LFlow."""

    def __init__(self) -> None:
        super().__init__()
        down = [nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten()]
        up = [nn.Unflatten(1, (64, 7, 7)), nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), nn.ReLU()]
        decoder = nn.Sequential(nn.Linear(20, 3136), nn.ReLU(), *up, nn.ConvTranspose2d(32, 1, 3, 2, 1, 1))
        self.autoencoder = nn.ModuleDict({"encoder": nn.Sequential(*down, nn.Linear(3136, 20)), "decoder": decoder})
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


class WithLoss(nn.Module):
    """A network with its loss: what Opacus wraps."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._loss(self.model, *inputs)


@dataclass
class Task:
    """Networks, one or one per class, their loss, and batches of the expected size."""

    name: str
    models: list[nn.Module]
    loss: Callable[..., torch.Tensor]
    batches: list[list[torch.Tensor]]
    share: float
    batch_size: int
    query: dict[str, Any]


def tasks(images: ImageSet, device: str) -> Iterator[Task]:
    labels, pixels = images.labels.to(device), to_unit_range(images.images.to(device))
    each, cpu = round(SHARE * len(images)) // 10, device == "cpu"
    bounds = {"bound": {"autoencoder": 1.0, "flow": 1.0}}
    # On a GPU nearly every sample fits in one batch: a second batch for a few images would blur the comparison.
    largest = round(1.15 * each + 4 * math.sqrt(each))
    models = [LatentFlow().to(device) for _ in range(10)]
    batches = [[pixels[labels == label][:each]] for label in range(10)]
    asked = {**bounds, "by_class": True}
    yield Task("DP-LFlow, ten classes", models, latent_loss, batches, SHARE, 128 if cpu else largest, asked)
    size = 128 if cpu else each + 4 * math.isqrt(each)
    yield Task("DP-LFlow, one class", models[:1], latent_loss, [[pixels[:each]]], SHARE / 10, size, bounds)
    count, draws = UNET_IMAGES[device], 1 + math.prod(images.shape)
    batch = [pixels[:count], labels[:count], torch.randn(count, draws, device=device)]
    size, asked = (
        32 if cpu else math.ceil(count + 4 * math.sqrt(count)),
        {"bound": 1.0, "with_labels": True, "draws": draws},
    )
    yield Task("U-Net", [UNet(1, 10).to(device)], score_loss, [batch], count / len(images), size, asked)


def plain(task: Task, cast: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Return a step without privacy, one network after another."""

    def step() -> None:
        for model, batch in zip(task.models, task.batches, strict=True):
            with cast():
                losses = task.loss(model, *batch)
            torch.autograd.grad(losses.sum(), list(model.parameters()))

    return step


def all_at_once(task: Task, cast: Callable[[], Any] = contextlib.nullcontext) -> Step:
    """Return a step without privacy, all networks at once."""
    whole = WithLoss(stacked(task.models), task.loss)
    inputs = [torch.stack(parts) for parts in zip(*task.batches, strict=True)]
    state = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}

    def step() -> None:
        with cast():
            losses = torch.vmap(lambda weights, *batch: functional_call(whole, weights, batch))(state, *inputs)
        torch.autograd.grad(losses.sum(), list(whole.parameters()))

    return step


def captured(step: Step) -> Step:
    """Return the same step as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def private(task: Task, images: ImageSet, device: str, **options: Any) -> Step:
    """Return a step of `GradientVault.gradient`."""
    plan = Plan((Release("gradients", 10**6, task.share, 1e3),), Budget(10.0))
    vault, performance = (
        GradientVault(images, plan, device=device),
        Performance(**{"batch_size": task.batch_size, **options}),
    )
    model = stacked(task.models) if len(task.models) > 1 else task.models[0]
    return lambda: vault.gradient(model, task.loss, release="gradients", performance=performance, **task.query)


def opacus(task: Task, mode: str) -> Step:
    """Return a step of Opacus, up to where the optimiser would move the weights."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    fast, pairs = mode in ("ghost", "fast gradient clipping"), []
    module_type = GradSampleModuleFastGradientClipping if fast else GradSampleModule
    optimizer_type = DPOptimizerFastGradientClipping if fast else DPOptimizer
    asked = {"use_ghost_clipping": mode == "ghost", "max_grad_norm": 1.0} if fast else {}
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": None, "loss_reduction": "sum"}
    for model in task.models:
        whole = WithLoss(unstack(stacked([model]), 0), task.loss)
        options = {"loss_reduction": "sum", "strict": False, "force_functorch": mode == "functorch", **asked}
        module = module_type(whole, **options)
        pairs.append((module, optimizer_type(torch.optim.SGD(module.parameters(), lr=0.0), **common)))

    def step() -> None:
        for (module, optimizer), batch in zip(pairs, task.batches, strict=True):
            losses = module(*batch)
            (DPTensorFastGradientClipping(module, optimizer, losses, "sum") if fast else losses.sum()).backward()
            optimizer.pre_step()
            optimizer.zero_grad(set_to_none=True)

    return step


def steps(task: Task, images: ImageSet, device: str) -> dict[str, Step]:
    """Return all steps that are compared, by name."""
    together = all_at_once if len(task.models) > 1 else plain
    found = {"not private": plain(task)}
    if together is all_at_once:
        found["not private, all classes at once"] = together(task)
    if device == "cuda":
        half = {"precision": torch.bfloat16}
        found["not private, CUDA graph"] = captured(together(task))
        found["not private, bfloat16"] = together(task, lambda: torch.autocast(device, dtype=torch.bfloat16))
        found["vault, bfloat16"] = private(task, images, device, **half)
        found["vault, no CUDA graph"] = private(task, images, device, record=False)
        found["vault, no CUDA graph, bfloat16"] = private(task, images, device, record=False, **half)
    found["vault"] = private(task, images, device)
    found["vault, no rules"] = private(task, images, device, layer_rules=False, batch_size=VMAP_BATCH)
    if importlib.util.find_spec("opacus"):
        found |= {f"opacus, {mode}": opacus(task, mode) for mode in OPACUS}
    return found


def seconds(step: Step, device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter  # a CPU may be shared
    wait(device)
    started = clock()
    step()
    wait(device)
    return clock() - started


def peak_mib(step: Step, device: str) -> int | None:
    """Return the memory that a step takes beyond what was allocated before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(step, device)
        return round((torch.cuda.max_memory_allocated() - before) / 2**20)

    def kilobytes(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith(field)).split()[1])

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return what earlier steps have freed
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = kilobytes("VmRSS")
        step()
        return round((kilobytes("VmHWM") - before) / 2**10)
    except OSError:
        return None


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    warnings.filterwarnings("ignore", module="opacus|torch")
    torch.manual_seed(0)
    device, images = options.device, sf.load_images("mnist")
    images = images.subset(torch.arange(min(RECORDS[device], len(images))))
    for task in tasks(images, device):
        found, peaks = steps(task, images, device), {}
        about = {"task": task.name, "images": sum(len(batch[0]) for batch in task.batches), "repeats": options.repeats}
        about |= {"run": "cpu" if device == "cpu" else "gpu"}
        for name, step in list(found.items()):
            try:
                for _ in range(1 if device == "cpu" else WARM_UP):
                    step()
                peaks[name] = peak_mib(step, device)
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:  # of Opacus
                yield {"job": name, **about, "measured": {"failed": f"{type(error).__name__}: {str(error)[:120]}"}}
                del found[name]
        times = alternating(
            {name: lambda step=step: seconds(step, device) for name, step in found.items()}, options.repeats
        )
        medians = {name: 1000 * statistics.median(some) for name, some in times.items()}
        fastest = min(medians[name] for name in ("not private", "not private, all classes at once") if name in medians)
        for name, ms in medians.items():
            measured = {"ms": round(ms, 2), "ratio": round(ms / fastest, 2), "peak_mib": peaks[name]}
            yield {"job": name, **about, "measured": measured}
