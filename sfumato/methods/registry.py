"""The methods by their keys."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.certificate.issue import content_digest, file_digest
from sfumato.data import DataError, PublicFacts
from sfumato.methods.atelier import Atelier
from sfumato.methods.base import FORMAT, Synthesizer, chosen_device
from sfumato.methods.dm import DistributionMatching
from sfumato.methods.dp_kernel import KernelGenerator
from sfumato.methods.dp_lflow import LatentFlow
from sfumato.methods.dp_mepf import PerceptualEmbedding
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.dpdc import LinearCondenser, NonlinearCondenser
from sfumato.methods.dpmix import Mixer
from sfumato.methods.pge import GradientEstimation

_TYPES: tuple[type[Synthesizer], ...] = (
    MeanEmbedding,
    PerceptualEmbedding,
    KernelGenerator,
    Atelier,
    LatentFlow,
    GradientEstimation,
    NonlinearCondenser,
    LinearCondenser,
    Mixer,
    DistributionMatching,
)
METHODS: dict[str, type[Synthesizer]] = {method.key: method for method in _TYPES}
DEFAULT = "auto"
BY_DEVICE = {"cuda": Atelier.key, "cpu": MeanEmbedding.key}  # best there in a few minutes, by our measurements


@dataclass(frozen=True)
class MethodInfo:
    """One line of `list_methods`."""

    key: str
    paper: str
    summary: str
    guarantee: str


def list_methods() -> list[MethodInfo]:
    """What there is: key, paper, what it does, what it guarantees."""
    return [MethodInfo(m.key, m.paper, m.summary, m.guarantee) for m in METHODS.values()]


def create(method: str = DEFAULT, **params: Any) -> Synthesizer:
    """A method by its key, with parameters by name; unknown ones are errors that name the nearest.

    `auto` is `atelier` on a GPU, and `dp-merf` otherwise. Parameters that are not given are those that go with the ones
    that are (`suited` of the method's class) and, without a GPU, finish in minutes there (`on_cpu`).
    """
    if method == DEFAULT:
        method = BY_DEVICE.get(chosen_device(params.get("device", "auto")).type, MeanEmbedding.key)
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
        raise ValueError(f"there is no method {method!r}; {hint}")
    kind = METHODS[method]
    kind.check_params(params)
    model = kind(**params)
    own = kind.on_cpu if chosen_device(model.device).type == "cpu" else {}
    suited: dict[str, Any] = {}
    for (name, value), others in kind.suited.items():
        if {**model.get_params(), **own, **suited, **params}[name] == value:
            suited = {**others, **suited}
    return model.set_params(**{**own, **suited, **params}).validate()


def load(folder: str | Path, *, device: str = "auto") -> Synthesizer:
    """A model that `fit` or `save` left in `folder`."""
    source = Path(folder)
    try:
        content = json.loads((source / "config.json").read_text("utf-8"))
        if content["format"] != FORMAT:
            raise DataError(f"{source}: format {content['format']!r} is not {FORMAT!r}")
        facts = content["public"]
        public = PublicFacts(**{**facts, "shape": tuple(facts["shape"]), "classes": tuple(facts["classes"])})
        stated = json.loads((source / "certificate.json").read_text("utf-8"))
        if stated["digest"] != content_digest(stated):
            raise DataError(f"{source / 'certificate.json'} was edited after it was made; nothing was drawn")
        covered = stated["outputs"]
        for name in ("model.safetensors", "config.json"):
            if not (source / name).exists():
                raise DataError(f"{source} holds no finished model: {name} is missing")
            if covered.get(name) != file_digest(source / name):
                raise DataError(f"{source / name} is not the file that the run's certificate covers; nothing was drawn")
        model = create(content["method"]).from_json({**content["parameters"], "device": device})
        return model._load(source, public)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise DataError(f"{source} holds no finished model: {missing} is missing") from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{source} does not hold a model of this package: {error}") from None
