"""Steps per second of `dp-lflow` beside its authors' own program, in one run on one machine, at its settings.

    python benchmarks/dp_lflow_speed.py --authors FOLDER --json benchmarks/results/dp_lflow_speed.json

FOLDER is a clone of github.com/dihjiang/DP-LFlow, run as it is: only its reading of data is replaced (by one that has
the images ready as tensors), and torchvision's pictures, which it draws before the first step and at the end. Both:
MNIST, batches of 500 images of a class, its networks. Its program trains one class; a step of ours trains all ten,
with Poisson samples of the same expected size, so that steps of ours count for ten steps of one class ("per class").
Runs alternate. The last entry is our default, which has smaller networks.
"""

from __future__ import annotations

import argparse
import contextlib
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

import numpy as np
import torch

import sfumato as sf
from sfumato.data import ImageSet

WARM_UP = 1  # steps of the authors' program
BATCH = 500
PAPER = {"code": 20, "width": 32, "couplings": 9, "hidden": 200, "lessons": 0, "warm": "none"}
OPTIONS = (
    "--dataset mnist --ae_lr 0.01 --nf_lr 0.005 --code_length 20 --ae_h 64 --nf_h 200 --num_blocks 9 --grad_clip 0.1 "
    f"--log_step 1000000 --batch_size {BATCH} --noise 1.25 --select 0"
)


def authors(folder: Path, images: ImageSet, steps: int) -> float:
    """Their training program on one class; the clock listens where it asks for single images of a batch."""
    assert images.labels is not None
    chosen = (images.labels == 0).nonzero()[:5000, 0]
    ready = torch.utils.data.TensorDataset(images.images[chosen].float() / 255, images.labels[chosen])
    reader: Any = types.ModuleType("datasets")
    reader.set_datasets = lambda *_: (ready, None, None, np.arange(len(ready)))
    pictures: Any = types.ModuleType("torchvision")
    pictures.utils = types.SimpleNamespace(make_grid=lambda *_, **__: None, save_image=lambda *_, **__: None)
    sys.path.insert(0, str(folder))
    sys.modules["datasets"], sys.modules["torchvision"] = reader, pictures
    old: Any = types.ModuleType("six")  # for Python 2; its accountant asks what a whole number is
    old.integer_types = (int,)
    sys.modules.setdefault("six", old)
    from pyvacy import sampling  # type: ignore[import-not-found]

    times: list[float] = []
    plain = sampling.get_data_loaders

    def listening(*args: Any) -> Any:
        other, loader = plain(*args)

        def batches(data: Any) -> Iterator[Any]:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            yield from loader(data)

        return other, batches

    sampling.get_data_loaders = listening
    here, arguments = Path.cwd(), sys.argv
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["program", *OPTIONS.split(), "--iterations", str(steps)]
        os.chdir(scratch)
        try:
            runpy.run_path(str(folder / "train_DPAENF_unconditional.py"))
        finally:
            os.chdir(here)
            sys.argv, sampling.get_data_loaders = arguments, plain
            sys.path.remove(str(folder))
    kept = times[WARM_UP:]
    return (len(kept) - 1) / (kept[-1] - kept[0])


def ours(images: ImageSet, steps: int, device: str, **params: Any) -> float:
    """Whole fits, with the ledger and the accounting."""
    q = BATCH * len(images.classes) / len(images)
    model = sf.create(
        "dp-lflow", epsilon=10.0, public_size=True, device=device, steps=steps, **{"sampling_prob": q, **params}
    )
    started = time.perf_counter()
    model.fit(images)
    if model.torch_device.type == "cuda":
        torch.cuda.synchronize()
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--authors", type=Path, required=True)
    parser.add_argument("--authors-steps", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    images = sf.load_images("mnist")
    classes = len(images.classes)
    speeds: dict[str, list[float]] = {"authors, one class": [], "ours, ten classes": [], "ours, default": []}
    for _ in range(options.repeats):
        speeds["authors, one class"].append(authors(options.authors.resolve(), images, options.authors_steps))
        speeds["ours, ten classes"].append(ours(images, options.steps, options.device, **PAPER))
        speeds["ours, default"].append(ours(images, options.steps, options.device))
    theirs = statistics.fmean(speeds["authors, one class"])
    rows = {
        name: {
            "steps_per_second": round(statistics.fmean(some), 3),
            "sd": round(statistics.stdev(some), 3) if len(some) > 1 else 0.0,
            "ratio": round(statistics.fmean(some) / theirs, 2),
            "ratio_per_class": round(statistics.fmean(some) * (1 if "one class" in name else classes) / theirs, 1),
        }
        for name, some in speeds.items()
    }
    print(json.dumps(rows))
    if options.json:
        content = {
            "command": "python benchmarks/dp_lflow_speed.py (see its docstring)",
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "repeats": options.repeats,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
