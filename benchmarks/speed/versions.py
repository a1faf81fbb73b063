"""Two versions of the package side by side: seconds of private gradients and of whole fits.

`--before FOLDER` is a checkout of the other version that has this benchmark. Each version runs in its own processes, in
turns; the median counts. A ratio is after / before: below 1 is faster. Fits use fast noise; the first is a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.store import ROOT

FITS = {
    "ndpdc": {"iterations": 300},
    "dp-lflow": {"warm": "none", "steps": 60},
    "pge": {"warm": "none", "steps": 60},
    "dp-mepf": {"steps": 20},
    "dp-kernel": {"steps": 200},
    "atelier": {"steps": 200},
}
RECORDS, SLOWER = {"cpu": 3000, "cuda": 60_000}, 10  # on a CPU a tenth of the steps


def measure(device: str) -> dict[str, float]:
    """Return all timings of the version that is imported."""
    import torch

    import sfumato as sf
    from benchmarks.runner import timed
    from benchmarks.speed import gradients

    options = argparse.Namespace(device=device, repeats=3)
    found = {f"{row['task']}: {row['job']}, ms": row["measured"].get("ms") for row in gradients.run(options)}
    images = sf.load_images("mnist").subset(torch.arange(RECORDS[device]))
    for key, params in FITS.items():
        if device == "cpu":
            params = {
                name: max(2, value // SLOWER) if isinstance(value, int) else value for name, value in params.items()
            }
        for _ in range(2):
            model = sf.create(key, epsilon=1.0, public_size=True, secure=False, device=device, **params)
            found[f"{key}, fit, s"] = timed(lambda model=model: model.fit(images))
    return {name: value for name, value in found.items() if value is not None}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.before is None:
        raise SystemExit("speed-versions needs --before FOLDER, a checkout of the version to compare with")
    code = f"import json; from benchmarks.speed.versions import measure; print(json.dumps(measure({options.device!r})))"
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.repeats):
        for version, folder in (("before", options.before.resolve()), ("after", ROOT)):
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            output = subprocess.run(
                [sys.executable, "-c", code], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE
            )
            for name, value in json.loads(output.stdout.splitlines()[-1]).items():
                times.setdefault(name, {"before": [], "after": []})[version].append(value)
    before = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(options.before), capture_output=True, text=True, check=False
    )
    for name, both in times.items():
        if both["before"] and both["after"]:
            medians = {version: round(statistics.median(some), 4) for version, some in both.items()}
            ratio = round(medians["after"] / medians["before"], 3)
            yield {"job": name, "before_commit": before.stdout.strip() or None, "measured": {**medians, "ratio": ratio}}
