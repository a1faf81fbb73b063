"""What was promised, in a file that anybody can check without the data.

The certificate is made from the ledger alone, and certifies the *plan* on its first line: a run that stopped early may
have stopped because of what it saw, and then only the plan's epsilon holds. Nothing in it depends on the private images
except through a release: no hash of the input, no size, no training loss. `verify` recomputes epsilon from the events
and compares hashes; it needs neither the model nor the images.

A seal (a hash of each field) names a field that was edited. It is no signature: a forger can seal again. What
stands against forgery is the recomputation, the ledger that the certificate pins, and handing the certificate
out through a channel that its reader trusts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger, LedgerError, digest, unique

FORMAT = "sfumato-certificate/1"
GENERATOR = "operating system entropy; secure: OpenDP discrete Gaussian; fast: Philox, floating point"
EVENT = {  # the fields of an event and their kinds
    "name": str,
    "times": int,
    "sampling_prob": float,
    "noise_multiplier": float,
    "nonnegative": bool,
    "noise": str,
}
TOLERANCE = 1e-4  # relative, between epsilons computed by different versions of the libraries


@dataclass(frozen=True)
class Certificate:
    """The guarantee of a run. Guarantee: `epsilon` covers every release of the plan, made or not."""

    guarantee: str
    epsilon: float | None
    delta: float
    adjacency: str
    bounds: dict[str, float | None]
    events: list[dict[str, Any]]
    void: str | None
    noise: dict[str, str]
    method: str | None
    parameters: dict[str, Any]
    public_facts: dict[str, Any]
    claimed: dict[str, Any] | None
    ledger: str
    software: dict[str, str]
    outputs: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT

    @classmethod
    def from_ledger(cls, ledger: Ledger, *, claimed: dict[str, Any] | None = None) -> Certificate:
        """Guarantee: what `_statement` says of the ledger's lines."""
        return cls(**_statement(ledger.entries), claimed=claimed, software=_software())

    def with_outputs(self, folder: Path, names: list[str]) -> Certificate:
        """The same, with the SHA-256 of released files or folders, relative to where it will be saved."""
        content = {**asdict(self), "outputs": {name: file_digest(folder / name) for name in names}}
        return Certificate(**content)

    def to_dict(self) -> dict[str, Any]:
        """The JSON content, sealed."""
        content = asdict(self)
        return {**content, "seal": {name: digest(value) for name, value in content.items()}}

    def save(self, path: str | os.PathLike[str]) -> Path:
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        os.replace(partial, target)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Reads a certificate without judging it; see `verify`."""
        content = json.loads(Path(path).read_text("utf-8"))
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Verification:
    """What `verify` found: no problems, or each one in a line that names its field."""

    problems: list[str]
    epsilon: float | None
    guarantee: str | None
    checked: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok


def verify(path: str | os.PathLike[str]) -> Verification:
    """Recomputes epsilon from the events and compares every hash that the certificate holds.

    Guarantee: `ok` means that the events, as stated, give the stated epsilon at the stated delta and relation;
    that released files beside the certificate are the ones certified; and, where `ledger.jsonl` lies beside it,
    that the ledger is whole and says the same. It reads nothing outside the certificate's folder.
    """
    source = Path(path)
    names = list(Certificate.__dataclass_fields__)
    try:
        content = json.loads(source.read_text("utf-8"), parse_constant=_refuse, object_pairs_hook=unique)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        missing = [name for name in [*names, "seal"] if name not in content]
        digest(content)
    except (OSError, ValueError, RecursionError) as error:
        return Verification([f"{source} is not a certificate: {error}"], None, None, [])
    if missing:
        return Verification([f"{name}: missing" for name in missing], None, None, [])

    problems = _seal_problems(content, names)
    if content["format"] != FORMAT:
        problems.append(f"format: {content['format']!r} is not {FORMAT!r}")
    problems += _epsilon_problems(content)
    checked = ["seal", "epsilon"]
    outputs = content["outputs"] if isinstance(content["outputs"], dict) else {"?": None}
    for name, expected in outputs.items():
        problems += _output_problems(source.parent, name, expected)
        checked.append(name)
    ledger = source.parent / "ledger.jsonl"
    if ledger.is_file():
        problems += _ledger_problems(content, ledger)
        checked.append("ledger.jsonl")
    return Verification(problems, content["epsilon"], content["guarantee"], checked)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's sorted names and digests, marked as such. Links are refused."""
    if path.is_symlink():
        raise OSError(f"{path.name} is a link")
    if path.is_dir():
        files = sorted(child for child in path.rglob("*") if child.is_symlink() or not child.is_dir())
        return digest(["folder", *([file.relative_to(path).as_posix(), file_digest(file)] for file in files)])
    if not path.is_file():
        raise OSError(f"{path.name} is not a file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _statement(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What a ledger's lines certify.

    Guarantee: epsilon is that of the whole plan, which contains every charge; an `unprotected` line, or a release
    without noise, makes the guarantee "none".
    """
    if not entries:
        raise LedgerError("the ledger is empty: there is nothing to certify")
    opening = entries[0]
    events = opening["plan"]
    planned = {event["name"]: event for event in events}
    charged: Counter[str] = Counter()
    for entry in entries:
        if entry["kind"] == "charge":
            event = {name: entry.get(name) for name in EVENT}
            charged[entry["name"]] += entry["times"]
            if {**event, "times": None} != {**planned.get(entry["name"], {}), "times": None}:
                raise LedgerError(f"line {entry['seq'] + 1} charges for something that is not in the plan")
    if over := [name for name, times in charged.items() if times > planned[name]["times"]]:
        raise LedgerError(f"release {over[0]!r} was charged more often than planned")
    found, epsilon = _account(events, opening["delta"], opening["adjacency"])
    reasons = [entry["reason"] for entry in entries if entry["kind"] == "unprotected"]
    reasons += ["no noise was asked for (epsilon = inf)"] if epsilon is None else []
    return {
        "guarantee": "none" if reasons else "differential-privacy",
        "epsilon": None if reasons else epsilon,
        "delta": opening["delta"],
        "adjacency": opening["adjacency"],
        "bounds": found,
        "events": events,
        "void": reasons[0] if reasons else None,
        "noise": {"generator": GENERATOR, **{event["name"]: event["noise"] for event in events}},
        "method": opening.get("method"),
        "parameters": opening.get("parameters", {}),
        "public_facts": opening.get("public_facts", {}),
        "ledger": entries[-1]["hash"],
    }


def _account(
    events: list[dict[str, Any]], delta: float, adjacency: str
) -> tuple[dict[str, float | None], float | None]:
    """(each bound, the least), infinities as None. Guarantee: refuses fields of another kind than were written."""
    if type(delta) is not float or not isinstance(adjacency, str):
        raise ValueError("delta must be a number and adjacency a word")
    budget = Budget(math.inf, delta, adjacency)  # type: ignore[arg-type]  # refuses an unknown relation
    for event in events:
        if set(event) != set(EVENT) or any(type(event[name]) is not kind for name, kind in EVENT.items()):
            raise ValueError(f"an event has the fields {', '.join(EVENT)}")
    releases = [
        Release(e["name"], e["times"], e["sampling_prob"], e["noise_multiplier"], nonnegative=e["nonnegative"])
        for e in events
    ]
    found = bounds(releases, budget.delta, budget.adjacency)
    epsilon = least(found)
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
    return finite, epsilon if math.isfinite(epsilon) else None


def _seal_problems(content: dict[str, Any], names: list[str]) -> list[str]:
    seal = content["seal"] if isinstance(content["seal"], dict) else {}
    edited = [f"{name}: edited after sealing" for name in names if seal.get(name) != digest(content[name])]
    return edited + [f"{name}: not a field of a certificate" for name in content if name not in [*names, "seal"]]


def _epsilon_problems(content: dict[str, Any]) -> list[str]:
    """Guarantee: an understated epsilon, whatever was edited to get there, is named."""
    try:
        found, epsilon = _account(content["events"], content["delta"], content["adjacency"])
    except (ValueError, KeyError, TypeError, ArithmeticError, MemoryError) as error:
        return [f"events: cannot be accounted ({error})"]
    private = epsilon is not None and content["void"] is None
    expected = "differential-privacy" if private else "none"
    problems = []
    if content["guarantee"] != expected:
        problems.append(f"guarantee: {content['guarantee']!r} is stated, the events give {expected!r}")
    if not _close(content["epsilon"], epsilon if private else None):
        problems.append(f"epsilon: {content['epsilon']} is stated, the events give {epsilon if private else None}")
    stated = content["bounds"] if isinstance(content["bounds"], dict) else {}
    wrong = [name for name in found if not _close(stated.get(name), found[name])]
    return problems + [f"bounds: {name} does not follow from the events" for name in wrong]


def _output_problems(folder: Path, name: str, expected: Any) -> list[str]:
    try:
        inside = (folder / name).resolve() == folder.resolve() / name  # no links on the way, no ".."
        if not name or Path(name).is_absolute() or not inside:
            return [f"outputs: {name!r} is not inside the certificate's folder"]
        if not (folder / name).exists():
            return [f"outputs: {name} is missing"]
        same = file_digest(folder / name) == expected
    except (OSError, ValueError) as error:
        return [f"outputs: {name} cannot be checked ({error})"]
    return [] if same else [f"outputs: {name} is not what was certified"]


def _ledger_problems(content: dict[str, Any], path: Path) -> list[str]:
    """Guarantee: the certificate says what the ledger says, field by field."""
    try:
        said = _statement(Ledger.read(path))
    except (LedgerError, OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        return [f"ledger: {error}"]
    if said["ledger"] != content["ledger"]:
        return ["ledger: ledger.jsonl is not the ledger that was certified"]
    numbers = ("epsilon", "bounds")  # recomputed above, within rounding
    return [
        f"{name}: ledger.jsonl says otherwise"
        for name, value in said.items()
        if name not in numbers and digest(value) != digest(content[name])
    ]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _close(stated: Any, computed: float | None) -> bool:
    if stated is None or computed is None:
        return stated is None and computed is None
    return type(stated) is float and math.isclose(stated, computed, rel_tol=TOLERANCE, abs_tol=1e-9)


def _software() -> dict[str, str]:
    """Versions; the budget is spent by now, so that what is not installed (a source tree on the path) stops nothing."""
    found = {"python": platform.python_version()}
    for name in ("sfumato", "torch", "numpy", "dp-accounting", "opendp"):
        try:
            found[name] = metadata.version(name) or "unknown"
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
