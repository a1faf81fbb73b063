"""Images per second of `load_images` on a folder, beside a sequential Pillow loop that does the same work.

CIFAR-10 images are enlarged to 256 pixels and saved as JPEG and PNG; both readers reduce them to 32 pixels. The second
loop also uses JPEG's decoding at reduced size ("draft"). `cores_used`: CPU time over wall time of `load_images`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.timing import alternating
from sfumato.data import ImageSet, load_images

COUNT, SIZE, PIXELS = 1000, 32, 256


def plain_loop(folder: Path, draft: bool) -> np.ndarray:
    pictures = []
    for path in sorted(folder.iterdir()):
        with Image.open(path) as picture:
            if draft:
                picture.draft("RGB", (2 * SIZE, 2 * SIZE))
            pictures.append(np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX)))
    return np.stack(pictures).transpose(0, 3, 1, 2)


def compare(folder: Path, repeats: int) -> dict[str, float]:
    readers = {
        "load_images": lambda: load_images(folder, labels=False, size=SIZE, mode="rgb").images.numpy(),
        "plain_loop": lambda: plain_loop(folder, draft=False),
        "plain_loop_with_draft": lambda: plain_loop(folder, draft=True),
    }
    if not np.array_equal(readers["load_images"](), readers["plain_loop_with_draft"]()):
        raise SystemExit("the readers disagree, so their speeds cannot be compared")
    busy: dict[str, list[float]] = {name: [] for name in readers}

    def seconds(name: str) -> float:
        started, busy_before = time.perf_counter(), time.process_time()
        readers[name]()
        spent = time.perf_counter() - started
        busy[name].append((time.process_time() - busy_before) / spent)
        return spent

    times = alternating({name: lambda name=name: seconds(name) for name in readers}, repeats)
    speed = {name: round(COUNT / statistics.median(some), 1) for name, some in times.items()}
    ratios = {"ratio": "plain_loop", "ratio_with_draft": "plain_loop_with_draft"}
    speed |= {key: round(speed["load_images"] / speed[other], 2) for key, other in ratios.items()}
    return speed | {"cores_used": round(statistics.fmean(busy["load_images"]), 2)}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    images: ImageSet = load_images("cifar10").subset(np.arange(COUNT))
    for kind in ("jpg", "png"):
        with tempfile.TemporaryDirectory() as name:
            for number, pixels in enumerate(images.images.permute(0, 2, 3, 1).numpy()):
                large = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
                large.save(Path(name) / f"{number:06}.{kind}", quality=90)
            yield {"job": kind, "measured": compare(Path(name), options.repeats)}
