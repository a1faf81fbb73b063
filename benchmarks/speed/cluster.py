"""A local cluster: images per second of decoding and features with one and two workers, beside this process.

Shards of 75 JPEG files of 256 pixels, read at 32 pixels; the features are a scattering transform, on the GPU if there
is one. `ratio`: speed relative to this process, in the same run; each worker has one thread. All times are those of a
cluster that is running; the last row has the time that it needs before, and two workers relative to one.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.timing import alternating
from sfumato.cluster import ClusterVault, connect, open_shards
from sfumato.features.scattering import Scattering
from sfumato.privacy import Budget, Plan, Release

SHARDS, PER_SHARD, STORED, PIXELS = 8, 75, 256, 32


def write_shards(folder: Path) -> None:
    """Write shards of smooth random images."""
    generator = np.random.default_rng(0)
    for number in range(SHARDS):
        with tarfile.open(folder / f"w-{number:06}.tar", "w") as archive:
            for index, small in enumerate(generator.integers(0, 255, (PER_SHARD, 32, 32, 3), np.uint8)):
                data = io.BytesIO()
                large = Image.fromarray(small).resize((STORED, STORED), Image.Resampling.BICUBIC)
                large.save(data, "JPEG", quality=90)
                member = tarfile.TarInfo(f"{index:06}.jpg")
                member.size = data.getbuffer().nbytes
                archive.addfile(member, io.BytesIO(data.getvalue()))


def work(folder: Path, cluster: Any, device: str) -> float:
    """Decode all shards, compute features of all images, sum them; return the seconds."""
    plan = Plan((Release("sum", 2, noise_multiplier=1.0),), Budget(1e6))
    transform = Scattering((PIXELS, PIXELS)).to(device)
    started = time.perf_counter()
    with open_shards(folder, labels=False, size=PIXELS, mode="rgb", cluster=cluster, workers=1) as images:
        vault = ClusterVault(images, plan, device=device)
        vault.sum(lambda batch: transform(batch).flatten(1), release="sum", bound=1.0)
    return time.perf_counter() - started


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name))
        started = time.perf_counter()
        two = connect("local", workers=2)
        two.pids()  # type: ignore[attr-defined]
        start = time.perf_counter() - started
        one = connect("local", workers=1)
        one.pids()  # type: ignore[attr-defined]
        ways = {
            "this process": lambda: work(Path(name), None, options.device),
            "one worker": lambda: work(Path(name), one, options.device),
            "two workers": lambda: work(Path(name), two, options.device),
        }
        for way in ways.values():
            way()  # workers import PyTorch and trace
        seconds = {way: statistics.median(some) for way, some in alternating(ways, options.repeats).items()}
        one.close()
        two.close()
    for way, spent in seconds.items():
        measured = {"per_second": round(SHARDS * PER_SHARD / spent, 1), "seconds": round(spent, 2)}
        measured["ratio"] = round(seconds["this process"] / spent, 2)
        yield {"job": way, "repeats": options.repeats, "measured": measured}
    ratio = round(seconds["one worker"] / seconds["two workers"], 2)
    yield {"job": "start, and two workers beside one", "measured": {"seconds": round(start, 1), "ratio": ratio}}
