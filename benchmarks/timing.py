"""Run a speed benchmark. Each module in `benchmarks/speed/` has `run(options)`, which yields rows.

The rows of a run replace earlier rows of the same device; nothing is resumed. A module that compares with the authors'
program needs `--authors FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.runner import about_run, device_name, module_of
from benchmarks.store import load, save


def run(table: str, options: argparse.Namespace) -> int:
    """Run a speed benchmark and save its rows."""
    module = module_of(table)
    if getattr(module, "AUTHORS", None) and options.authors is None:
        print(f"{table} needs --authors FOLDER, a clone of {module.AUTHORS}")
        return 2
    device = device_name(options.device)
    options.device = "cpu" if device.endswith("CPU") else "cuda"
    content = load(table, options.results)
    rows = [row for row in content["rows"] if row.get("device", content["device"]) != device]
    for row in rows:
        row.setdefault("device", content["device"])
    head = {**about_run(f"python -m benchmarks {table}", options), "seeds": None}
    for row in module.run(options):
        rows.append({"device": device, **row})
        print(json.dumps(row), flush=True)
        save(table, {**head, "rows": rows}, options.results)  # a later part may run out of time
    return 0


def alternating(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call each function in turn, `repeats` times, and return their values."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    return found


def beside_authors(method: str, speeds: Mapping[str, list[float]], repeats: int) -> list[dict[str, Any]]:
    """Return a row per program: steps per second, and the ratio to the authors' program."""
    theirs = statistics.fmean(speeds["authors"])
    rows = []
    for job, some in speeds.items():
        mean, sd = statistics.fmean(some), statistics.stdev(some) if len(some) > 1 else None
        measured = {
            "per_second": round(mean, 3),
            "sd": None if sd is None else round(sd, 3),
            "ratio": round(mean / theirs, 2),
        }
        rows.append({"job": job, "method": method, "repeats": repeats, "measured": measured})
    return rows


def wait(device: str | torch.device) -> None:
    """Wait until the device has done all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
