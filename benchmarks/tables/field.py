"""Our methods in the measures of the field: FID against the training images, and DPImageBench's three classifiers.

Images are drawn anew: one fit for each seed. FID of methods with a prior is part of their own tables (`priors`,
`private-evolution`). Published figures are in `benchmarks/published.json`. `ndpdc` has 500 images only (faces: 100), so
that its FID is too large. The order is that of use: one seed of everything at ε = 1 comes first.
"""

from typing import Any

from benchmarks.measures import MIRRORED
from benchmarks.runner import Job, jobs

SIZES = {"public_size": True, "secure": False}
GREY, COLOUR, FACES = ["mnist", "fashion-mnist"], ["cifar10"], ["celeba"]
EVERY = [*GREY, *COLOUR, *FACES]
FID = ("small_cnn", "fidelity", "fid")
FULL = ("dpimagebench",)
SHORT = ("dpimagebench@20",)  # of 200 epochs, which would take hours
PRIOR = {**SIZES, "prior": "tiny-imagenet"}


def condensed(data: str) -> dict[str, Any]:
    return {**SIZES, "flip": data in MIRRORED}


def at(epsilon: float) -> list[Job]:
    budget, once = [epsilon], {"measures": FID, "seeds": 1}
    return [
        *jobs("default", "atelier", GREY, budget, params=SIZES, measures=FID, first=FULL),
        *jobs("default", "atelier", COLOUR, budget, params=SIZES, measures=FID, first=SHORT),
        *jobs("default", "atelier", FACES, budget, params=SIZES, measures=FID),
        *jobs("default", "dp-merf", EVERY, budget, params=SIZES, **once),
        *jobs("default", "dp-kernel", EVERY, budget, params=SIZES, **once),
        *jobs("default", "dp-mepf", EVERY, budget, params=SIZES, **once),
        *jobs("default", "ndpdc", EVERY, budget, params=condensed, measures=("fidelity", "fid"), seeds=1),
        *jobs("default", "dp-lflow", [*GREY, *FACES], budget, params=SIZES, **once),
        *jobs("default", "pge", [*GREY, *FACES], budget, params=SIZES, **once),
        *jobs("tiny-imagenet", "atelier", COLOUR, budget, params=PRIOR, measures=SHORT, seeds=1),
    ]


JOBS = [
    *jobs("real images", None, EVERY, [None], measures=FID, seeds=1),
    *at(1.0),
    *at(10.0),
]
