"""Private condensation: LDPDC and NDPDC at several budgets, classifiers, baselines, settings, the paper's form."""

from typing import Any

import torch

from benchmarks.measures import MIRRORED
from benchmarks.runner import Job, jobs
from sfumato.data import ImageSet

SETS = ["mnist", "fashion-mnist", "cifar10", "celeba", "mednist"]
OTHERS = ("mlp@300", "lenet@300", "alexnet@300", "vgg11@300", "resnet18@300")
PAPER = {"group_size": 50, "noise_multiplier": 1.0}
MIDDLE = {"noise_multiplier": 1.0, "group_size": 100}
VARIED = {
    "noise_multiplier": (0.75, 1.0, 1.25, 1.5, 2.0, 4.0),
    "group_size": (25, 50, 100, 200),
    "iterations": (100, 200, 500, 1000),
    "images_per_class": (10, 50, 100, 200),
}


HELD_OUT = 5000  # training images on which the number of passes is chosen


def held_out(images: ImageSet, _: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Return the training images without some, and these in place of the test images."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[HELD_OUT:]), images.subset(order[:HELD_OUT])


def condense(
    name: str, method: str, data: list[str], epsilons: list[float | None], epochs: int = 300, **more: Any
) -> list[Job]:
    given = {"measures": (f"convnet@{epochs}", *more.pop("measures", ())), "seeds": more.pop("seeds", 3)}
    given |= {"prepare": more.pop("prepare", None), "constants": more.pop("constants", {})}
    sizes = {} if method == "dm" else {"public_size": True}

    def params(one: str) -> dict[str, Any]:
        return {**sizes, **({"flip": one in MIRRORED} if method in ("ndpdc", "dm") else {}), **more}

    return jobs(name, method, data, epsilons, params=params, **given)


JOBS = [
    *condense("default", "ndpdc", SETS, [1.0], 1000, measures=OTHERS),
    *condense("default", "ldpdc", SETS, [1.0], 1000, measures=OTHERS),
    *condense("default", "ndpdc", SETS, [10.0, 0.2, 2.0]),
    *condense("default", "ldpdc", SETS, [10.0, 0.2, 2.0]),
    *condense("default", "dpmix", SETS, [1.0], group_size=50),
    *condense("default", "dm", SETS, [None], iterations=1000),
    *condense("settings of the paper", "ldpdc", SETS, [100.0], **PAPER),
    *condense("settings of the paper", "ndpdc", SETS[:3], [100.0], seeds=1, preset="paper", iterations=10_000, **PAPER),
    *condense("kept releases", "ndpdc", SETS, [1.0], 1000, preset="kept"),
    *condense("kept releases", "ndpdc", SETS[:3], [0.2, 10.0], preset="kept"),
    *(
        job
        for passes in (1, 3, 10, 40)
        for job in condense(
            f"held out, passes = {passes}",
            "ndpdc",
            SETS[:3],
            [1.0],
            seeds=1,
            constants={"passes": passes},
            prepare=held_out,
        )
    ),
    *(
        job
        for name, values in VARIED.items()
        for value in values
        for job in condense(f"{name} = {value:g}", "ndpdc", SETS[:3], [1000.0], seeds=1, **{**MIDDLE, name: value})
    ),
]
