"""Our scattering transform beside Kymatio's, forward and backward, in one run.

    python benchmarks/scattering.py --images 500 --size 28 --json benchmarks/results/scattering.json

Rounds alternate; a figure is the mean over them, and the ratio of the two is what counts. On a GPU ours is also timed
as a CUDA graph with products in TF32, as `dp-kernel` runs it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.special
import torch

from sfumato.encoders.scattering import Scattering


def kymatio(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its import asks SciPy for a function that newer ones lack and that nothing here needs."""
    scipy.special.sph_harm = getattr(scipy.special, "sph_harm", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kymatio.torch import Scattering2D

        transform: Callable[[torch.Tensor], torch.Tensor] = Scattering2D(J=2, shape=(size, size))
    return transform


def timed(step: Callable[[], Any], seconds: float, device: str) -> float:
    """Seconds per call."""
    step()
    calls, started = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - started < seconds:
        step()
        calls += 1
        if device == "cuda":
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.backends.cuda.matmul.allow_tf32 = False
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="per round and transform")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    images = torch.rand(options.images, 1, options.size, options.size, device=options.device) * 2 - 1
    images.requires_grad_(True)
    ours = Scattering((options.size, options.size)).to(options.device)
    theirs = kymatio(options.size)
    if options.device == "cuda":
        theirs = theirs.cuda()  # type: ignore[attr-defined]
    difference = float((ours(images) - theirs(images)).detach().abs().max())
    weights = torch.randn_like(ours(images))
    steps: dict[str, Callable[[], Any]] = {
        "kymatio": lambda: torch.autograd.grad(theirs(images), images, weights),
        "ours": lambda: torch.autograd.grad(ours(images), images, weights),
    }
    if options.device == "cuda":
        steps["ours, as a graph in TF32"] = captured(steps["ours"])
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(timed(step, options.seconds, options.device))
    reference = statistics.fmean(times["kymatio"])
    rows = {
        name: {
            "ms": round(1000 * statistics.fmean(some), 2),
            "sd": round(1000 * statistics.stdev(some), 2),
            "times_as_fast": round(reference / statistics.fmean(some), 2),
        }
        for name, some in times.items()
    }
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, CPU"
    content = {
        "command": "python benchmarks/scattering.py (see its docstring)",
        "device": device,
        "threads": torch.get_num_threads(),
        "images": options.images,
        "size": options.size,
        "largest_difference": difference,
        "forward_and_backward": rows,
    }
    print(json.dumps(content))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        kept = [entry for entry in known if entry["device"] != device]
        options.json.write_text(json.dumps([*kept, content], indent=1) + "\n")


if __name__ == "__main__":
    main()
