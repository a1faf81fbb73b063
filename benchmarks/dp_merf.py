"""DP-MERF on real data: downstream accuracy at several budgets, mean and standard deviation over seeds.

    python benchmarks/dp_merf.py --data mnist fashion-mnist --epsilon 0.2 1 10 inf --seeds 3 --workers 6 \\
        --json benchmarks/results/dp_merf.json --pictures DIR

The protocol: fit on the training split, draw 60,000 images, train the small CNN on them alone, test once on the real
test split. Every seed draws its own frequencies, weights, samples and classifier; privacy noise is fresh anyway.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.evaluate import downstream_accuracy


def run(name: str, epsilon: float, seed: int, device: str, threads: int, pictures: str | None) -> dict[str, Any]:
    torch.set_num_threads(threads)
    images, test = sf.load_images(name), sf.load_images(name, split="test")
    model = sf.create("dp-merf", epsilon=epsilon, seed=seed, device=device)
    started = time.perf_counter()
    model.fit(images)
    fitted = time.perf_counter()
    synthetic = model.sample(60_000, seed=seed)
    sampled = time.perf_counter()
    accuracy = downstream_accuracy(synthetic, test, seeds=(seed,), device=model.torch_device).mean
    if pictures and seed == 0:
        contact_sheet(synthetic, Path(pictures) / f"dp-merf_{name}_{epsilon:g}.png")
    row = {
        "data": name,
        "epsilon": "inf" if math.isinf(epsilon) else epsilon,
        "seed": seed,
        "accuracy": round(accuracy, 2),
        "certified": model.certificate_.epsilon,
        "fit_s": round(fitted - started, 1),
        "sample_s": round(sampled - fitted, 1),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[0.2, 1.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time; timings then share the device")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures")
    options = parser.parse_args()

    jobs = [(d, e, s) for s in range(options.seeds) for d in options.data for e in options.epsilon]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        waiting = [pool.submit(run, *job, options.device, options.threads, options.pictures) for job in jobs]
        rows = [job.result() for job in waiting]

    summary = []
    for name in options.data:
        for epsilon in options.epsilon:
            label = "inf" if math.isinf(epsilon) else epsilon
            values = [row["accuracy"] for row in rows if row["data"] == name and row["epsilon"] == label]
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = round(statistics.fmean(values), 2)
            summary.append({"data": name, "epsilon": label, "mean": mean, "sd": round(sd, 2)})
            print(f"{name:>15}  epsilon {label:>4}: {mean:.1f} ± {sd:.1f}")
    if options.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, CPU"
        content = {
            "command": "python benchmarks/dp_merf.py (see its docstring)",
            "protocol": "small CNN on 60,000 synthetic images, tested once on the real test split, delta 1e-5",
            "device": machine,
            "workers": options.workers,
            "torch": torch.__version__,
            "summary": summary,
            "runs": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
