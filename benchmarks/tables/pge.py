"""PGE: accuracy with and without its parts, what prior, gradients and sampler add, and the published form.

Jobs named `prior ...` start from a prior. `prior alone` has a learning rate of zero, so that it knows no class; the
sample `ode` takes the probability flow in place of the Hamiltonian sampler; `prior, warm start` learns from the images
of dp-kernel before the gradients, and `..., no gradients` only from these.
"""

from typing import Any

from benchmarks.runner import Job, Sample, jobs
from sfumato.methods.pge import SamplerSettings
from sfumato.methods.warm_start import WarmStartSettings

GREY = ["mnist", "fashion-mnist"]
MEASURES = ("small_cnn", "agreement", "accepted")
FASTER = {"images": 10_000, "measures": ("small_cnn", "agreement", "images_per_s")}
SAMPLERS = {
    "hamiltonian": Sample(**FASTER),
    "hamiltonian, half steps": Sample({"sampling": SamplerSettings(step_size=0.5)}, **FASTER),
    "rayleigh momenta": Sample({"sampling": SamplerSettings(momentum="rayleigh")}, **FASTER),
    "uniform momenta": Sample({"sampling": SamplerSettings(momentum="uniform")}, **FASTER),
    "langevin": Sample({"sampler": "langevin"}, **FASTER),
    "ode": Sample({"sampler": "ode"}, **FASTER),
}
LARGE = WarmStartSettings(batch_size=128)
NO_GRADIENTS = {"learning_rate": 1e-12}


def pge(
    name: str,
    data: list[str],
    epsilons: list[float],
    constants: Any = None,
    seeds: int = 1,
    more: Any = None,
    **params: Any,
) -> list[Job]:
    given = {"params": {"public_size": True, **params}, "constants": constants or {}, "seeds": seeds}
    return jobs(name, "pge", data, epsilons, **{"measures": MEASURES, **given, **(more or {})})


def with_prior(data: list[str], prior: str, images: int, sampling_prob: float) -> list[Job]:
    """Return jobs that tell what prior, private gradients, warm start and sampler add."""
    own: dict[str, Any] = {"prior": prior, "secure": False, "sampling_prob": sampling_prob}
    few = {"images": images, "measures": ("small_cnn", "agreement", "fidelity")}
    parts = {**few, "samples": {"ode": Sample({"sampler": "ode"}, images=images)}}
    both = {"warm": "dp-kernel", "preset": "prior"}
    short = {"warm_start": WarmStartSettings(steps=1000, batch_size=256)}
    return [
        *pge("prior", data, [1.0, 10.0], **own, more=parts),
        *pge("prior alone", data, [1.0], NO_GRADIENTS, **own, steps=2, more=few),
        *pge("prior, warm start", data, [1.0], short, **own, **both, more=few),
        *pge("prior, warm start, no gradients", data, [1.0], {**short, **NO_GRADIENTS}, **own, **both, more=few),
    ]


JOBS = [
    *pge("default", [*GREY, "celeba"], [1.0, 10.0], seeds=3),
    *pge("default", ["celeba64"], [1.0, 10.0], {"warm_start": LARGE}, seeds=3),
    *with_prior(GREY, "random-process", 10_000, 0.05),
    *with_prior(["celeba"], "tiny-imagenet", 10_000, 0.1),
    *with_prior(["celeba64"], "tiny-imagenet", 4000, 0.1),
    *pge("no warm start", GREY[:1], [10.0], warm="none", sampling_prob=0.03),
    *pge("warm start alone", GREY, [10.0], {"warm_start": WarmStartSettings(share=0.99)}, steps=2),
    *pge("residual enhancement", GREY, [10.0], residual="small_cifar10"),
    *pge("256 pixels", ["celeba256"], [10.0], {"width": 64}, autoencoder="taef2", steps=150, sampling_prob=0.2),
    *jobs("samplers", "pge", GREY[:1], [10.0], params={"public_size": True}, seeds=0, samples=SAMPLERS),
    *jobs("as published", "pge-as-published", GREY, [10.0], params={"steps": 1500}, seeds=1, measures=MEASURES),
]
