"""Methods with their presets for a CPU, on two cores and on one core at epsilon 1. For times use --workers 1."""

from typing import Any

from benchmarks.runner import Job, jobs

GREY = ["mnist", "fashion-mnist"]


def on_cpu(threads: int, method: str, data: list[str], measure: str = "small_cnn", **more: Any) -> list[Job]:
    name, sizes = ("two cores" if threads == 2 else "one core"), {} if method == "dp-merf" else {"public_size": True}
    given = {"params": {**sizes, **more.pop("params", {})}, "measures": (measure,), "seeds": 1, **more}
    return jobs(name, method, data, [1.0], device="cpu", threads=threads, **given)


JOBS = [
    *on_cpu(2, "atelier", GREY),
    *on_cpu(2, "dp-kernel", GREY, params={"steps": 3000}),
    *on_cpu(2, "dp-merf", GREY),
    *on_cpu(1, "atelier", GREY),
    *on_cpu(1, "dp-kernel", GREY),
    *on_cpu(1, "dp-mepf", GREY[1:], params={"secure": False}),
    *on_cpu(1, "ldpdc", GREY[:1], "small_cnn@300"),
    *on_cpu(1, "ndpdc", GREY, "small_cnn@300", params={"iterations": 200}, constants={"width": 32}),
]
