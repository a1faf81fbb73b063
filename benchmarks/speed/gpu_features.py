"""One pass of features over a million images of 32 pixels on a GPU, with all cores decoding.

What `fit --cluster` does on a machine with a GPU and one worker for each core, without Ray: in each process a worker of
the cluster reads, hashes and decodes shards of 1,000 JPEG files, and sums features of them on the GPU that all share.
Rows: `decoder` and `features`, each alone; `pass`, where each worker goes on from shard to shard, so that some decode
while others use the GPU. All are in images per second, and each part ends after some seconds; `images` says how far
the pass came. `slower` names the part that limits it; `seconds for a million` is 10^6 by the measured rate, for the
pass and for `in turn`: all shards are decoded before the first query, as `open_shards` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.streaming import CLASSES, PIXELS, write_shard
from sfumato.cluster import ClusterVault, open_shards
from sfumato.cluster.executors import InProcess
from sfumato.cluster.worker import Entry, Failure, Partial, Task
from sfumato.data.decode import Conversion
from sfumato.data.load import check_options
from sfumato.data.shards import FileShard, Reading
from sfumato.features import Scattering, load_perceptual
from sfumato.features.embedding import ENCODER_SIDE
from sfumato.privacy import Budget, Plan, Release
from sfumato.threads import usable_cores

MILLION, LIMIT = 1_000_000, 72  # seconds of all parts together
SHARDS = 16  # files; they are read again and again
SIZES = {"cuda": (MILLION, 1_000), "cpu": (400, 100)}  # images of the pass, and of a shard
SECONDS = {"decoder": 4, "threads": 2, "features": 2.5, "pass": 10}  # longest time of each part
KINDS = {"encoder": "EfficientNet-Lite0 at 128 pixels", "scattering": "scattering, 15,552 numbers"}


def feature(kind: str, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a feature map; both are those of methods."""
    if kind == "scattering":
        transform = Scattering((PIXELS, PIXELS)).to(device)

        def rows(images: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = transform(images)
            return found.flatten(1)

        return rows
    encoder = load_perceptual("effnet_lite0", device)

    def last(images: torch.Tensor) -> torch.Tensor:
        enlarged = torch.nn.functional.interpolate(images, (ENCODER_SIDE, ENCODER_SIDE), mode="bilinear")
        return encoder(enlarged)[-1].float().mean((2, 3))

    return last


class Recording(InProcess):
    """Keeps the query that a vault sends."""

    task: Task

    def total(self, task: Task, entries: Any) -> Any:
        self.task = task
        return super().total(task, entries)


class Part:
    """One worker of a cluster with some shards. Each call returns how many images it came to, and its seconds."""

    def __init__(self, names: list[str], device: str) -> None:
        torch.set_num_threads(1)
        self._names, self._device = names, device
        self._tasks: dict[str, Task] = {}
        self._executor = Recording()

    def prepare(self, kind: str) -> tuple[int, float]:
        """Trace a query as the driver does, and compute it once."""
        plan = Plan((Release("sum", 2, noise_multiplier=1.0),), Budget(1e6))
        executor, name = self._executor, self._names[0]
        with open_shards(name, cluster=executor, classes=CLASSES, size=PIXELS, mode="rgb", workers=1) as images:
            vault = ClusterVault(images, plan, device=self._device)
            vault.sum(feature(kind, self._device), release="sum", bound=1.0)
        self._tasks[kind] = self._executor.task
        return 0, 0.0

    def decoder(self, count: int, seconds: float, threads: int = 1) -> tuple[int, float]:
        return self._until(count, seconds, lambda number: self._load(number, threads).records)

    def features(self, kind: str, seconds: float) -> tuple[int, float]:
        held = self._load(0)
        return self._until(MILLION, seconds, lambda number: self._sum(kind, held))  # noqa: ARG005

    def both(self, kind: str, count: int, seconds: float) -> tuple[int, float]:
        return self._until(count, seconds, lambda number: self._sum(kind, self._load(number)))

    def _until(self, count: int, seconds: float, work: Callable[[int], int]) -> tuple[int, float]:
        """Work shard by shard until there are so many images or the time is over."""
        done, number, started = 0, 0, time.perf_counter()
        while done < count and time.perf_counter() - started < seconds:
            done, number = done + work(number), number + 1
        spent = time.perf_counter() - started
        self._executor.forget("part")
        return done, spent

    def _load(self, number: int, threads: int = 1) -> Entry:
        conversion = Conversion(PIXELS, "rgb", None, None)
        options = check_options(conversion, "train", True, "raise", CLASSES, None, None, "combine")
        name = self._names[number % len(self._names)]
        entry = Entry("part", number, FileShard(name, name), Reading(options, conversion, threads), "raise")
        for loaded in self._executor.load([entry]):
            if isinstance(loaded, Failure):
                raise RuntimeError(f"{loaded.kind}: {loaded.message}")
            entry = replace(entry, sha256=loaded.sha256, records=loaded.records)
        return entry

    def _sum(self, kind: str, entry: Entry) -> int:
        for partial in self._executor.total(self._tasks[kind], [entry]):
            if not isinstance(partial, Partial):
                raise RuntimeError(partial.kind)
        return entry.records


def serve(calls: Connection, names: list[str], device: str) -> None:
    """Answer calls to a `Part` until there are no more."""
    part = Part(names, device)
    while given := calls.recv():
        method, arguments = given
        calls.send(getattr(part, method)(*arguments))


class Parts:
    """A process for each core."""

    def __init__(self, folder: Path, cores: int, device: str) -> None:
        context, names = multiprocessing.get_context("spawn"), sorted(str(path) for path in folder.iterdir())
        self._calls = []
        for number in range(cores):
            ours, theirs = context.Pipe()
            own = names[number % len(names) :] + names[: number % len(names)]
            context.Process(target=serve, args=(theirs, own, device), daemon=True).start()
            theirs.close()  # a process that dies ends the run
            self._calls.append(ours)

    def __call__(self, method: str, *arguments: Any, some: int | None = None) -> tuple[int, float]:
        """Call all processes, or some; return the number of images and the seconds of the slowest."""
        for calls in self._calls[:some]:
            calls.send((method, arguments))
        found = [calls.recv() for calls in self._calls[:some]]
        return sum(done for done, _ in found), max(spent for _, spent in found)

    def close(self) -> None:
        for calls in self._calls:
            calls.send(None)


def rate(found: tuple[int, float]) -> float:
    return found[0] / found[1]


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    begun, cores = time.perf_counter(), usable_cores()
    count, per_shard = SIZES[options.device]
    count = options.images or count
    own = -(-count // cores)  # images of each process
    load_perceptual("effnet_lite0")  # raises at once if there are no weights
    with tempfile.TemporaryDirectory() as name:
        for number in range(SHARDS if options.device == "cuda" else 2):
            write_shard(Path(name) / f"w-{number:06}.tar", number, per_shard)
        parts = Parts(Path(name), cores, options.device)
        parts("decoder", 1, 1)  # imports
        decoder = rate(parts("decoder", MILLION, SECONDS["decoder"]))
        threads = rate(parts("decoder", MILLION, SECONDS["threads"], cores, some=1))
        measured: dict[str, Any] = {
            "processes": round(decoder),
            "one process with a thread for each core": round(threads),
        }
        yield {"job": "decoder, images per second", "cores": os.cpu_count(), "measured": measured}
        for kind, words in KINDS.items():
            started = time.perf_counter()
            if options.job and kind not in options.job:
                continue
            parts("prepare", kind)
            alone = rate(parts("features", kind, SECONDS["features"], some=1))
            shared = rate(parts("features", kind, SECONDS["features"]))
            both = parts("both", kind, own, SECONDS["pass"])
            features = max(alone, shared)
            measured = {
                "decoder": round(decoder),
                "features, one process": round(alone),
                "features, all processes": round(shared),
                "pass": round(rate(both)),
                "ratio of pass to slower": round(rate(both) / min(decoder, features), 2),
                "images": both[0],
                "seconds": round(both[1], 1),
                "seconds for a million": round(MILLION / rate(both), 1),
                "seconds for a million, in turn": round(MILLION / decoder + MILLION / features, 1),
            }
            slower = "decoder" if decoder < features else "GPU" if options.device == "cuda" else "features"
            yield {
                "job": f"features on a GPU: {words}",
                "cores": os.cpu_count(),
                "slower": slower,
                "measured": measured,
            }
            spent = time.perf_counter() - started
            if options.device == "cuda" and time.perf_counter() - begun + spent > LIMIT:
                break  # there is no time for another kind
        parts.close()
