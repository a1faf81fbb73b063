"""Many jobs on one device: worker processes, rows that are kept as they come, and going on where it stopped.

A job is a dict of plain values; a program makes rows of one with its own `run`. A row says what its job was, and has an
`accuracy`, or another `value`; rows of a group that differ only in their seed are summed up together.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import sfumato as sf
from sfumato.data import ImageSet

DATA = ("mnist", "fashion-mnist", "cifar10", "celeba", "mednist")

Job = dict[str, Any]
Row = dict[str, Any]
Run = Callable[[Job, argparse.Namespace], list[Row]]
Group = Callable[[Row], str]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all of these programs have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where mednist.npz and celeba.npz are")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no job after that")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[], help="of all budgets, these")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pictures", type=Path)
    return parser


def load(name: str, folder: Path) -> tuple[ImageSet, ImageSet]:
    """Training and test split of a named set, or of a file in the folder."""
    source = str(folder / f"{name}.npz") if (folder / f"{name}.npz").exists() else name
    return sf.load_images(source), sf.load_images(source, split="test")


def known(target: Path) -> list[Row]:
    """Rows that a file holds already."""
    rows: list[Row] = json.loads(target.read_text())["rows"] if target.exists() else []
    return rows


def summary(rows: list[Row], group: Group) -> dict[str, dict[str, Any]]:
    """Mean and standard deviation over seeds."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append(row)
    found = {}
    for name, some in sorted(groups.items()):
        values = [row["accuracy"] if "accuracy" in row else row["value"] for row in some]
        found[name] = {
            "mean": round(statistics.fmean(values), 3),
            "sd": round(statistics.stdev(values), 3) if len(values) > 1 else None,
            "seeds": len(values),
            "certified": some[0]["certified"],
        }
    return found


def carry_out(todo: list[Job], rows: list[Row], run: Run, group: Group, options: argparse.Namespace) -> list[Row]:
    """Runs the jobs and adds their rows to those there are; the file is written whenever a job is done."""
    if options.epsilon:
        todo = [job for job in todo if job["params"]["epsilon"] in options.epsilon]
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    workers = min(options.workers, len(todo))
    kept = json.loads(options.json.read_text()) if options.json.exists() else {}  # notes of an earlier run
    for job in [*todo, *[None] * workers]:
        waiting.put(job)
    deadline = time.time() + options.seconds
    for _ in range(workers):
        context.Process(target=_work, args=(waiting, done, run, options, deadline), daemon=True).start()
    while workers:
        made = done.get()
        if made is None:
            workers -= 1
            continue
        rows = rows + made
        print("\n".join(json.dumps(row) for row in made), flush=True)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, CPU"
        content = kept | {"command": "see the docstring of the program of this name", "device": device}
        options.json.write_text(json.dumps({**content, "summary": summary(rows, group), "rows": rows}, indent=1) + "\n")
    return rows


def _work(waiting: Any, done: Any, run: Run, options: argparse.Namespace, deadline: float) -> None:
    torch.set_num_threads(options.threads)
    try:
        while (job := waiting.get()) is not None and time.time() < deadline:
            done.put(run(job, options))
    finally:
        done.put(None)
