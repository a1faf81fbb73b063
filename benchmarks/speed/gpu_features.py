"""One pass of features over a million images of 32 pixels on a GPU, with all cores decoding.

Images per second of each part, in one process; no Ray is needed.
Shards of 5,000 JPEG files (`speed-streaming`). `decode`: reading, hashing and decoding to a file, in a thread for each
core. `features`: scattering features of all images, clipped and summed, from the decoded file. `slower`: the part that
limits a pass; `both` is the rate of one after the other, as the vault does it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed.streaming import CLASSES, PER_SHARD, PIXELS, write_shard
from sfumato.cluster import ClusterVault, open_shards
from sfumato.engine import Performance
from sfumato.features.scattering import Scattering
from sfumato.privacy import Budget, Plan, Release
from sfumato.threads import usable_cores

IMAGES = {"cuda": 1_000_000, "cpu": 10_000}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    count = IMAGES[options.device]
    with tempfile.TemporaryDirectory() as name:
        for number in range(count // PER_SHARD):
            write_shard(Path(name) / f"w-{number:06}.tar", number)
        transform = Scattering((PIXELS, PIXELS)).to(options.device)
        started = time.perf_counter()
        with open_shards(name, classes=CLASSES, size=PIXELS, mode="rgb", workers=usable_cores()) as images:
            decoding = time.perf_counter() - started
            plan = Plan((Release("sum", 2, noise_multiplier=1.0),), Budget(1e6))
            vault = ClusterVault(images, plan, device=options.device, performance=Performance(batch_size=512))
            started = time.perf_counter()
            vault.sum(lambda batch: transform(batch).flatten(1), release="sum", bound=1.0, by_class=True)
            features = time.perf_counter() - started
    rates = {"decode": count / decoding, "features": count / features, "both": count / (decoding + features)}
    measured: dict[str, Any] = {part: round(rate) for part, rate in rates.items()}
    yield {
        "job": f"{count} images",
        "cores": os.cpu_count(),
        "slower": min(("decode", "features"), key=rates.__getitem__),
        "measured": measured,
    }
