"""One fit each of five methods at epsilon 1, to see that a change of the code left the figures as they were."""

from benchmarks.measures import MIRRORED
from benchmarks.runner import jobs

SETS = ["mnist", "fashion-mnist", "cifar10"]
THREE = ("small_cnn", "convnet", "resnet18")
ONCE = {"seeds": 1}


def condensed(data: str) -> dict[str, object]:
    return {"public_size": True, "flip": data in MIRRORED}


SIZES = {"public_size": True}
JOBS = [
    *jobs("default", "atelier", SETS, [1.0], params=SIZES, measures=THREE, **ONCE),
    *jobs("default", "dp-merf", SETS[:2], [1.0], params=SIZES, **ONCE),
    *jobs("default", "ndpdc", SETS, [1.0], params=condensed, measures=("convnet@1000",), **ONCE),
    *jobs("default", "dp-lflow", SETS[:2], [1.0], params=SIZES, **ONCE),
    *jobs("default", "dp-mepf", SETS, [1.0], params=SIZES, measures=("mlp", "small_cnn"), **ONCE),
]
