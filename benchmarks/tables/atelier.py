"""Atelier at several budgets, and what its parts are worth: accuracy, the teacher, distances."""

from dataclasses import replace

from benchmarks.runner import Job, Sample, jobs
from sfumato.methods.atelier import PAINTER, Atelier

GREY = ["mnist", "fashion-mnist"]
SETS, OTHERS = [*GREY, "cifar10"], ["mednist", "celeba", "brain_mri64"]
SIZES = {"public_size": True}
THREE = ("small_cnn", "convnet", "resnet18")
SOFT = {"soft labels": Sample({"soft_labels": True}, measures=THREE)}
PLAIN = {"no variety": Sample({"variety": 0.0}, measures=(*THREE, "fidelity"))}
COUNTS = {f"{n} images": Sample(images=n, measures=THREE) for n in (1_000, 5_000, 20_000, 200_000)}
NO_COMMON = replace(Atelier.presets["high-noise"]["painter"], common_share=0.0)


def part(name: str, data: list[str], epsilon: float, constants: dict | None = None, **params: object) -> list[Job]:
    more = {"params": {**SIZES, **params}, "constants": constants or {}, "seeds": 1}
    return jobs(name, "atelier", data, [epsilon], measures=(*THREE, "teacher"), **more)


def default(data: list[str], epsilons: list[float], samples: dict[str, Sample]) -> list[Job]:
    measures = {"measures": (*THREE, "teacher"), "first": ("fidelity",)}
    return jobs("default", "atelier", data, epsilons, params=SIZES, samples=samples, **measures)


JOBS = [
    *default(SETS, [1.0, 0.2], {**SOFT, **PLAIN}),
    *default(SETS, [10.0], SOFT),
    *default(OTHERS, [1.0, 10.0, 0.2], {}),
    *part("teacher share 0.2", GREY, 1.0, {"teacher_share": 0.2}),
    *part("teacher share 0.6", GREY, 1.0, {"teacher_share": 0.6}),
    *part("no scattering", GREY, 1.0, {"painter": replace(PAINTER, scattering_share=0.0)}),
    *(replace(job, samples=COUNTS, seeds=0) for job in part("number of images", GREY[1:], 1.0)),
    *part("public encoder", ["cifar10"], 1.0, encoder="effnet_lite0"),
    *part("no common sums", SETS, 0.2, {"painter": NO_COMMON}),
    *(replace(job, samples=PLAIN, seeds=0) for job in part("no high-noise preset", SETS, 0.2, preset="default")),
]
