"""Methods that start from a prior, beside the same method without one: accuracy, the teacher, distances."""

from math import inf
from typing import Any

from benchmarks.runner import Job, jobs

SETS = ["cifar10", "celeba64", "brain_mri64"]
SIZES = {"public_size": True, "secure": False}  # exact noise takes minutes for each of the gradients
MEASURES = {"measures": ("small_cnn", "convnet", "resnet18", "teacher"), "first": ("fidelity", "fid")}
PHOTOGRAPHS = {"prior": "tiny-imagenet"}
NOBODY = {"prior": "random-process"}


def with_prior(
    name: str,
    method: str,
    given: dict[str, str],
    data: list[str] = SETS,
    epsilons: tuple[float, ...] = (1.0, 10.0),
    **more: Any,
) -> list[Job]:
    measures = MEASURES if method == "atelier" else {**MEASURES, "measures": MEASURES["measures"][:3]}
    return jobs(name, method, data, epsilons, params={**SIZES, **given}, **{**measures, **more})


JOBS = [
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS),
    *with_prior("random-process", "atelier", NOBODY),
    *with_prior("tiny-imagenet", "dp-diffusion", PHOTOGRAPHS, SETS[:1]),
    *with_prior("random-process", "dp-diffusion", NOBODY),
    *with_prior("random-process", "atelier", NOBODY, ["mnist", "fashion-mnist"]),
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS, ["celeba"]),
    *with_prior("tiny-imagenet", "atelier", PHOTOGRAPHS, SETS, (inf,), seeds=1),  # what limits besides noise
    *jobs("real images", None, SETS, [None], measures=MEASURES["measures"][:3], first=("fidelity",), seeds=1),
]
