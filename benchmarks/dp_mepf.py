"""`dp-mepf` on real data: accuracy and distance at several epsilons, early stopping, speed; can be stopped.

    python benchmarks/dp_mepf.py --folder DATA --workers 4 --json benchmarks/results/dp_mepf.json --pictures DIR

Tables: `budget` (the default at several epsilons, all data sets), `unlabelled` (CIFAR-10 without its labels), `moments`
(the first only), `encoders` (scattering, which nobody trained; one trained on the private images; a ResNet-18 on
Tiny-ImageNet, resnet18_tinyimagenet.safetensors in $SFUMATO_WEIGHTS), `paper` (its loss and its generators), `stopping`
(like Table 4 of the paper: the Fréchet distance of the snapshot that is nearest to the release, of the last one, and of
the best one, which no private program may choose), `speed` (images per second of one private sum, by encoder).

The protocol: fit through the vault with class sizes declared public, draw 60,000 images (or as many as there are
private ones, if fewer), train classifiers on them, test once on the real test split; without labels, the Fréchet
distance to the test split in EfficientNet-Lite0's features, `fd`. `--classifiers "resnet9, annealed"` trains as the
paper's authors do. Rows that the JSON file holds are not made again.

DATA is a folder with mednist.npz, celeba.npz and celeba64.npz (10,000 faces by gender, 8,000 for training, at 32 and 64
pixels); the other sets are found by name.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from running import Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import ImageSet, contact_sheet
from sfumato.engine import Performance, Vault, calibrate
from sfumato.evaluate import ANNEALED, Recipe, downstream_accuracy, fidelity
from sfumato.methods import dp_mepf
from sfumato.methods.generating import Training
from sfumato.privacy import Budget, Release

BUDGETS = (1.0, 10.0, 0.2, math.inf)
GREY = ("mnist", "fashion-mnist")
COLOUR = ("cifar10", "celeba")
MAIN, OTHERS = (*GREY, "cifar10"), ("celeba", "mednist")
LARGER = "resnet18_tinyimagenet"
PAPER = {"loss": "moving", "network": "mepf", "latent": 90, "hidden": 500}
MEASURED = 5_000  # images of a snapshot
DISTANCE = "fd_effnet_lite0"


def jobs(options: argparse.Namespace) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(table: str, names: Iterable[str], params: dict[str, Any], labelled: bool = True, seeds: int = 1) -> None:
        if table.split(":")[0] not in options.tables:
            return
        measures = list(options.classifiers) if labelled and table != "stopping" else ["fd"]
        measures = ["images/s"] if table == "speed" else measures
        for name in names:
            for seed in range(seeds if name in options.data else 0):
                job = {"table": table, "data": name, "seed": seed, "params": params, "labelled": labelled}
                found.append({**job, "measures": measures})

    for seeds in (1, options.seeds):
        for epsilon in BUDGETS:
            add("budget", MAIN, {"epsilon": epsilon}, seeds=seeds)
        for epsilon in BUDGETS[:3]:
            add("budget", OTHERS, {"epsilon": epsilon}, seeds=seeds)
            add("unlabelled", ("cifar10",), {"epsilon": epsilon}, labelled=False, seeds=seeds)
        for epsilon in BUDGETS[1::-1]:
            add("encoders: resnet18", ("cifar10",), {"epsilon": epsilon, "encoder": LARGER}, seeds=seeds)
        for epsilon in BUDGETS[:3]:
            add("stopping", COLOUR, {"epsilon": epsilon})
        for epsilon in BUDGETS:
            add("budget", ("celeba64",), {"epsilon": epsilon}, seeds=seeds)
        add("budget", OTHERS, {"epsilon": math.inf}, seeds=seeds)
        add("unlabelled", ("cifar10",), {"epsilon": math.inf}, labelled=False, seeds=seeds)
        for encoder in ("auto", "scattering"):
            add("speed", ("fashion-mnist", "cifar10"), {"epsilon": 1.0, "encoder": encoder}, seeds=seeds)
    add("encoders: scattering", MAIN, {"epsilon": 1.0, "encoder": "scattering"})
    add("encoders: dp", MAIN, {"epsilon": 1.0, "encoder": "dp"})
    add("moments: first only", MAIN, {"epsilon": 1.0, "moments": 1})
    add("paper: its loss and generator", GREY, {"epsilon": 1.0, **PAPER, "width": 16})
    add("paper: its loss and generator", COLOUR, {"epsilon": 1.0, **PAPER, "width": 64})
    return [job for place, job in enumerate(found) if job not in found[:place]]


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = load(job["data"], options.folder)
    if not job["labelled"]:
        images, test = ImageSet(images.images), ImageSet(test.images)
    model = sf.create(
        "dp-mepf", seed=job["seed"], device=options.device, public_size=True, secure=False, **job["params"]
    )
    if job["table"] == "speed":
        return [_row(job, "images/s", round(speed(model, images)))]
    seen: dict[int, tuple[float, float]] = {}
    started = time.perf_counter()
    with watched(seen, test, model) if job["table"] == "stopping" else nullcontext():
        model.fit(images)
    seconds = round(time.perf_counter() - started, 1)
    certified = model.certificate_.epsilon
    if seen:
        found = {
            "the nearest": seen[min(seen, key=lambda step: seen[step][0])][1],
            "the last": seen[max(seen)][1],
            "the best (not private)": min(value for _, value in seen.values()),
        }
        return [
            _row({**job, "table": f"stopping: {name}"}, "fd", value, certified, seconds)
            for name, value in found.items()
        ]
    synthetic = model.sample(min(60_000, len(images)))
    if options.pictures and job["seed"] == 0:
        name = job["table"].replace(":", "").replace(" ", "_").replace("'", "")
        contact_sheet(synthetic, options.pictures / f"{name}_{job['data']}_{job['params']['epsilon']:g}.png")
    values = {name: _measure(name, synthetic, test, job["seed"], model.torch_device) for name in job["measures"]}
    return [_row(job, name, value, certified, seconds) for name, value in values.items()]


def _measure(measure: str, synthetic: ImageSet, test: ImageSet, seed: int, device: torch.device) -> float:
    if measure == "fd":
        return fidelity(synthetic, test, device=device, sample=len(test), progress=False)[DISTANCE]
    name, _, how = measure.partition(", ")
    recipe = ANNEALED if how == "annealed" else Recipe()
    return downstream_accuracy(synthetic, test, name, seeds=(seed,), recipe=recipe, device=device).mean


def _row(job: Job, measure: str, value: float, certified: float | None = None, seconds: float | None = None) -> Row:
    about = {key: part for key, part in job.items() if key not in ("measures", "labelled")}
    about["params"] = {name: "inf" if part == math.inf else part for name, part in job["params"].items()}
    promise = None if certified is None else round(certified, 4)
    return {**about, "measure": measure, "value": round(value, 2), "certified": promise, "fit_s": seconds}


@contextmanager
def watched(seen: dict[int, tuple[float, float]], test: ImageSet, model: Any) -> Iterator[None]:
    """While it lasts, snapshots leave in `seen` their private distance and their Fréchet distance, by step."""
    plain = dp_mepf.Nearest

    class Watching(plain):  # type: ignore[valid-type, misc]
        def look(self, training: Training, step: int) -> None:
            super().look(training, step)
            made: list[torch.Tensor] = []
            while sum(len(part) for part in made) < MEASURED:
                made.append(((training.average_images().clamp(-1, 1) + 1) * 127.5).round().byte().cpu())
            real = ImageSet(test.images)
            value = _measure("fd", ImageSet(torch.cat(made)), real, 0, model.torch_device)
            seen[step] = self.distances[step], value

    dp_mepf.Nearest = Watching  # type: ignore[misc]
    try:
        yield
    finally:
        dp_mepf.Nearest = plain  # type: ignore[misc]


def speed(model: Any, images: ImageSet) -> float:
    """Images per second of one noisy sum of all activations, the second time."""
    embedding = model._embedding(images.public())
    seconds = 0.0
    plan = calibrate([Release("sum", 2)], Budget(1.0, 1e-5))
    vault = Vault(images, plan, device=model.torch_device, secure=False, performance=Performance())
    for _ in range(2):
        started = time.perf_counter()
        vault.sum(
            partial(embedding.rows, powers=range(1, 2), stopping=False), release="sum", bound=1.0, by_class=True
        ).cpu()
        seconds = time.perf_counter() - started
    return len(images) / seconds


def group(row: Row) -> str:
    params = {name: value for name, value in row["params"].items() if name != "epsilon"}
    encoder = [params["encoder"]] if row["table"] == "speed" else []
    return " | ".join(
        [row["table"], row["data"], f"epsilon {float(row['params']['epsilon']):g}", row["measure"], *encoder]
    )


def unfinished(found: Sequence[Job], rows: Sequence[Row]) -> list[Job]:
    """Jobs with the measures that are missing."""
    have = {(group(row), row["seed"]) for row in rows}
    todo = []
    for job in found:
        table = "stopping: the nearest" if job["table"] == "stopping" else job["table"]
        names = [{**job, "table": table, "measure": name} for name in job["measures"]]
        missing = [name["measure"] for name in names if (group(name), job["seed"]) not in have]
        todo += [{**job, "measures": missing}] if missing else []
    return todo


def main() -> None:
    parser = arguments(__doc__)
    tables = ["budget", "unlabelled", "stopping", "speed", "moments", "encoders", "paper"]
    parser.add_argument("--tables", nargs="+", default=tables, choices=tables)
    parser.add_argument("--data", nargs="+", default=[*MAIN, *OTHERS, "celeba64"])
    parser.add_argument("--classifiers", nargs="+", default=["mlp", "logistic", "small_cnn"])
    options = parser.parse_args()
    rows = known(options.json)
    carry_out(unfinished(jobs(options), rows), rows, run, group, options)


if __name__ == "__main__":
    main()
