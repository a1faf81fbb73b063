"""Jobs of seconds on digits, to try the runner and, on a GPU, methods with a prior, votes, kept releases, tuning.

`python -m benchmarks smoke --results build/smoke`. The figures mean nothing.
"""

from typing import Any

from benchmarks.runner import Job, Sets, jobs
from sfumato.data import ImageSet
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.tuned import ScoringSettings

TINY = {"features": 100, "steps": 20, "batch_size": 50}
SHORT = {"public_size": True, "steps": 2}
ADAPTATION = {"adaptation": PainterTraining(pool=200, rounds=1, practice_steps=2, practice_batch=8, levels=2)}
GRID = '[{"features": 100, "steps": 20, "batch_size": 50}, {"features": 50, "steps": 20, "batch_size": 50}]'


def enlarged(*sets: ImageSet) -> Sets:
    """Return digits of 32 pixels, a size that priors serve."""
    train, test = (
        ImageSet(each.images.repeat_interleave(4, 2).repeat_interleave(4, 3), each.labels, each.classes)
        for each in sets
    )
    return train, test


def once(name: str, method: str, constants: dict[str, Any] | None = None, **params: Any) -> list[Job]:
    given = {"params": {"secure": False, **params}, "constants": constants or {}, "seeds": 1, "images": 20}
    return jobs(name, method, ["digits"], [1.0], prepare=enlarged, **given)


JOBS = [
    *jobs("default", "dp-merf", ["digits"], [1.0], params={**TINY, "secure": False}, seeds=2, images=500),
    *once("kept", "ndpdc", preset="kept", iterations=20, images_per_class=10),
    *once("tuned", "tuned", {"scoring": ScoringSettings(images=100, epochs=1)}, base="dp-merf", grid=GRID),
    *once("votes", "private-evolution", ADAPTATION, prior="tiny-imagenet", rounds=2, candidates=4),
    *once("tiny-imagenet", "dp-diffusion", ADAPTATION, prior="tiny-imagenet", sampling_prob=0.1, **SHORT),
    *once("tiny-imagenet", "atelier", ADAPTATION, prior="tiny-imagenet", **SHORT),
    *once("random-process", "atelier", ADAPTATION, prior="random-process", **SHORT),
]
