"""Steps per second of `dp-kernel` beside its authors' own program, on one GPU in one run, at that program's settings.

    python benchmarks/dp_kernel_speed.py --authors FOLDER --json benchmarks/results/dp_kernel_speed.json

FOLDER is a clone of github.com/dihjiang/DP-kernel, run as it is: only its reading of data is replaced (by one that has
the images ready as tensors, which spares it decoding and resizing). Both: MNIST at 32 pixels, batches of 60, five
Gaussian kernels on pixels, the paper's generator. Theirs leaks; ours is timed in the sound form, whole fits with all
releases, and in the published one. Runs alternate. The last entry is our default at 28 pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.data import ImageSet

WARM_UP = 50
PAPER = {"network": "mmd-gan", "latent": 10, "hidden": 10, "width": 64, "batch_size": 60}


def authors(folder: Path, images: ImageSet, steps: int) -> float:
    """Their main program; the clock listens where it asks for a batch."""
    assert images.labels is not None
    ready = torch.utils.data.TensorDataset(images.images.float() / 127.5 - 1, images.labels)
    reader = types.ModuleType("datasets")
    reader.set_datasets = lambda *_: (ready, None)  # type: ignore[attr-defined]
    sys.path.insert(0, str(folder))
    sys.modules["datasets"] = reader
    if importlib.util.find_spec("torchvision") is None:  # it only writes their pictures
        sys.modules.update({name: types.ModuleType(name) for name in ("torchvision", "torchvision.utils")})
    from pyvacy import sampling  # type: ignore[import-not-found]

    times: list[float] = []
    plain = sampling.get_data_loaders

    def listening(*args: Any) -> Any:
        loader, other = plain(*args)

        def batches(data: Any) -> Iterator[Any]:
            for batch in loader(data):
                torch.cuda.synchronize()
                times.append(time.perf_counter())
                yield batch

        return batches, other

    sampling.get_data_loaders = listening
    options = f"--dataset mnist --max_iter {steps} --vis_step 1000000 --sigma_list 1 2 4 8 16 --noise 0.6"
    here, arguments = Path.cwd(), sys.argv
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["program", *options.split(), "--experiment", scratch]
        os.chdir(scratch)
        try:
            runpy.run_path(str(folder / "DPCondmmdG_kernel_prod.py"))
        finally:
            os.chdir(here)
            sys.argv, sampling.get_data_loaders = arguments, plain
    kept = times[WARM_UP:]
    return (len(kept) - 1) / (kept[-1] - kept[0])


def ours(images: ImageSet, steps: int, **params: Any) -> float:
    model = sf.create("dp-kernel", epsilon=10.0, steps=steps, public_size=True, device="cuda", **params)
    torch.cuda.synchronize()
    started = time.perf_counter()
    model.fit(images)
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300, help="of the authors' program")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    large, plain = sf.load_images("mnist", size=32), sf.load_images("mnist")
    pixels = {**PAPER, "scattering_share": 0.0, "features": 500}
    speeds: dict[str, list[float]] = {"authors": [], "ours, sound": [], "ours, as published": [], "ours, default": []}
    for _ in range(options.repeats):
        speeds["authors"].append(authors(options.authors.resolve(), large, options.steps))
        speeds["ours, sound"].append(ours(large, 10 * options.steps, **pixels))
        speeds["ours, as published"].append(ours(large, 3 * options.steps, form="published", **PAPER))
        speeds["ours, default"].append(ours(plain, 2000))
    theirs = statistics.fmean(speeds["authors"])
    rows = {
        name: {
            "steps_per_second": round(statistics.fmean(some), 1),
            "sd": round(statistics.stdev(some), 1) if len(some) > 1 else 0.0,
            "ratio": round(statistics.fmean(some) / theirs, 2),
        }
        for name, some in speeds.items()
    }
    print(json.dumps(rows))
    if options.json:
        content = {
            "command": "python benchmarks/dp_kernel_speed.py (see its docstring)",
            "device": torch.cuda.get_device_name(),
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
