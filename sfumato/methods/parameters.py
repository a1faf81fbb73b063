"""Parameters of methods: those that all share, presets, where each value comes from, checks, the form in JSON."""

from __future__ import annotations

import copy
import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import torch

from sfumato.data import PublicFacts
from sfumato.privacy import Budget
from sfumato.privacy.budget import Adjacency, Unit

AUTO, NO_PRESET = "auto", "default"


@dataclass(frozen=True)
class Setting:
    """One setting of a method (NAME, or NAME.FIELD), its value, and its source: `given`, `default` or `preset NAME`.

    Where a fit uses another value, the setting has that one, and its source says which was set and why it changed.
    """

    name: str
    value: Any
    source: str


@dataclass(kw_only=True, eq=False)
class Parameterized:
    """What a method has before `fit`: constructor parameters, by scikit-learn's conventions, and constants.

    Parameters of every method:

    - epsilon: float, 1.0; the privacy budget. `inf` adds no noise and gives no guarantee.
    - delta: float, 1e-5; choose it far below one over the number of images.
    - adjacency: `add-remove` (default) or `replace-one`; the neighbouring relation.
    - public_size: bool, False; whether class sizes are declared public. Otherwise noisy counts are released.
    - secure: bool, True; exact discrete Gaussian noise for releases that are made once.
    - device: `auto` (a GPU if there is one), `cpu` or `cuda`.
    - seed: int, 0; initial weights and sampling. Privacy noise never depends on it.
    - preset: `auto` (presets that suit the device and the noise), the name of a preset, or `default` for none.
      Presets never change a parameter that was given.
    """

    key: ClassVar[str]
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed"})
    adjustable: ClassVar[frozenset[str]] = frozenset()  # parameters of samples and scores only: free after `fit`
    _given: ClassVar[frozenset[str]] = frozenset()  # set for each instance by `__new__`

    epsilon: float = 1.0
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"
    public_size: bool = False
    secure: bool = True
    device: str = "auto"
    seed: int = 0
    preset: str = AUTO

    def __new__(cls, **params: Any) -> Self:
        self = super().__new__(cls)
        vars(self)["_given"] = frozenset(params)
        return self

    def __post_init__(self) -> None:
        vars(self)["_built"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting that is assigned counts as given."""
        object.__setattr__(self, name, value)
        if "_built" in vars(self) and name in self.__dataclass_fields__:
            vars(self)["_given"] = self._given | {name}

    # -- what a user calls --------------------------------------------------------------------------------

    def get_params(self) -> dict[str, Any]:
        """Return every parameter and its value."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name. Return self."""
        self.check_params(params)
        for name, value in params.items():
            setattr(self, name, value)
        return self

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """Raise for a name that is no parameter; the message names the nearest one."""
        known = [each.name for each in fields(cls) if each.init]
        for name in params:
            if name not in known:
                near = nearest_name(name, known)
                hint = f"; did you mean {near!r}?" if near else f"; it has {', '.join(known)}"
                raise ValueError(f"{cls.key} has no parameter {name!r}{hint}")

    def validate(self) -> Self:
        """Raise `ValueError` for a setting of the wrong type or out of range. Return self."""
        self._budget()
        words = {name: hint for name, hint in get_type_hints(type(self)).items() if get_origin(hint) is Literal}
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name in words and value not in get_args(words[name]):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(words[name])))}, got {value!r}")
            check_like(name, value, each.default, zero=name in self.may_be_zero)
        if self.preset not in (AUTO, NO_PRESET, *self.presets):
            known = ", ".join((AUTO, NO_PRESET, *self.presets))
            raise ValueError(f"preset must be one of {known}, got {self.preset!r}")
        chosen_device(self.device)
        return self

    @property
    def torch_device(self) -> torch.device:
        return chosen_device(self.device)

    def settings(self, public: PublicFacts) -> list[Setting]:
        """Return every setting that a fit on such data uses, and where it comes from."""
        in_use, found = self._resolved(public)._in_use(public), []
        for each in list_settings(self, self._given, self._preset_values(public)):
            used = in_use.get(each.name, in_use.get(each.name.partition(".")[0], (each.value, "")))
            if used is None and each.source == "given":
                found.append(replace(each, source="given, not used"))
            elif used is not None and used[0] != each.value:
                was = f"{each.value:g}" if isinstance(each.value, float) else each.value
                found.append(Setting(each.name, used[0], f"{each.source} {was}, {used[1]}"))
            elif used is not None:
                found.append(each)
        return found

    def with_constants(self, **values: Any) -> Self:
        """Set named constants of the method, for experiments. The certificate records them. Return self."""
        known = [each.name for each in fields(self) if not each.init]
        for name in values:
            if name not in known:
                raise ValueError(f"{self.key} has no constant {name!r}; it has {', '.join(known) or 'none'}")
        for name, value in values.items():
            setattr(self, name, value)
        return self.validate()

    def json_settings(self, public: PublicFacts) -> dict[str, Any]:
        """Return every setting that a fit on such data uses, as the certificate records them."""
        return self._resolved(public)._json_params()

    @classmethod
    def from_json(cls, params: dict[str, Any]) -> Self:
        """Return a model with these settings. Raise `TypeError` for names that are not its settings."""
        known = {each.name: each for each in fields(cls)}
        if unknown := sorted(params.keys() - known.keys()):
            raise TypeError(f"{cls.key} has no setting {unknown[0]!r}")
        read: dict[str, Any] = {}
        for name, value in params.items():
            default = known[name].default
            if is_dataclass(default) and isinstance(value, dict):
                kind: Any = type(default)
                read[name] = kind(**{part: as_tuple(each) for part, each in value.items()})
            else:
                read[name] = math.inf if value == "inf" else as_tuple(value)
        model = cls(**{name: value for name, value in read.items() if known[name].init})
        for name, value in read.items():
            if not known[name].init:
                setattr(model, name, value)
        vars(model)["_given"] = frozenset(read)
        return model

    # -- parts --------------------------------------------------------------------------------------------

    def _auto_presets(self, public: PublicFacts) -> list[str]:  # noqa: ARG002
        """Return the presets that `auto` applies, in order; later ones win."""
        return ["cpu"] if self.torch_device.type == "cpu" and "cpu" in self.presets else []

    def _in_use(self, public: PublicFacts) -> dict[str, tuple[Any, str] | None]:  # noqa: ARG002
        """Return what a fit uses in place of a setting, {NAME or NAME.FIELD: (value, reason)}; None: it is not used."""
        return {}

    def _preset_values(self, public: PublicFacts) -> dict[str, tuple[str, Any]]:
        """Return {setting: (preset, value)} for the presets that apply."""
        names = self._auto_presets(public) if self.preset == AUTO else [self.preset]
        found: dict[str, tuple[str, Any]] = {}
        for name in names:
            if name != NO_PRESET:
                found |= {setting: (name, value) for setting, value in self.presets[name].items()}
        if unknown := sorted(found.keys() - {each.name for each in fields(self)}):
            raise ValueError(f"{self.key}: a preset names {unknown[0]!r}, which is no setting of the method")
        if fixed := sorted(found.keys() & {each.name for each in fields(Parameterized)}):
            raise ValueError(f"{self.key}: a preset must not change {fixed[0]}; only the user sets it")
        return {name: value for name, value in found.items() if name not in self._given}

    def _resolved(self, public: PublicFacts) -> Self:
        """Return a copy with the values of the presets that apply."""
        model = copy.copy(self)
        vars(model).update({name: value for name, (_, value) in self._preset_values(public).items()})
        return model.validate()

    def _json_params(self) -> dict[str, Any]:
        """Return all settings, constants included, as JSON holds them; `from_json` reads them back."""
        kinds = {each.name: type(each.default) for each in fields(self)}
        params = {name: as_stored(getattr(self, name), kind) for name, kind in kinds.items()}
        return as_json({name: "inf" if value == math.inf else value for name, value in params.items()})

    def _budget(self, unit: Unit = "image") -> Budget:
        return Budget(float(self.epsilon), float(self.delta), self.adjacency, unit)


