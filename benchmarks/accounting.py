"""Seconds to calibrate noise on one core, ours against `dp_accounting`'s own search with its PLD accountant.

    python benchmarks/accounting.py [--json FILE]

Both are asked for the noise multiplier of a subsampled Gaussian. The library's accountant runs at its default grid
(1e-4), which is too coarse for many small steps: its answer is then noise that is not needed.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import dp_accounting
import torch

import sfumato as sf

SETTINGS = [(1.0, 0.001, 200_000), (10.0, 0.001, 200_000), (0.2, 0.001, 200_000), (1.0, 0.01, 10_000), (1.0, 0.1, 300)]


def library(epsilon: float, sampling_prob: float, steps: int) -> float:
    def event(noise: float) -> dp_accounting.DpEvent:
        sampled = dp_accounting.PoissonSampledDpEvent(sampling_prob, dp_accounting.GaussianDpEvent(noise))
        return dp_accounting.SelfComposedDpEvent(sampled, steps)

    return float(
        dp_accounting.calibrate_dp_mechanism(
            dp_accounting.pld.PLDAccountant,
            event,
            epsilon,
            1e-5,
            dp_accounting.LowerEndpointAndGuess(0.3, 2.0),
            tol=1e-4,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for epsilon, sampling_prob, steps in SETTINGS:
        started = time.perf_counter()
        ours = sf.noise_multiplier(epsilon=epsilon, sampling_prob=sampling_prob, steps=steps)
        middle = time.perf_counter()
        theirs = library(epsilon, sampling_prob, steps)
        ended = time.perf_counter()
        row = {
            "epsilon": epsilon,
            "sampling_prob": sampling_prob,
            "steps": steps,
            "noise_multiplier": round(ours, 4),
            "noise_multiplier_library": round(theirs, 4),
            "seconds": round(middle - started, 2),
            "ratio": round((ended - middle) / (middle - started), 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        machine = f"{platform.machine()}, one core"
        content = {"command": "python benchmarks/accounting.py", "machine": machine, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
