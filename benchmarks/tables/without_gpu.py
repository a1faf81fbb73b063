"""Methods with their presets for a CPU, on two cores and on one core at epsilon 1. For times use --workers 1.

`photographs`: what a default for colour images has to be chosen from, with the presets for a CPU and few images. The
results do not depend on the device, their times do: --device cuda measures all of it in minutes.
"""

from typing import Any

from benchmarks.runner import Job, Sets, jobs
from sfumato.data import ImageSet

GREY = ["mnist", "fashion-mnist"]
TRAIN, TEST, DRAWN = 10_000, 3000, 3000  # photographs


def on_cpu(threads: int, method: str, data: list[str], measure: str = "small_cnn", **more: Any) -> list[Job]:
    name, sizes = ("two cores" if threads == 2 else "one core"), {} if method == "dp-merf" else {"public_size": True}
    given = {"params": {**sizes, **more.pop("params", {})}, "measures": (measure,), "seeds": 1, **more}
    return jobs(name, method, data, [1.0], device="cpu", threads=threads, **given)


def few(train: ImageSet, test: ImageSet) -> Sets:
    """Return the first images of both sets; those of CIFAR-10 are in random order."""
    return _first(train, TRAIN), _first(test, TEST)


def _first(images: ImageSet, count: int) -> ImageSet:
    assert images.labels is not None
    return ImageSet(images.images[:count], images.labels[:count], images.classes)


def photographs(name: str, method: str, **params: Any) -> list[Job]:
    given = {"public_size": True, "secure": False, **params}
    measures = ("small_cnn", "convnet", "fidelity")
    return jobs(name, method, ["cifar10"], [1.0], params=given, measures=measures, seeds=1, prepare=few, images=DRAWN)


JOBS = [
    *on_cpu(2, "atelier", GREY),
    *on_cpu(2, "dp-kernel", GREY, params={"steps": 3000}),
    *on_cpu(2, "dp-merf", GREY),
    *on_cpu(1, "atelier", GREY),
    *on_cpu(1, "dp-kernel", GREY),
    *on_cpu(1, "dp-mepf", GREY[1:], params={"secure": False}),
    *on_cpu(1, "ldpdc", GREY[:1], "small_cnn@300"),
    *on_cpu(1, "ndpdc", GREY, "small_cnn@300", params={"iterations": 200}, constants={"width": 32}),
    *photographs("photographs", "dp-merf"),
    *photographs("photographs", "atelier", preset="cpu"),
    *photographs("photographs, random-process", "atelier", preset="prior-cpu", prior="random-process"),
    *photographs("photographs, tiny-imagenet", "atelier", preset="prior-cpu", prior="tiny-imagenet"),
]