def list_settings(model: Any, given: frozenset[str], applied: dict[str, tuple[str, Any]]) -> list[Setting]:
    """Return every setting of a method, with the values of the presets that apply, and where it comes from."""
    found = []
    for each in fields(model):
        source, value = "given" if each.name in given else "default", getattr(model, each.name)
        if each.name in applied:
            preset, value = applied[each.name]
            source = f"preset {preset}"
        if not is_dataclass(value):
            found.append(Setting(each.name, value, source))
            continue
        for part in fields(value):  # NAME.FIELD; a preset is the source of what it changes only
            own = getattr(value, part.name)
            same = own == getattr(each.default, part.name)
            found.append(Setting(f"{each.name}.{part.name}", own, "default" if same else source))
    return found


def chosen_device(name: str) -> torch.device:
    """Return the device of that name; `auto`: a GPU if there is one."""
    if not isinstance(name, str):
        raise ValueError(f"device must be text, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from None


def usable_device(name: str) -> torch.device:
    """Return the device of that name. Raise `ValueError` if this machine does not have it."""
    device = chosen_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: PyTorch finds no GPU here; use auto or cpu, and see: sfumato doctor")
    return device


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant: one that begins like it, or else a similar one."""
    begins = [each for each in known if each.startswith(name)]
    return next(iter([*begins, *difflib.get_close_matches(name, known, 1)]), None)


def check_like(name: str, value: Any, default: Any, *, zero: bool = False) -> None:
    """Raise unless a value has its default's type; numbers must be positive (or zero, if allowed), except the seed."""
    if is_dataclass(default):
        if type(value) is not type(default):
            raise ValueError(f"{name} must be a {type(default).__name__}, got {value!r}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if name != "seed" and not (value > 0 or (zero and value == 0)):
            raise ValueError(f"{name} must be {'0 or greater' if zero else 'greater than 0'}, got {value!r}")
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise ValueError(f"{name} must be {len(default)} numbers, got {value!r}")
        for part, like in zip(value, default, strict=True):
            check_like(name, part, like, zero=zero)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")


def as_stored(value: Any, kind: type) -> Any:
    """Return a setting as its type: 1 and 1.0 are one setting, so a ledger made with either can be resumed."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if kind is tuple:
        return [float(part) for part in value]
    return float(value) if kind is float else value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content as it will be read back: JSON has lists where Python has tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return plain
