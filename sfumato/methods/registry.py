"""The methods by their keys: built-in ones, and those that other packages register."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from inspect import cleandoc, isabstract
from pathlib import Path
from typing import Any, TypeVar

from sfumato.certificate.issue import content_digest, file_digest
from sfumato.data import DataError, PublicFacts
from sfumato.methods.base import FORMAT, Synthesizer
from sfumato.methods.parameters import chosen_device, usable_device

DEFAULT = "auto"
ENTRY_POINTS = "sfumato.methods"  # entry point group of methods from other packages
METHODS: dict[str, type[Synthesizer]] = {}

M = TypeVar("M", bound=type[Synthesizer])


@dataclass(frozen=True)
class MethodInfo:
    """One line of `list_methods`."""

    key: str
    paper: str
    summary: str
    guarantee: str


@dataclass(frozen=True)
class Choice:
    """What `auto` chooses.

    - method: its key.
    - reason: why, for people.
    """

    method: str
    reason: str


def choose(device: str = "auto", *, prior: str = "", channels: int | None = None) -> Choice:
    """Choose a method from public facts: the most accurate one within minutes, as measured (docs/choosing.md).

    A prior is never chosen: that its images are public is for the user to declare.

    - device: as the parameter of methods.
    - prior: that was given; empty: none.
    - channels: of the images, 1 or 3; None (default): not known.
    """
    if prior:
        return Choice("atelier", "it adapts the prior that was given, and has a teacher that labels the images")
    if chosen_device(device).type == "cuda":
        return Choice("atelier", "most accurate with a GPU")
    if channels == 3:
        return Choice("atelier", "colour images without a GPU: more accurate than dp-merf on photographs")
    return Choice("dp-merf", "grey images without a GPU: the fastest" if channels else "the fastest without a GPU")


def register(method: M) -> M:
    """Register a method under its key; usable as a class decorator.

    Raise `TypeError` for anything but a complete subclass of `Synthesizer`, `ValueError` if another class has its key.
    """
    if not (isinstance(method, type) and issubclass(method, Synthesizer)) or isabstract(method):
        raise TypeError(f"{method!r} is not a complete subclass of Synthesizer")
    for name in ("key", "paper", "summary"):
        if not isinstance(getattr(method, name, None), str):
            raise TypeError(f"{method.__name__} has no {name!r}; set it to a text in the class")
    if METHODS.get(method.key, method) is not method:
        raise ValueError(f"there is a method {method.key!r} already ({METHODS[method.key].__name__})")
    METHODS[method.key] = method
    return method


def method_type(key: str) -> type[Synthesizer]:
    """Return the class of a method. Raise `ValueError` for an unknown key; the message names the nearest one."""
    _load_entry_points()
    if key not in METHODS:
        near = difflib.get_close_matches(key, METHODS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
        raise ValueError(f"there is no method {key!r}; {hint}")
    return METHODS[key]


def list_methods() -> list[MethodInfo]:
    """List the available methods: key, paper, summary, guarantee."""
    _load_entry_points()
    return [MethodInfo(m.key, m.paper, m.summary, m.guarantee) for m in METHODS.values()]


def describe_parameters(key: str) -> list[dict[str, Any]]:
    """Return the parameters of a method: name, default, and the text of its docstring."""
    kind = method_type(key)
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = cleandoc(vars(base).get("__doc__") or "")
        for names, described in re.findall(r"^- ([\w, ]+): (.*(?:\n  .*)*)", text, re.MULTILINE):
            texts |= dict.fromkeys(names.split(", "), " ".join(described.split()))
    known = [each for each in fields(kind) if each.init]
    values = [
        asdict(each.default) if is_dataclass(each.default) and not isinstance(each.default, type) else each.default
        for each in known
    ]
    names = [each.name for each in known]
    return [
        {"name": name, "default": value, "what": texts.get(name, "")} for name, value in zip(names, values, strict=True)
    ]


def create(method: str = DEFAULT, *, channels: int | None = None, **params: Any) -> Synthesizer:
    """Return a method by its key, with parameters by name.

    - method: a key of `list_methods`; `auto`: `atelier` on a GPU, with a prior or for colour images, otherwise
      `dp-merf`.
    - channels: of the images, 1 or 3, for `auto`; None (default): not known.
    - params: parameters of the method. An unknown name is an error that names the nearest one.
    """
    if method == DEFAULT:
        method = choose(params.get("device", "auto"), prior=params.get("prior", ""), channels=channels).method
    kind = method_type(method)
    kind.check_params(params)
    return kind(**params).validate()


def load(folder: str | Path, *, device: str = "auto") -> Synthesizer:
    """Return the model that `fit` or `save` wrote to `folder`."""
    source = Path(folder)
    usable_device(device)
    try:
        content = json.loads((source / "config.json").read_text("utf-8"))
        if content["format"] != FORMAT:
            found = content["format"]
            older = " of sfumato 0.1.0; fit again, or use that version" if found == "sfumato-model/1" else ""
            raise DataError(f"{source} holds a model of format {found!r}{older}. This version reads {FORMAT!r}")
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
        kind = method_type(content["method"])
        return kind.from_json({**content["parameters"], "device": device})._load(source, public)
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise DataError(f"{source} holds no finished model: {missing} is missing") from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{source} does not hold a model of this package: {error}") from None


@cache
def _load_entry_points() -> None:
    """Register the methods of other packages, once. A broken one is a warning, not an error."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            method = point.load()
            if getattr(method, "key", point.name) != point.name:
                raise ValueError(f"its key is {method.key!r}; name the entry point like that")
            register(method)
        except Exception as error:
            warnings.warn(f"the method {point.name!r} of {point.value} cannot be loaded: {error}", stacklevel=2)
