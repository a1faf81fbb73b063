"""`atelier` on real data: accuracy at several epsilons, and what its parts are worth, in a program that can be stopped.

    python benchmarks/atelier.py --folder DATA --workers 5 --json benchmarks/results/atelier.json --pictures DIR

Tables: `budget` (the default, all data sets, three convolutional classifiers; beside it, for the first seed, the same
fit with soft labels, `plain`, that is with no variety, and with what the teacher disagrees on dropped, or kept, which
is the painter alone on its part of the budget), `teacher_share`, `painter` (pixels only; no taught features), `images`
(how many are generated), `soft` (the teacher's probabilities in place of hard labels, for images that are relabelled,
and for all as the painter makes them), `common` (at epsilon 0.2, no sums whatever the class), `bold` (at epsilon 0.2,
with caution off), `encoder` (the teacher looks through a public network, too: weights of
EfficientNet-Lite0 in $SFUMATO_WEIGHTS), `core` (defaults without a GPU: `--tables core --device cpu --seeds 1`). Of the
first seed of `budget` also the fidelity, in that network's features.

The protocol is that of `dp_kernel.py`: class sizes declared public, 60,000 images (or as many as there are private
ones), tested once on the real test split; each seed draws its own frequencies, networks and classifier. With
`--held-out` a sixth of the training images takes the place of the test split: for choosing settings. Rows that the JSON
file holds are not made again. DATA is a folder with mednist.npz, celeba.npz (faces by gender at 32 pixels) and
brain_mri64.npz (scans by diagnosis at 64); the other sets are found by name.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from dp_kernel import BUDGETS, GREY
from running import DATA, Job, Row, arguments, carry_out, known, load

import sfumato as sf
from sfumato.data import ImageSet, contact_sheet
from sfumato.evaluate import downstream_accuracy, fidelity
from sfumato.methods.atelier import DISAGREEMENT, Atelier

CLASSIFIERS = ("small_cnn", "convnet", "resnet18")
WAYS = ("relabel", "relabel, soft", "relabel, plain", *DISAGREEMENT[1:])
MOST = 60_000
FIDELITY = ("fd_effnet_lite0", "precision_effnet_lite0", "recall_effnet_lite0")
OTHERS = ("mednist", "celeba", "brain_mri64")


def jobs(options: argparse.Namespace) -> list[Job]:
    """All of them, the ones that matter most first."""
    found: list[Job] = []

    def add(
        table: str,
        names: tuple[str, ...],
        params: dict[str, Any],
        *,
        ways: tuple[str, ...] = ("relabel",),
        images: tuple[int, ...] = (MOST,),
    ) -> None:
        for name in names:
            for seed in range(options.seeds if name in options.data else 0):
                some = ways if seed == 0 else ways[:1]
                job = {"table": table, "data": name, "seed": seed, "params": params, "ways": some, "images": images}
                found.append(job)

    for epsilon in BUDGETS if "budget" in options.tables else ():
        add("budget", ("cifar10", *GREY), {"epsilon": epsilon}, ways=WAYS)
    for share in (0.2, 0.6) if "teacher_share" in options.tables else ():
        add(f"teacher_share {share:g}", GREY, {"epsilon": 1.0, "teacher_share": share})
    if "painter" in options.tables:
        add("painter: pixels only", GREY, {"epsilon": 1.0, "scattering_share": 0.0})
        add("painter: nothing taught", GREY, {"epsilon": 1.0, "paths": 1})
    if "images" in options.tables:
        add("images", GREY, {"epsilon": 1.0}, images=(1_000, 5_000, 20_000, 200_000))
    if "soft" in options.tables:
        add("soft", GREY, {"epsilon": 1.0}, ways=("relabel", "relabel, soft", "keep, soft"))
    if "common" in options.tables:
        add("nothing in common", ("cifar10", *GREY), {"epsilon": 0.2, "common_share": 0.0})
    if "bold" in options.tables:
        for name, params in (("bold", {}), ("bold, nothing in common", {"common_share": 0.0})):
            bold = {"epsilon": 0.2, "caution": "off", **params}
            add(name, ("cifar10", *GREY), bold, ways=("relabel, plain",))
    for epsilon in BUDGETS if "budget" in options.tables else ():
        add("budget", OTHERS, {"epsilon": epsilon}, ways=WAYS)
    if "encoder" in options.tables:
        add("encoder: EfficientNet-Lite0", ("cifar10",), {"epsilon": 1.0, "teacher_encoder": "effnet_lite0"})
    if "core" in options.tables:
        add("core", GREY, {"epsilon": 1.0})
    return found


def split(name: str, options: argparse.Namespace) -> tuple[ImageSet, ImageSet]:
    images, test = load(name, options.folder)
    if not options.held_out:
        return images, test
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[len(images) // 6 :]), images.subset(order[: len(images) // 6])


def run(job: Job, options: argparse.Namespace) -> list[Row]:
    images, test = split(job["data"], options)
    model = sf.create("atelier", seed=job["seed"], device=options.device, public_size=True, **job["params"])
    assert isinstance(model, Atelier)
    started = time.perf_counter()
    model.fit(images)
    seconds = round(time.perf_counter() - started, 1)
    seen = model.probabilities(test).argmax(1)
    certified = round(model.certificate_.epsilon or 0.0, 4)
    about = {"certified": certified, "fit_s": seconds, **{key: job[key] for key in ("table", "data", "seed", "params")}}
    assert test.labels is not None
    itself = _row(about, "the teacher itself", "", 100 * float((seen == test.labels).float().mean()))
    rows = [itself] if job.get("whole", True) else []
    for way in job["ways"]:
        for count in job["images"]:
            disagreement, *more = way.split(", ")
            synthetic = model.sample(
                min(count, len(images)) if count == MOST else count,
                disagreement=disagreement,
                soft_labels="soft" in more,
                variety=0.0 if "plain" in more else model.variety,
            )
            first = job["seed"] == 0 and way in ("relabel", "relabel, plain") and count == MOST
            if options.pictures and first:
                name = " ".join([job["table"], *more]).replace(":", "").replace(" ", "_")
                contact_sheet(synthetic, options.pictures / f"{name}_{job['data']}_{job['params']['epsilon']:g}.png")
            if job["table"] == "budget" and first:
                measured = fidelity(synthetic, test, device=model.torch_device, progress=False)
                rows += [{**about, "way": way, "classifier": of, "value": round(measured[of], 4)} for of in FIDELITY]
            for classifier in options.classifiers if disagreement == "relabel" else options.classifiers[:1]:
                found = downstream_accuracy(
                    synthetic, test, classifier, seeds=(job["seed"],), device=model.torch_device
                )
                rows.append(_row(about, _way(way, count), classifier, found.mean))
    return rows


def _way(way: str, count: int) -> str:
    return way if count == MOST else f"{way}, {count} images"


def _row(about: Row, way: str, classifier: str, accuracy: float) -> Row:
    return {**about, "way": way, "classifier": classifier, "accuracy": round(accuracy, 2)}


def group(row: Row) -> str:
    parts = [row["table"], row["data"], f"epsilon {row['params']['epsilon']:g}", row["way"], row["classifier"]]
    return " | ".join(part for part in parts if part)


def unfinished(found: list[Job], rows: list[Row]) -> list[Job]:
    """Jobs with the ways that are missing: of a fit of their own, with fresh noise, where others are there.

    Such a fit's teacher is not counted: the seed has one already.
    """

    def key(of: Row, way: str) -> tuple[object, ...]:
        return of["table"], of["data"], of["params"]["epsilon"], of["seed"], way

    have = {key(row, row["way"]) for row in rows}
    todo = []
    for job in found:
        ways = tuple(way for way in job["ways"] if any(key(job, _way(way, n)) not in have for n in job["images"]))
        todo += [{**job, "ways": ways, "whole": ways == job["ways"]}] if ways else []
    return todo


def main() -> None:
    parser = arguments(__doc__)
    tables = ["budget", "teacher_share", "painter", "images", "soft", "common", "bold", "encoder"]
    parser.add_argument("--tables", nargs="+", default=tables, choices=[*tables, "core"])
    parser.add_argument("--data", nargs="+", default=[*DATA, "brain_mri64"])
    parser.add_argument("--classifiers", nargs="+", default=list(CLASSIFIERS))
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    rows = known(options.json)
    carry_out(unfinished(jobs(options), rows), rows, run, group, options)


if __name__ == "__main__":
    main()
