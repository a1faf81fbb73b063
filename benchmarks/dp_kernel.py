"""`dp-kernel` on real data: accuracy at several epsilons, variants and kernels, in a program that can be stopped.

    python benchmarks/dp_kernel.py --folder DATA --workers 6 --json benchmarks/results/dp_kernel.json --pictures DIR

Tables: `budget` (the default at several epsilons, all data sets), `variants` (one generator per class; pixels only;
nothing taught; global frequencies; other generators), `published` (the paper's training, which is not private: its
figures promise nothing), `core` (what one CPU core does in minutes, two at a time:
`--tables core --device cpu --seeds 1 --workers 2`).

The protocol: fit through the vault with class sizes declared public, draw 60,000 images (or as many as there are
private ones, if fewer), train classifiers on them, test once on the real test split. Each seed draws its own
frequencies, network and classifier; privacy noise is fresh anyway. Rows that the JSON file holds are not made again.

DATA is a folder with mednist.npz and celeba.npz (10,000 faces by gender, 8,000 for training, 32 pixels); the other sets
are found by name.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from typing import Any

from running import DATA, Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.evaluate import downstream_accuracy

BUDGETS = (1.0, 10.0, 0.2)
GREY = ("mnist", "fashion-mnist")
OTHERS = tuple(name for name in DATA if name not in GREY)
PAPER_NETWORK = {"network": "mmd-gan", "latent": 10, "hidden": 10, "width": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {"variant": "parallel"},
    "pixels": {"scattering_share": 0.0},
    "scattering": {"scattering_share": 1.0},
    "nothing taught": {"paths": 1, "secure": False},  # exact noise takes minutes
    "whole images": {"window": (2.0, 2.0)},
    "residual generator": {"network": "residual", "width": 64, "learning_rate": 2e-3},
    "paper's generator": PAPER_NETWORK,
}
BOTH = ("parallel", "pixels", "scattering")  # on MNIST, too
PUBLISHED = {"form": "published", "steps": 5000, "learning_rate": 1e-3, **PAPER_NETWORK}


def jobs(tables: Iterable[str], seeds: int, data: Sequence[str], classifiers: Sequence[str]) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(table: str, names: Iterable[str], params: dict[str, Any], count: int) -> None:
        for name in names:
            for seed in range(count if name in data else 0):
                found.append({"table": table, "data": name, "seed": seed, "params": params, "classifiers": classifiers})

    if "budget" in tables:
        for names, count in ((GREY, seeds), (OTHERS, 1)):
            for epsilon in BUDGETS:
                add("budget", names, {"epsilon": epsilon}, count)
    for name, params in VARIANTS.items() if "variants" in tables else ():
        add(f"variants: {name}", GREY if name in BOTH else GREY[1:], {"epsilon": 1.0, **params}, 1)
    if "core" in tables:
        add("core", GREY, {"epsilon": 1.0}, seeds)
    if "published" in tables:
        add("published (no guarantee)", GREY, {"epsilon": 1.0, **PUBLISHED}, 1)
    for epsilon in BUDGETS if "budget" in tables else ():
        add("budget", OTHERS, {"epsilon": epsilon}, seeds)
    return [job for place, job in enumerate(found) if job not in found[:place]]


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = load(job["data"], options.folder)
    model = sf.create("dp-kernel", seed=job["seed"], device=options.device, public_size=True, **job["params"])
    started = time.perf_counter()
    model.fit(images)
    seconds = time.perf_counter() - started
    synthetic = model.sample(min(60_000, len(images)))
    if options.pictures and job["seed"] == 0:
        name = job["table"].replace(":", "").replace(" ", "_").replace("'", "")
        contact_sheet(synthetic, options.pictures / f"{name}_{job['data']}_{job['params']['epsilon']:g}.png")
    certificate = model.certificate_
    rows = []
    for classifier in job["classifiers"]:
        accuracy = downstream_accuracy(synthetic, test, classifier, seeds=(job["seed"],), device=model.torch_device)
        rows.append(
            {
                **{key: value for key, value in job.items() if key != "classifiers"},
                "classifier": classifier,
                "accuracy": round(accuracy.mean, 2),
                "certified": None if certificate.epsilon is None else round(certificate.epsilon, 4),
                "noise_multiplier": [round(event["noise_multiplier"], 4) for event in certificate.events],
                "fit_s": round(seconds, 1),
            }
        )
    return rows


def group(row: Row) -> str:
    return " | ".join([row["table"], row["data"], f"epsilon {row['params']['epsilon']:g}", row["classifier"]])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="+", default=["budget", "variants", "published"])
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--classifiers", nargs="+", default=["small_cnn"])
    options = parser.parse_args()
    rows = known(options.json)
    have = {(group(row), row["seed"]) for row in rows}
    todo = []
    for job in jobs(options.tables, options.seeds, options.data, options.classifiers):
        missing = [name for name in job["classifiers"] if (group({**job, "classifier": name}), job["seed"]) not in have]
        if missing:
            todo.append({**job, "classifiers": missing})
    carry_out(todo, rows, run, group, options)


if __name__ == "__main__":
    main()
