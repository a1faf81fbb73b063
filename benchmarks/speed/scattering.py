"""Milliseconds of the scattering transform, forward and backward, beside Kymatio.

28 pixels, 500 images on a GPU and 64 on a CPU. On a GPU ours is also timed as a CUDA graph in TF32, as in training.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import scipy.special
import torch

from benchmarks.timing import alternating, wait
from sfumato.features.scattering import Scattering

SIZE, IMAGES, SECONDS = 28, {"cpu": 64, "cuda": 500}, 1.0


def kymatio(device: str) -> Any:
    """Return Kymatio's transform; it imports a function that newer SciPy lacks and that it does not need here."""
    scipy.special.sph_harm = getattr(scipy.special, "sph_harm", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kymatio.torch import Scattering2D

        return Scattering2D(J=2, shape=(SIZE, SIZE)).to(device)


def milliseconds(step: Callable[[], Any], device: str) -> float:
    step()
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < SECONDS:
        step()
        calls += 1
        wait(device)
    return 1000 * (time.perf_counter() - started) / calls


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.backends.cuda.matmul.allow_tf32 = False
    return graph.replay


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device, count = options.device, IMAGES[options.device]
    images = (torch.rand(count, 1, SIZE, SIZE, device=device) * 2 - 1).requires_grad_()
    ours, theirs = Scattering((SIZE, SIZE)).to(device), kymatio(device)
    difference = float((ours(images) - theirs(images)).detach().abs().max())
    weights = torch.randn_like(ours(images))
    steps = {
        name: lambda t=t: torch.autograd.grad(t(images), images, weights)
        for name, t in (("kymatio", theirs), ("ours", ours))
    }
    if device == "cuda":
        steps["ours, CUDA graph in TF32"] = captured(steps["ours"])
    ways = {name: lambda step=step: milliseconds(step, device) for name, step in steps.items()}
    times = alternating(ways, max(2, options.repeats))
    for name, some in times.items():
        ratio = statistics.fmean(times["kymatio"]) / statistics.fmean(some)
        measured = {"ms": statistics.fmean(some), "sd": statistics.stdev(some), "ratio": ratio}
        rounded = {key: round(value, 2) for key, value in measured.items()}
        yield {"job": name, "images": count, "size": SIZE, "largest_difference": difference, "measured": rounded}
