"""PGE: accuracy with and without its parts, samplers, and the published form."""

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


def pge(
    name: str, data: list[str], epsilons: list[float], constants: Any = None, seeds: int = 1, **params: Any
) -> list[Job]:
    given = {"params": {"public_size": True, **params}, "constants": constants or {}, "seeds": seeds}
    return jobs(name, "pge", data, epsilons, **{"measures": MEASURES, **given})


JOBS = [
    *pge("default", [*GREY, "celeba"], [1.0, 10.0], seeds=3),
    *pge("default", ["celeba64"], [1.0, 10.0], {"warm_start": WarmStartSettings(batch_size=128)}, seeds=3),
    *pge("no warm start", GREY[:1], [10.0], warm="none", sampling_prob=0.03),
    *pge("warm start alone", GREY, [10.0], {"warm_start": WarmStartSettings(share=0.99)}, steps=2),
    *pge("residual enhancement", GREY, [10.0], residual="small_cifar10"),
    *pge("256 pixels", ["celeba256"], [10.0], {"width": 64}, autoencoder="taef2", steps=150, sampling_prob=0.2),
    *jobs("samplers", "pge", GREY[:1], [10.0], params={"public_size": True}, seeds=0, samples=SAMPLERS),
    *jobs("as published", "pge-as-published", GREY, [10.0], params={"steps": 1500}, seeds=1, measures=MEASURES),
]
