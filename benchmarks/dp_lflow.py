"""`dp-lflow` on real data: accuracy, out-of-distribution detection, ablations, 256 pixels; can be stopped.

    python benchmarks/dp_lflow.py --folder DATA --workers 2 --json benchmarks/results/dp_lflow.json --pictures DIR

Tables: `budget` (one model per class; a figure without and one with smoothing and sharpening, and for MNIST and
Fashion-MNIST the AUROC of the paper's Table 3: each class against the others, averaged), `taught` (nothing but the warm
start, on nearly all of the budget: what is not due to private gradients), `cold` (without a warm start), `conditional`
(without partitioning: the paper's Table 4), `pixels` (a flow without autoencoder: Section 4.5.1), `large` (brain MRI
and faces at 256 pixels, cold: time and memory are in the rows).

The protocol: fit through the vault with class sizes declared public, draw 60,000 images (or as many as there are
private ones, if fewer), train classifiers on them, test once on the real test split. Each seed has its own initial
weights and classifier; privacy noise is fresh anyway. Rows that the JSON file holds are not made again.

DATA is a folder with mednist.npz and celeba.npz (10,000 faces by gender, 8,000 for training, 32 pixels), and for
`large` with brain_mri256.npz and celeba256.npz; the other sets are found by name. `--held-out` tests on the last sixth
of the training images in place of the test split: for choosing options (`--options '{"steps": 200}'` adds some to every
job).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from running import Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import ImageSet, contact_sheet
from sfumato.evaluate import detect_each, downstream_accuracy

GREY = ("mnist", "fashion-mnist")
DATA = (*GREY, "celeba", "mednist")
LARGE = ("brain_mri256", "celeba256")
BUDGETS = (1.0, 10.0)
SHARPNESS = {"mnist": 5.0, "fashion-mnist": 8.0}  # the paper's; 2 for faces, and for all else
COLOUR = {"code": 32}
HIGH = {"warm": "none", "code": 64, "couplings": 6, "sampling_prob": 0.2, "steps": 200}
TAUGHT = {"warm_share": 0.99, "steps": 2, "learning_rates": (1e-12, 1e-12, 1e-12)}


def jobs(tables: Iterable[str], seeds: int, data: Sequence[str], more: dict[str, Any]) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(table: str, names: Iterable[str], chosen: Iterable[int] = (0,), **params: Any) -> None:
        for epsilon in () if table not in tables else BUDGETS[1:] if table == "large" else BUDGETS:
            for name in [name for name in names if name in data]:
                own = COLOUR if name == "celeba" else {}
                options = {"epsilon": epsilon, **own, **params, **more}
                found.extend({"table": table, "data": name, "seed": seed, "params": options} for seed in chosen)

    add("budget", GREY)
    add("taught", GREY, **TAUGHT)
    add("budget", DATA[2:])
    add("large", LARGE, **HIGH)
    add("cold", GREY, warm="none")
    add("budget", GREY, range(1, seeds))
    add("conditional", GREY, variant="conditional")
    add("pixels", GREY, space="pixels", couplings=4, hidden=128)
    add("cold", DATA[2:], warm="none")
    add("conditional", DATA[2:], variant="conditional")
    add("budget", DATA[2:], range(1, seeds))
    return found


def measures(job: Job) -> list[str]:
    """What is measured of a model."""
    plain = ["small_cnn", "small_cnn, smoothed and sharpened"]
    return [*plain, "auroc", "auroc of images"] if job["data"] in GREY else plain


def images_of(name: str, folder: Path, held_out: bool) -> tuple[ImageSet, ImageSet]:
    train, test = load(name, folder)
    if held_out:
        kept = len(train) - len(train) // 6
        train, test = train.subset(torch.arange(kept)), train.subset(torch.arange(kept, len(train)))
    return train, test


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = images_of(job["data"], options.folder, options.held_out)
    model = sf.create("dp-lflow", seed=job["seed"], device=options.device, public_size=True, **job["params"])
    on_gpu = model.torch_device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model.fit(images)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    certificate = model.certificate_
    facts = {
        "certified": None if certificate.epsilon is None else round(certificate.epsilon, 4),
        "noise_multiplier": [round(event["noise_multiplier"], 4) for event in certificate.events],
        "fit_s": round(seconds, 1),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
    }
    rows = []
    for measure in job["measures"]:
        detail: dict[str, Any] = {}
        if measure.startswith("auroc"):
            likelihood = "image" if measure.endswith("images") else "code"
            found = detect_each(model, test, likelihood=likelihood)
            each = {name: detection.auroc or 0.0 for name, detection in found.items()}
            value = sum(each.values()) / len(each)
            detail = {"each": {name: round(auroc, 3) for name, auroc in each.items()}}
            alarms = [detection.to_dict()["flagged_inliers"] for detection in found.values()]
            detail["flagged_inliers"] = round(sum(alarms) / len(alarms), 3)
        else:
            sharpness = SHARPNESS.get(job["data"], 2.0) if measure.endswith("sharpened") else 0.0
            synthetic = model.sample(min(60_000, len(images)), sharpness=sharpness)
            if options.pictures and job["seed"] == 0:
                name = f"{job['table']}_{job['data']}_{job['params']['epsilon']:g}{'_sharp' * bool(sharpness)}"
                contact_sheet(synthetic, options.pictures / f"{name}.png")
            accuracy = downstream_accuracy(synthetic, test, seeds=(job["seed"],), device=model.torch_device)
            value = accuracy.mean
        own = {key: content for key, content in job.items() if key != "measures"}
        rows.append({**own, "measure": measure, "value": round(value, 3), **detail, **facts})
    return rows


def group(row: Row) -> str:
    return " | ".join([row["table"], row["data"], f"epsilon {row['params']['epsilon']:g}", row["measure"]])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="+", default=["budget", "taught", "large", "cold", "conditional", "pixels"])
    parser.add_argument("--data", nargs="+", default=[*DATA, *LARGE])
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    options = parser.parse_args()
    rows = known(options.json)
    have = {(group(row), row["seed"], json.dumps(row["params"])) for row in rows}
    todo = []
    for job in jobs(options.tables, options.seeds, options.data, options.options):
        own = (job["seed"], json.dumps(job["params"]))
        missing = [name for name in measures(job) if (group({**job, "measure": name}), *own) not in have]
        if missing:
            todo.append({**job, "measures": missing})
    carry_out(todo, rows, run, group, options)


if __name__ == "__main__":
    main()
