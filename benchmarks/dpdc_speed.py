"""NDPDC beside its authors' own program, on one GPU in one run: iterations per second at the paper's settings.

    python benchmarks/dpdc_speed.py --authors FOLDER --data mnist --json benchmarks/results/dpdc_speed.json

FOLDER is a clone of github.com/SecMLSys/Differentially-Private-Dataset-Condensation, run as it is: only its reading of
data and of the GPU's number is replaced. Settings of both: L = M = 50, G = sigma = 1, augmentation. Ours goes through
the vault, with its ledger, samples and noise; both in the paper's form and in our default one. Each timing takes the
iterations after a warm-up; runs alternate, and the figure is the mean over them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.data import ImageSet
from sfumato.methods.condensation import Matcher

WARM_UP = 20


class Clock:
    """Seconds per iteration, from calls every `stride` of them."""

    def __init__(self, stride: int) -> None:
        self.stride, self.times = stride, list[float]()

    def tick(self, *_: Any) -> str:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return ""

    def per_second(self) -> float:
        kept = self.times[WARM_UP // self.stride :]
        return self.stride * (len(kept) - 1) / (kept[-1] - kept[0])


def authors(folder: Path, images: ImageSet, iterations: int) -> float:
    """Their main loop; it prints the time every ten iterations, and that is where the clock listens."""
    sys.path.insert(0, str(folder))
    sys.modules["setGPU"] = types.ModuleType("setGPU")
    program, utils = importlib.import_module("main_dpdc"), importlib.import_module("utils")
    pixels, labels = images.images.float() / 127.5 - 1, images.labels
    assert labels is not None
    whole = utils.TensorDataset(pixels, labels)
    few = torch.utils.data.DataLoader(utils.TensorDataset(pixels[:100], labels[:100]), batch_size=100)
    channel, *size = images.shape
    found = (
        channel,
        tuple(size),
        len(images.classes),
        images.classes,
        [0.5] * channel,
        [0.5] * channel,
        whole,
        None,
        few,
    )
    clock = Clock(10)
    strategy = "color_crop_cutout_scale_rotate"
    program.get_dataset = lambda *_: found
    program.get_time = clock.tick
    options = f"--ipc 50 --num_exp 1 --epoch_eval_train 0 --eval_mode none --init noise --Iteration {iterations}"
    sys.argv = [
        "main_dpdc.py",
        *options.split(),
        "--dsa_strategy",
        strategy,
        "--save_path",
        "/tmp/authors",
        "--data_path",
        "/tmp",
    ]
    plain, sys.stdout = sys.stdout, open("/dev/null", "w")  # noqa: SIM115
    try:
        program.main()
    finally:
        sys.stdout.close()
        sys.stdout = plain
    clock.times = clock.times[1:]  # the first one says that training begins
    return clock.per_second()


def ours(images: ImageSet, iterations: int, **options: Any) -> float:
    clock = Clock(1)
    plain = Matcher.pull

    def pull(self: Matcher, *args: Any) -> None:
        plain(self, *args)
        if self._done % 10 == 0:
            clock.tick()

    clock.stride = 10
    Matcher.pull = pull  # type: ignore[method-assign]
    settings = {"epsilon": 1000.0, "public_size": True, "group_size": 50, "noise_multiplier": 1.0, **options}
    try:
        sf.create("ndpdc", iterations=iterations, **settings).fit(images)
    finally:
        Matcher.pull = plain  # type: ignore[method-assign]
    return clock.per_second()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=["mnist"])
    parser.add_argument(
        "--iterations", type=int, default=60, help="of the authors' program; ours takes twenty times that"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.data:
        images = sf.load_images(name)
        speeds: dict[str, list[float]] = {"authors": [], "ours, paper's form": [], "ours, default": []}
        for _ in range(options.repeats):
            speeds["authors"].append(authors(options.authors, images, options.iterations))
            speeds["ours, paper's form"].append(ours(images, 20 * options.iterations, residual=False, bound=1.0))
            speeds["ours, default"].append(ours(images, 20 * options.iterations))
        theirs = statistics.fmean(speeds["authors"])
        row: dict[str, Any] = {"data": name}
        for key, values in speeds.items():
            mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
            row[key] = {"per_second": round(mean, 2), "sd": round(sd, 2), "ratio": round(mean / theirs, 2)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        content = {
            "command": "python benchmarks/dpdc_speed.py (see its docstring)",
            "device": torch.cuda.get_device_name(),
            "iterations": options.iterations,
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
