"""Private Evolution with the shipped priors: votes alone, and after an adaptation ("tune, then vote")."""

from typing import Any

from benchmarks.runner import Job, jobs

SETS = ["cifar10", "celeba"]
MEASURES = ("small_cnn", "resnet18", "fidelity", "fid")


def evolve(name: str, data: list[str], epsilons: list[float], seeds: int = 3, **params: Any) -> list[Job]:
    given = {"prior": "tiny-imagenet", "public_size": True, "secure": False, **params}
    return jobs(name, "private-evolution", data, epsilons, params=given, measures=MEASURES, seeds=seeds)


JOBS = [
    *evolve("votes", SETS, [1.0, 10.0]),
    *evolve("tune, then vote", SETS, [1.0, 10.0], adapt=True),
    *evolve("candidates = 500", SETS[:1], [1.0, 10.0], 1, candidates=500),
    *evolve("rounds = 4", SETS[:1], [1.0, 10.0], 1, rounds=4),
]
