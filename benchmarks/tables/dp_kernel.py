"""DP-kernel at several budgets, its variants, and the published form: accuracy of a small CNN."""

from benchmarks.runner import Job, jobs
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import PainterSettings

GREY, OTHERS = ["mnist", "fashion-mnist"], ["cifar10", "celeba", "mednist"]
SIZES = {"public_size": True}
PAPER_GENERATOR = {"generator": GeneratorSizes("mmd-gan", latent=10, hidden=10, width=64)}


def variant(name: str, data: list[str], constants: dict | None = None, **params: object) -> list[Job]:
    return jobs(name, "dp-kernel", data, [1.0], params={**SIZES, **params}, constants=constants or {}, seeds=1)


JOBS = [
    *jobs("default", "dp-kernel", [*GREY, *OTHERS], [1.0, 10.0, 0.2], params=SIZES),
    *variant("one generator per class", GREY, variant="parallel"),
    *variant("pixels only", GREY, {"painter": PainterSettings(scattering_share=0.0)}),
    *variant("scattering only", GREY, {"painter": PainterSettings(scattering_share=1.0)}),
    *variant("one path", GREY[1:], paths=1, secure=False),  # exact noise takes minutes
    *variant("frequencies of whole images", GREY[1:], {"painter": PainterSettings(window=(2.0, 2.0))}),
    *variant(
        "residual generator",
        GREY[1:],
        {"generator": GeneratorSizes("residual", width=64), "painter": PainterSettings(learning_rate=2e-3)},
    ),
    *variant("generator of the paper", GREY[1:], PAPER_GENERATOR),
    *jobs(
        "as published",
        "dp-kernel-as-published",
        GREY,
        [1.0],
        params={"steps": 5000, "learning_rate": 1e-3},
        constants=PAPER_GENERATOR,
        seeds=1,
    ),
]
