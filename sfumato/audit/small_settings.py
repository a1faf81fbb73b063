"""Settings that make every built-in method small, for audits that run a method many times.

The guarantee does not depend on these settings: noise is calibrated to them.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sfumato.engine import GradientVault
from sfumato.methods.base import Synthesizer
from sfumato.methods.generator_method import GeneratorSizes
from sfumato.methods.kernel_painter import PainterSettings
from sfumato.methods.pge import SamplerSettings
from sfumato.methods.prior_painter import PainterTraining
from sfumato.methods.teacher import TeacherSettings
from sfumato.methods.tuned import ScoringSettings
from sfumato.priors.prior import PriorCard, save_prior
from sfumato.testing import build

SIZES = GeneratorSizes(width=8)
PAINTER = PainterSettings(features=20, features_per_step=10, cnn_images=20)
SAMPLER = SamplerSettings(levels=2, leapfrogs=1)
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "atelier": {
        "steps": 1,
        "paths": 1,
        "batch_size": 20,
        "painter": PainterSettings(features=20, features_per_step=10, cnn_images=20, common_share=0.5),
        "teacher": TeacherSettings(steps=2, cnn_images=20),
        "generator": SIZES,
    },
    "dp-merf": {"features": 100, "steps": 3, "batch_size": 20},
    "dp-mepf": {"encoder": "scattering", "steps": 2, "batch_size": 20, "snapshots": 1, "generator": SIZES},
    "dp-kernel": {"steps": 2, "paths": 2, "batch_size": 40, "painter": PAINTER, "generator": SIZES},
    "dp-diffusion": {
        "steps": 2,
        "sampling_prob": 0.5,
        "adaptation": PainterTraining(pool=12, rounds=2, practice_steps=1, practice_batch=4, levels=2),
    },
    "private-evolution": {"rounds": 2, "candidates": 3, "adaptation": PainterTraining(pool=12, levels=2)},
    "dp-lflow": {
        "warm": "none",
        "steps": 2,
        "sampling_prob": 0.5,
        "code": 3,
        "width": 2,
        "couplings": 1,
        "hidden": 4,
        "procedural_batches": 2,
    },
    "pge": {"warm": "none", "steps": 2, "sampling_prob": 0.1, "width": 8, "sampling": SAMPLER},
    "ldpdc": {"images_per_class": 8, "sampling_prob": 0.5},
    "ndpdc": {"images_per_class": 8, "iterations": 4, "width": 8, "sampling_prob": 0.5, "passes": 2},
    "dpmix": {"images_per_class": 10, "sampling_prob": 0.5},
    "tuned": {
        "base": "dp-merf",
        "grid": '[{"features": 60, "steps": 2, "batch_size": 20}, {"features": 100, "steps": 2, "batch_size": 20}]',
        "scoring": ScoringSettings(images=20, epochs=1),
    },
    "dm": {"images_per_class": 10, "iterations": 2, "width": 8},
    "dp-kernel-as-published": {"steps": 2, "generator": SIZES},
    "pge-as-published": {"steps": 2, "width": 8, "sampling": SAMPLER},
}
ATELIER_WITH_A_PRIOR = {**SMALL_SETTINGS["dp-diffusion"], "teacher": SMALL_SETTINGS["atelier"]["teacher"]}

Make = Callable[..., Synthesizer]


def small(method: str | type[Synthesizer], **settings: Any) -> Make:
    """Return a function that builds a method with small settings, on the CPU; `settings` replace them."""
    key = method if isinstance(method, str) else method.key
    with_a_prior = key == "atelier" and settings.get("prior") not in (None, "none")
    fixed = {"device": "cpu", **(ATELIER_WITH_A_PRIOR if with_a_prior else SMALL_SETTINGS.get(key, {})), **settings}
    if key in ("dp-diffusion", "private-evolution"):
        fixed = {"prior": random_prior(), **fixed}
    return lambda **params: build(method, **{**fixed, **params})


def with_vault(make: Make, vault: type[GradientVault] | None) -> Make:
    """Return a function that builds the same method with another vault, for planted faults."""

    def faulty(**params: Any) -> Synthesizer:
        model = make(**params)
        if vault is not None:
            model.vault_type = vault  # type: ignore[misc]
        return model

    return faulty


@cache
def random_prior() -> str:
    """Return a file with a small prior of random weights, which is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="sfumato-audit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    card = PriorCard("random", 1, 16, 2, (8, 8), 8, 1, "random weights", "Apache-2.0")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return str(save_prior(folder, card, card.new_network().state_dict()))
