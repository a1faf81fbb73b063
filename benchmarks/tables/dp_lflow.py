"""DP-LFlow: accuracy, detection of other classes, without a warm start, one conditional model, 256 pixels.

Jobs `procedural autoencoder` tell what private gradients add over the warm start where all of them are for the flow;
`..., no gradients` has the same releases with a learning rate of zero, so that both know the same.
"""

from typing import Any

from benchmarks.runner import Job, Sample, jobs
from sfumato.methods.warm_start import WarmStartSettings

GREY, OTHERS, LARGE = ["mnist", "fashion-mnist"], ["celeba", "mednist"], ["brain_mri256", "celeba256"]
SIZES = {"public_size": True}
ALONE = {"warm_start": WarmStartSettings(share=0.99, batch_size=128), "learning_rates": (1e-12, 1e-12, 1e-12)}
LARGE_PARAMS = {"warm": "none", "sampling_prob": 0.2, "steps": 200}
SHARPNESS = {"mnist": 5.0, "fashion-mnist": 8.0}  # as in the paper; 2 for other images


def flow(
    name: str, data: list[str], epsilons: list[float], constants: Any = None, seeds: int = 1, **params: Any
) -> list[Job]:
    found = []
    for one in data:
        measures = ("small_cnn", "auroc", "auroc_image") if one in GREY else ("small_cnn",)
        sharpened = Sample({"sharpness": SHARPNESS.get(one, 2.0)}, measures=("small_cnn",), seeds=seeds)
        own = {"code": 32} if one == "celeba" else {}
        more = {"params": {**SIZES, **params}, "constants": {**own, **(constants or {})}, "seeds": seeds}
        found += jobs(name, "dp-lflow", [one], epsilons, measures=measures, samples={"sharpened": sharpened}, **more)
    return found


FIXED = {"preset": "procedural-autoencoder"}
STILL = {"learning_rates": (1e-12, 1e-12, 1e-12)}
JOBS = [
    *flow("default", [*GREY, *OTHERS], [1.0, 10.0], seeds=3),
    *flow("warm start alone", GREY, [1.0, 10.0], ALONE, steps=2),
    *flow("256 pixels", LARGE, [10.0], {"code": 64, "couplings": 6}, **LARGE_PARAMS),
    *flow("no warm start", GREY, [1.0, 10.0], warm="none"),
    *flow("procedural autoencoder", GREY[1:], [1.0, 10.0], **FIXED),
    *flow("procedural autoencoder, no gradients", GREY[1:], [1.0, 10.0], STILL, **FIXED),
    *flow("procedural autoencoder, no warm start", GREY[1:], [1.0, 10.0], **FIXED, warm="none"),
    *flow("one conditional model", GREY, [1.0], variant="conditional"),
]
