"""`sfumato synth` beside a busy program and under a quota of one core: seconds, and the ratio to one thread.

Three ways: one thread; the threads that sfumato chooses; and PyTorch's own choice, a thread for each core that waits by
spinning. The busy program is a loop. The quota is a control group (needs root); without one, affinity to one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.store import ROOT
from benchmarks.timing import alternating

COMMAND = ["synth", "digits", "--method", "dp-merf", "--epsilon", "2", "-n", "200", "--set", "steps=100", "--out"]
GROUPS = {"version 1": Path("/sys/fs/cgroup/cpu"), "version 2": Path("/sys/fs/cgroup")}
CORES = os.cpu_count() or 1
WAYS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "sfumato": {},
    "PyTorch": {"OMP_NUM_THREADS": str(CORES), "GOMP_SPINCOUNT": "300000"},  # the default of GNU OpenMP
}


def seconds(variables: dict[str, str], prefix: list[str]) -> float:
    """Return the time of the command with these variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "SFUMATO_"))}
    with tempfile.TemporaryDirectory() as folder:
        command = [*prefix, sys.executable, "-m", "sfumato", *COMMAND, f"{folder}/out"]
        started = time.perf_counter()
        subprocess.run(command, env={**own, "PYTHONPATH": str(ROOT), **variables}, check=True, capture_output=True)
        return time.perf_counter() - started


@contextmanager
def busy_program() -> Iterator[list[str]]:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield []
    finally:
        loop.kill()
        loop.wait()


@contextmanager
def one_core() -> Iterator[list[str]]:
    """Yield the start of a command that runs with one core: in a control group, or else by affinity."""
    for kind, mount in GROUPS.items():
        group = mount / f"sfumato-benchmark-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if kind == "version 1":
                (group / "cpu.cfs_quota_us").write_text((group / "cpu.cfs_period_us").read_text())
            else:
                (group / "cpu.max").write_text("100000 100000")
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for job, place in (("beside a busy program", busy_program), ("quota of one core", one_core)):
        with ExitStack() as stack:
            prefix = stack.enter_context(place())
            kind = "affinity" if prefix[:1] == ["taskset"] else "control group" if prefix else "no quota"
            ways = {name: partial(seconds, given, prefix) for name, given in WAYS.items()}
            times = {name: statistics.median(some) for name, some in alternating(ways, options.repeats).items()}
        ratios = {f"{name}, ratio": round(each / times["one thread"], 2) for name, each in times.items()}
        yield {"job": job, "how": kind, "measured": {name: round(each, 1) for name, each in times.items()} | ratios}
