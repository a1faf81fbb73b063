"""One pass of features over a million images of 32 pixels on a GPU, with all cores decoding.

`decode`: images per second of reading, hashing and decoding WebDataset shards to files (`decode_shard`, what a worker
does), one process for each core; the same 4 shards of 5,000 JPEG files (`speed-streaming`) again and again.
`features`: images per second of `Vault.sum` over scattering features, clipped by row. `slower` names the part that
limits a pass in which both run at once. `pass, seconds`: a million images at that rate. No Ray is needed. Where a part
would take more than its share of a minute, it stops there, and `images` says how far it came.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.streaming import CLASSES, PER_SHARD, PIXELS, write_shard
from benchmarks.timing import wait
from sfumato.data import ImageSet
from sfumato.data.decode import Conversion
from sfumato.data.load import check_options
from sfumato.data.shards import FileShard, Reading, decode_shard
from sfumato.engine import Performance
from sfumato.features.scattering import Scattering
from sfumato.privacy import Budget, Plan, Release, Vault
from sfumato.threads import usable_cores

IMAGES = {"cuda": 1_000_000, "cpu": 2_000}
SHARDS, SECONDS = 4, 12  # shards of the pass, written before it; longest time of each part
ON_DEVICE = {"cuda": 20_000, "cpu": 250}  # images of one query


def decode_until(given: tuple[list[str], int, float]) -> int:
    """Decode shards in turn until there are so many images or the time is over; return their number."""
    names, count, seconds = given
    torch.set_num_threads(1)
    conversion = Conversion(PIXELS, "rgb", None, None)
    options = check_options(conversion, "train", True, "raise", CLASSES, None, None, "combine")
    reading, done, started = Reading(options, conversion, 1), 0, time.perf_counter()
    while done < count and time.perf_counter() - started < seconds:
        name = names[done // PER_SHARD % len(names)]
        done += len(decode_shard(FileShard(name, name), reading, "raise").pixels)
    return done


def decoding(folder: Path, count: int, cores: int) -> tuple[int, float]:
    """Return the number of images that were decoded on all cores, and the seconds."""
    names = [str(path) for path in sorted(folder.iterdir())]
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(decode_until, [(names, 1, SECONDS)] * cores, chunksize=1)  # imports
        started = time.perf_counter()
        done = pool.map(decode_until, [(names, -(-count // cores), SECONDS)] * cores, chunksize=1)
        return sum(done), time.perf_counter() - started


def features(count: int, device: str) -> tuple[int, float]:
    """Return the number of images whose features were summed, and the seconds."""
    transform, size = Scattering((PIXELS, PIXELS)).to(device), min(count, ON_DEVICE[device])
    pixels = torch.randint(256, (size, 3, PIXELS, PIXELS), dtype=torch.uint8)
    images = ImageSet(pixels, torch.arange(size) % CLASSES, [str(name) for name in range(CLASSES)])
    queries = -(-count // size)
    plan = Plan((Release("sum", queries + 1, noise_multiplier=1.0),), Budget(1e6))
    vault = Vault(images, plan, device=device, performance=Performance(batch_size=512))

    def rows(batch: torch.Tensor) -> torch.Tensor:
        return transform(batch).flatten(1)

    vault.sum(rows, release="sum", bound=1.0)  # traced
    wait(device)
    done, started = 0, time.perf_counter()
    while done < queries and time.perf_counter() - started < SECONDS:
        vault.sum(rows, release="sum", bound=1.0)
        wait(device)
        done += 1
    return done * size, time.perf_counter() - started


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    count, cores = IMAGES[options.device], usable_cores()
    with tempfile.TemporaryDirectory() as name:
        for number in range(SHARDS if options.device == "cuda" else 1):
            write_shard(Path(name) / f"w-{number:06}.tar", number)
        found = {"decode": decoding(Path(name), count, cores), "features": features(count, options.device)}
    rates = {part: images / seconds for part, (images, seconds) in found.items()}
    slower = min(rates, key=rates.__getitem__)
    measured: dict[str, Any] = {part: round(rate) for part, rate in rates.items()}
    measured |= {f"images, {part}": images for part, (images, _) in found.items()}
    measured |= {f"{part}, seconds": round(seconds, 1) for part, (_, seconds) in found.items()}
    measured["pass, seconds"] = round(1_000_000 / rates[slower], 1)
    yield {"job": "a million images", "cores": os.cpu_count(), "slower": slower, "measured": measured}
