"""Private condensation on real data: every table of the paper, in one program that can be stopped and gone on with.

    python benchmarks/dpdc.py --tables budget across paper baseline ablation --folder DATA --workers 10 \\
        --json benchmarks/results/dpdc.json --plot docs/methods/dpdc_ablation.png --pictures DIR

Tables: `budget` (LDPDC and NDPDC at several epsilons, 50 images per class), `across` (other classifiers at epsilon 1:
the paper's Table 3), `paper` (its own settings, Table 1), `baseline` (DM, which is not private; DPMix at epsilon 1),
`ablation` (sigma, L, I and M around our settings, Tables 4 to 7: at a fixed noise, so that epsilon moves), `core` (what
one CPU core does, with smaller networks: `--tables core --device cpu --seeds 1`).

The protocol: fit through the vault with class sizes declared public, take the whole condensed set, train a classifier
on it with augmentation (SGD, as the condensation papers do), test it once on the real test split. Each seed draws its
own networks, start and classifier; privacy noise is fresh anyway. A row says for how many epochs its classifier was
trained. Rows that the JSON file holds already are not made again.

DATA is a folder with mednist.npz and celeba.npz (10,000 faces by gender, 8,000 for training, 32 pixels); the other sets
are found by name.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from running import DATA, Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import contact_sheet
from sfumato.evaluate import downstream_accuracy
from sfumato.evaluate.classifiers import Recipe

FLIPPED = ("fashion-mnist", "cifar10", "celeba")
OTHERS = ("mlp", "lenet", "alexnet", "vgg11", "resnet18")
PAPER_LINEAR = {"group_size": 50, "noise_multiplier": 1.0, "epsilon": 100.0}
PAPER_NONLINEAR = {
    **PAPER_LINEAR,
    "iterations": 10_000,
    "residual": False,
    "bound": 1.0,
    "start": 1.0,
    "learning_rate": 1.0,
    "decay": False,
    "smoothness": 0.0,
    "average": 0.0,
}
ABLATIONS: dict[str, list[dict[str, Any]]] = {
    "noise_multiplier": [{"noise_multiplier": sigma} for sigma in (0.75, 1.0, 1.25, 1.5, 2.0, 4.0)],
    "group_size": [{"group_size": size} for size in (25, 50, 100, 200)],
    "iterations": [{"iterations": count} for count in (100, 200, 500, 1000)],
    "images_per_class": [{"images_per_class": count} for count in (10, 50, 100, 200)],
}
MIDDLE = {"noise_multiplier": 1.0, "group_size": 100, "epsilon": 1000.0}


def jobs(tables: Iterable[str], seeds: int, epochs: int, fewer: int) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(
        table: str, method: str, data: Iterable[str], params: dict[str, Any], each: dict[str, int], count: int
    ) -> None:
        for seed in range(count):
            for name in data:
                given = {"flip": name in FLIPPED, **params} if method in ("ndpdc", "dm") else params
                found.append(
                    {"table": table, "method": method, "data": name, "seed": seed, "params": given, "epochs": each}
                )

    for epsilon in (1.0, 10.0, 0.2, 2.0):
        for method in ("ndpdc", "ldpdc") if "budget" in tables else ():
            add("budget", method, DATA, {"epsilon": epsilon}, {"convnet": epochs if epsilon == 1 else fewer}, seeds)
    if "paper" in tables:
        add("paper", "ldpdc", DATA, PAPER_LINEAR, {"convnet": fewer}, seeds)
    if "ablation" in tables:
        for name, settings in ABLATIONS.items():
            for setting in settings:
                add(f"ablation {name}", "ndpdc", DATA[:3], {**MIDDLE, **setting}, {"convnet": fewer}, 1)
    if "baseline" in tables:
        add("baseline", "dpmix", DATA, {"epsilon": 1.0, "group_size": 50}, {"convnet": fewer}, seeds)
        add("baseline", "dm", DATA, {"iterations": 1000}, {"convnet": fewer}, seeds)
    if "across" in tables:
        for method in ("ndpdc", "ldpdc"):
            add("across", method, DATA, {"epsilon": 1.0}, dict.fromkeys(OTHERS, fewer), seeds)
    if "core" in tables:
        add("core", "ldpdc", ["mnist"], {"epsilon": 1.0}, {"small_cnn": fewer}, seeds)
        small = {"epsilon": 1.0, "width": 32, "iterations": 200}
        add("core", "ndpdc", ["mnist", "fashion-mnist"], small, {"small_cnn": fewer}, seeds)
    if "paper" in tables:
        add("paper", "ndpdc", DATA, PAPER_NONLINEAR, {"convnet": fewer}, seeds)
    return found


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = load(job["data"], options.folder)
    params = {**job["params"], **({} if job["method"] == "dm" else {"public_size": True})}
    model = sf.create(job["method"], seed=job["seed"], device=options.device, **params)
    started = time.perf_counter()
    model.fit(images)
    seconds = time.perf_counter() - started
    synthetic = model.sample(len(model._state()["images"]))
    certificate = model.certificate_
    if options.pictures and job["seed"] == 0 and job["table"] in ("budget", "paper", "baseline"):
        epsilon = "paper" if job["table"] == "paper" else f"{job['params'].get('epsilon', math.inf):g}"
        contact_sheet(synthetic, options.pictures / f"{job['method']}_{job['data']}_{epsilon}.png")
    rows = []
    for classifier, epochs in job["epochs"].items():
        recipe = Recipe(epochs, condensed=True, flip=job["data"] in FLIPPED)
        accuracy = downstream_accuracy(
            synthetic, test, classifier, seeds=(job["seed"],), recipe=recipe, device=model.torch_device
        )
        rows.append(
            {
                **{key: value for key, value in job.items() if key != "epochs"},
                "classifier": classifier,
                "epochs": epochs,
                "accuracy": round(accuracy.mean, 2),
                "certified": None if certificate.epsilon is None else round(certificate.epsilon, 4),
                "noise_multiplier": [round(event["noise_multiplier"], 4) for event in certificate.events],
                "fit_s": round(seconds, 1),
            }
        )
    return rows


def group(row: Row) -> str:
    params = ", ".join(f"{key}={value}" for key, value in sorted(row["params"].items()) if key != "flip")
    return " | ".join([row["table"], row["method"], row["data"], params, row["classifier"], f"{row['epochs']} epochs"])


def plot(rows: list[Row], target: Path) -> None:
    """Accuracy and epsilon along each ablation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullLocator

    titles = {"noise_multiplier": "σ", "group_size": "L", "iterations": "I", "images_per_class": "M"}
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 5.5), sharex="col")
    for (name, title), (upper, lower) in zip(titles.items(), axes.T, strict=True):
        for data in DATA[:3]:
            some = [row for row in rows if row["table"] == f"ablation {name}" and row["data"] == data]
            points = sorted((row["params"].get(name, 0), row["accuracy"], row["certified"]) for row in some)
            if points:
                places, accuracies, epsilons = zip(*points, strict=True)
                upper.plot(places, accuracies, marker="o", label=data)
                lower.plot(places, epsilons, marker="o", label=data)
        ticks = [setting[name] for setting in ABLATIONS[name]]
        upper.set(ylim=(40, 100))
        lower.set(xlabel=title, xscale="log", yscale="log", ylim=(0.3, 8), xticks=ticks, yticks=[0.5, 1, 2, 5])
        for axis, places in ((lower.xaxis, ticks), (lower.yaxis, [0.5, 1, 2, 5])):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(places)
    axes[0, 0].set_ylabel("accuracy, %")
    axes[1, 0].set_ylabel("ε at δ = 1e-5")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="+", default=["budget", "across", "baseline", "ablation", "paper"])
    parser.add_argument("--epochs", type=int, default=1000, help="of the ConvNet at epsilon 1")
    parser.add_argument("--fewer", type=int, default=300, help="of all other classifiers")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = known(options.json)
    have = {(group(row), row["seed"]) for row in rows}
    todo = []
    for job in jobs(options.tables, options.seeds, options.epochs, options.fewer):
        missing = {
            name: epochs
            for name, epochs in job["epochs"].items()
            if (group({**job, "classifier": name, "epochs": epochs}), job["seed"]) not in have
        }
        if missing:
            todo.append({**job, "epochs": missing})
    rows = carry_out(todo, rows, run, group, options)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
