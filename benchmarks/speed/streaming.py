"""Peak memory of one pass over images of 32 pixels in shards, and what keeping decoded pixels and features saves.

Jobs `memory`: WebDataset shards of 5,000 colour images, one process, `open_shards`, then counts and
a sum over mapped features; peak resident memory of the process. It must not grow with the number of images. Job
`again`: a second query on pixels that were decoded to a file, beside reading and decoding the shards again; and a
second query on features kept in a file, beside computing them again.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.cluster import ClusterVault, open_shards
from sfumato.cluster.worker import Worker
from sfumato.features.scattering import Scattering
from sfumato.privacy import Budget, Plan, Release

SIZES, PER_SHARD, PIXELS, CLASSES = (100_000, 1_000_000), 5_000, 32, 10
RELEASES = (Release("counts", noise_multiplier=1.0), Release("sum", 2, noise_multiplier=1.0))
WEIGHTS = torch.randn(3 * PIXELS**2, 64, generator=torch.Generator().manual_seed(0)) / 50  # of a map


@cache
def jpegs() -> list[bytes]:
    """Return the files of a shard."""
    found, generator = [], np.random.default_rng(0)
    for small in generator.integers(0, 255, (PER_SHARD, 8, 8, 3), np.uint8):
        data = io.BytesIO()
        Image.fromarray(small).resize((PIXELS, PIXELS), Image.Resampling.NEAREST).save(data, "JPEG", quality=80)
        found.append(data.getvalue())
    return found


def write_shard(path: Path, number: int, images: int = PER_SHARD) -> None:
    """Write a shard of JPEG files. Shards have the same images, to save time here, and differ in names and labels."""
    with tarfile.open(path, "w") as archive:
        for index, jpeg in enumerate(jpegs()[:images]):
            for suffix, content in (("jpg", jpeg), ("cls", str((index + number) % CLASSES).encode())):
                member = tarfile.TarInfo(f"{number:06}-{index:06}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def projection(images: torch.Tensor) -> torch.Tensor:
    return torch.tanh(images.flatten(1) @ WEIGHTS)


def rows(mapped: torch.Tensor) -> torch.Tensor:
    return torch.sin(mapped)


def one_pass(folder: str) -> dict[str, Any]:
    """Run the queries on the shards of a folder, in this process, and return time and peak memory."""
    started = time.perf_counter()
    with open_shards(folder, classes=CLASSES, size=PIXELS, mode="rgb") as images:
        vault = ClusterVault(images, Plan(RELEASES, Budget(1e6)))
        decoded = time.perf_counter() - started
        vault.counts()
        vault.map(projection).sum(rows, release="sum", bound=20.0, by_class=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = time.perf_counter() - started
    return {"peak_mib": round(peak), "seconds": round(spent, 1), "seconds_decoding": round(decoded, 1)}


def again(folder: Path) -> dict[str, float]:
    """Return seconds of a repeated query: from kept pixels and features, and from the shards."""
    with open_shards(folder, classes=CLASSES, size=PIXELS, mode="rgb") as images:
        transform = Scattering((PIXELS, PIXELS))
        vault = ClusterVault(images, Plan((Release("sum", 100, noise_multiplier=1.0),), Budget(1e6)))
        mapped = vault.map(transform)
        found = {}
        for name, source in (("pixels", vault), ("features", mapped)):
            function = (
                (lambda batch: batch.flatten(1)) if name == "pixels" else (lambda batch: batch.flatten(1)[:, :64])
            )
            source.sum(function, release="sum", bound=1.0)
            started = time.perf_counter()
            source.sum(function, release="sum", bound=1.0)
            found[f"{name} kept"] = time.perf_counter() - started
            images.executor._worker = Worker()  # type: ignore[attr-defined]  # holds nothing
            started = time.perf_counter()
            source.sum(function, release="sum", bound=1.0)
            found[f"{name} again"] = time.perf_counter() - started
    ratios = {f"{name}, ratio": found[f"{name} again"] / found[f"{name} kept"] for name in ("pixels", "features")}
    return {name: round(value, 2) for name, value in (found | ratios).items()}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    with tempfile.TemporaryDirectory() as name:
        folder, peaks = Path(name), []
        for count in SIZES:
            for number in range(len(list(folder.iterdir())), count // PER_SHARD):
                write_shard(folder / f"w-{number:06}.tar", number)
            command = [sys.executable, "-c", f"{PROGRAM}print(json.dumps(one_pass({name!r})))"]
            measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            peaks.append(measured["peak_mib"])
            yield {"job": f"memory, {count} images", "measured": measured | {"ratio": round(peaks[-1] / peaks[0], 3)}}
        for path in sorted(folder.iterdir())[1:]:
            path.unlink()
        yield {"job": f"again, {PER_SHARD} images", "measured": again(folder)}


PROGRAM = "import json\nfrom benchmarks.speed.streaming import one_pass\n"
