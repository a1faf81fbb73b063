"""`pge` on real data: accuracy, with and without its parts, and time, in a program that can be stopped.

    python benchmarks/pge.py --folder DATA --workers 1 --json benchmarks/results/pge.json --pictures DIR

Tables: `budget` (the sound form; without a warm start; a warm start alone), `published` (the paper's training, which is
not private: its figures promise nothing), `residual` (the paper's Table 4: residual enhancement in both forms; without
it they are `budget` and `published`), `samplers` (one network, drawn from in several ways), `large` (256 pixels,
through an autoencoder's maps), `sweep` (options, on training images that are held out: a sixth).

The protocol: fit through the vault with class sizes declared public, draw 60,000 images (10,000 for `samplers`; or as
many as there are private ones, if fewer), train classifiers on them, test once on the real test split. `entropy` is the
paper's: of the classes that a CNN trained on real images sees in the synthetic ones, in bits (3.32 for ten equal
classes); `agreement` is how often it sees the class that was asked for. Times are of the fit, with all its releases,
and of the drawing. Rows that the JSON file holds are not made again.

DATA is a folder with celeba.npz, celeba64.npz and celeba256.npz (faces by gender at 32, 64 and 256 pixels); the other
sets are found by name. `residual` needs our encoder, `large` the weights of TAEF2 in $SFUMATO_WEIGHTS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from running import Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import ImageSet, contact_sheet
from sfumato.evaluate import downstream_accuracy
from sfumato.methods.pge import GradientEstimation

BUDGETS = (10.0, 1.0)
GREY, FACES = ("mnist", "fashion-mnist"), "celeba"
DATA = (*GREY, FACES, "celeba64", "celeba256")
COLD = {"warm": "none", "sampling_prob": 0.03}
ALONE = {"warm_share": 0.99, "steps": 2}
PUBLISHED = {"form": "published", "steps": 1_500}
RESIDUAL = {"residual": "small_cifar10"}
LARGER = {"warm_batch": 128, "at_once": 128}  # faces of 64 pixels: four times the pixels of 32
LARGE = {"autoencoder": "taef2", "width": 64, "steps": 150, "sampling_prob": 0.2, "at_once": 128}
MOST, FEWER = 60_000, 10_000  # images that are drawn; the latter where one network is drawn from in many ways
DRAWN: dict[str, dict[str, Any]] = {
    "hamiltonian": {},
    "hamiltonian, half steps": {"step_size": 0.5},
    "rayleigh momenta": {"momentum": "rayleigh"},
    "uniform momenta": {"momentum": "uniform"},
    "langevin": {"sampler": "langevin"},
    "ode": {"sampler": "ode"},
}
SWEEP: dict[str, dict[str, Any]] = {
    "warm": {},
    "cold": COLD,
    "warm, two thirds of the budget": {"warm_share": 0.67},
    "warm, a third of the budget": {"warm_share": 0.33},
    "warm, rate 3e-4": {"learning_rate": 3e-4},
    "warm, rate 1e-3": {"learning_rate": 1e-3},
    "warm, width 64": {"width": 64},
    "warm, 200 steps": {"steps": 200},
    "warm, taught for longer": {"warm_steps": 8000},
    "warm by dp-merf": {"warm": "dp-merf"},
    "rate 3e-3": {**COLD, "learning_rate": 3e-3},
    "1200 steps": {**COLD, "steps": 1200},
    "1200 steps, ema 0.995": {**COLD, "steps": 1200, "ema": 0.995},
    "bound 0.5": {**COLD, "bound": 0.5},
    "bound 0.02": {**COLD, "bound": 0.02},
    "views 16": {**COLD, "views": 16},
    "views 32, half as many steps": {**COLD, "views": 32, "steps": 200},
    "larger batches": {**COLD, "sampling_prob": 0.14},
    "width 64": {**COLD, "width": 64},
    "width 16": {**COLD, "width": 16},
    "centre 3": {**COLD, "centre": 3.0},
    "centre 0.8": {**COLD, "centre": 0.8},
    "spread 0.8": {**COLD, "spread": 0.8},
    "residual": {**COLD, **RESIDUAL},
    "energy": {**COLD, "network": "energy"},
    "sliced": {**COLD, "objective": "sliced"},
}


def jobs(tables: Iterable[str], seeds: int, data: Sequence[str]) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(table: str, names: Iterable[str], params: dict[str, Any], count: int = seeds, **more: Any) -> None:
        for epsilon in BUDGETS:
            for name in [name for name in names if name in data]:
                given = {"table": table, "data": name, "params": {"epsilon": epsilon, **params}, **more}
                found.extend({**given, "seed": seed} for seed in range(count))

    if "sweep" in tables:
        for name, params in SWEEP.items():
            add(f"sweep: {name}", GREY, params, 1, held_out=True)
    if "budget" in tables:
        add("budget: warm", (*GREY, FACES), {})
        add("budget: warm", ("celeba64",), LARGER)
        add("budget: cold", GREY, COLD)
        add("budget: the warm start alone", GREY, ALONE)
    if "samplers" in tables:
        for network in ("score", "energy"):
            add(f"samplers: {network}", GREY[:1], {"network": network}, 1, drawn=list(DRAWN))
    if "residual" in tables:
        add("residual: warm, with", GREY, RESIDUAL)
        add("residual: published, with (no guarantee)", GREY, {**PUBLISHED, **RESIDUAL})
    if "published" in tables:
        add("published (no guarantee)", (*GREY, FACES), PUBLISHED)
    if "large" in tables:
        add("large", ("celeba256",), LARGE, 1)
        found = [job for job in found if job["table"] != "large" or job["params"]["epsilon"] == BUDGETS[0]]
    return found


def split(job: Job, options: argparse.Namespace) -> tuple[ImageSet, ImageSet]:
    """Training and test images; or, of the training images, five sixths and the rest."""
    images, test = load(job["data"], options.folder)
    if not job.get("held_out"):
        return images, test
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[: 5 * len(images) // 6]), images.subset(order[5 * len(images) // 6 :])


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = split(job, options)
    model = sf.create("pge", seed=job["seed"], device=options.device, public_size=True, **job["params"])
    assert isinstance(model, GradientEstimation)
    _, seconds = _timed(partial(model.fit, images))
    certificate = model.certificate_
    rows = []
    for name in job.get("drawn", ["hamiltonian"]):
        model.set_params(**{**_plain(model), **job["params"], **DRAWN[name]})
        synthetic, drawing = _timed(partial(model.sample, min(FEWER if "drawn" in job else MOST, len(images))))
        if options.pictures and job["seed"] == 0:
            title = "_".join([job["table"], job["data"], f"{job['params']['epsilon']:g}", name])
            file = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in title)
            contact_sheet(synthetic, options.pictures / f"{file}.png")
        device = model.torch_device
        seen = downstream_accuracy(images, synthetic, device=device)
        shares = torch.tensor(seen.confusion).sum(0).double()
        shares = shares[shares > 0] / shares.sum()
        labels = torch.arange(len(images.classes), device=device).repeat_interleave(20)
        with torch.no_grad():
            accepted = model.draw(labels, torch.Generator(device).manual_seed(1))[1]
        rows.append(
            {
                **{key: value for key, value in job.items() if key != "drawn"},
                "drawn": name,
                "classifier": "small_cnn",
                "accuracy": round(downstream_accuracy(synthetic, test, seeds=(job["seed"],), device=device).mean, 2),
                "entropy": round(float(-(shares * shares.log2()).sum()), 3),
                "agreement": round(seen.mean, 2),
                "accepted": round(accepted, 3) if model.sampler == "hamiltonian" else None,
                "certified": None if certificate.epsilon is None else round(certificate.epsilon, 4),
                "noise_multiplier": [round(event["noise_multiplier"], 4) for event in certificate.events],
                "fit_s": round(seconds, 1),
                "sample_s": round(drawing, 1),
                "images_per_s": round(len(synthetic) / drawing, 1),
            }
        )
    return rows


def _plain(model: GradientEstimation) -> dict[str, Any]:
    """The drawing options as they are by default."""
    changed = {name for options in DRAWN.values() for name in options}
    fresh = type(model)().get_params()
    return {name: fresh[name] for name in changed}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def group(row: Row) -> str:
    return " | ".join([row["table"], row["data"], f"epsilon {row['params']['epsilon']:g}", row["drawn"]])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="+", default=["budget", "samplers", "residual", "published", "large"])
    parser.add_argument("--data", nargs="+", default=list(DATA))
    parser.add_argument("--only", nargs="+", default=[], help="of the sweep: these options")
    options = parser.parse_args()
    rows = known(options.json)
    have = {(group(row), row["seed"]) for row in rows}
    todo = [
        job
        for job in jobs(options.tables, options.seeds, options.data)
        if (group({"drawn": "hamiltonian", **{k: v for k, v in job.items() if k != "drawn"}}), job["seed"]) not in have
        and (not options.only or job["table"].removeprefix("sweep: ") in options.only)
    ]
    carry_out(todo, rows, run, group, options)


if __name__ == "__main__":
    main()
