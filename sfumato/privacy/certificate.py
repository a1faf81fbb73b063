"""What was promised, in a file that anybody can check without the data.

The certificate is made from the ledger alone. Nothing in it depends on the private images except through a
release: no hash of the input, no size, no training loss. `verify` recomputes epsilon from the events and
compares hashes; it needs neither the model nor the images.

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
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import Budget
from sfumato.privacy.ledger import Ledger, LedgerError, digest

FORMAT = "sfumato-certificate/1"
GENERATOR = "operating system entropy; secure: OpenDP discrete Gaussian; fast: Philox, floating point"
TOLERANCE = 1e-4  # relative, between epsilons computed by different versions of the libraries


@dataclass(frozen=True)
class Certificate:
    """The guarantee of a run. Guarantee: `epsilon` covers every charge in the ledger, used or not."""

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
        """Guarantee: events are the ledger's charges; `void` and missing noise make the guarantee "none"."""
        opening = ledger.opening
        if opening is None:
            raise LedgerError("the ledger is empty: there is nothing to certify")
        events = _events(ledger.entries)
        found, epsilon = _account(events, opening["delta"], opening["adjacency"])
        private = epsilon is not None and ledger.void is None
        forms = {event["name"]: event["noise"] for event in events}
        return cls(
            guarantee="differential-privacy" if private else "none",
            epsilon=epsilon if private else None,
            delta=opening["delta"],
            adjacency=opening["adjacency"],
            bounds=found,
            events=events,
            void=ledger.void or (None if private else "no noise was asked for (epsilon = inf)"),
            noise={"generator": GENERATOR, **forms},
            method=opening.get("method"),
            parameters=opening.get("parameters", {}),
            public_facts=opening.get("public_facts", {}),
            claimed=claimed,
            ledger=ledger.head,
            software=_software(),
        )

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
    that the ledger is whole and holds these very events.
    """
    source = Path(path)
    try:
        content = json.loads(source.read_text("utf-8"))
        names = list(Certificate.__dataclass_fields__)
        missing = [name for name in [*names, "seal"] if name not in content]
    except (OSError, ValueError, TypeError) as error:
        return Verification([f"{source} is not a certificate: {error}"], None, None, [])
    if missing:
        return Verification([f"{name}: missing" for name in missing], None, None, [])

    problems = _seal_problems(content, names)
    checked = ["seal"]
    if content["format"] != FORMAT:
        problems.append(f"format: {content['format']!r} is not {FORMAT!r}")
    problems += _epsilon_problems(content)
    checked.append("epsilon")
    for name, expected in content["outputs"].items():
        target = source.parent / name
        if not target.exists():
            problems.append(f"outputs: {name} is missing")
        elif file_digest(target) != expected:
            problems.append(f"outputs: {name} is not the file that was certified")
        checked.append(name)
    ledger = source.parent / "ledger.jsonl"
    if ledger.exists():
        problems += _ledger_problems(content, ledger)
        checked.append("ledger.jsonl")
    return Verification(problems, content["epsilon"], content["guarantee"], checked)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, or of the sorted names and digests of a folder's files."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return digest([[p.relative_to(path).as_posix(), file_digest(p)] for p in files])
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _events(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Charges, blocks of one release joined. Guarantee: as many releases as were charged, at their noise."""
    joined: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["kind"] != "charge":
            continue
        content = {k: v for k, v in entry.items() if k not in ("seq", "kind", "times", "previous", "hash")}
        joined.setdefault(digest(content), {**content, "times": 0})["times"] += entry["times"]
    return list(joined.values())


def _account(
    events: list[dict[str, Any]], delta: float, adjacency: str
) -> tuple[dict[str, float | None], float | None]:
    """(each bound, the least), infinities as None."""
    budget = Budget(math.inf, delta, adjacency)  # type: ignore[arg-type]  # refuses an unknown relation
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
    except (ValueError, KeyError, TypeError) as error:
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


def _ledger_problems(content: dict[str, Any], path: Path) -> list[str]:
    try:
        entries = Ledger.read(path)
    except LedgerError as error:
        return [f"ledger: {error}"]
    if not entries or entries[-1]["hash"] != content["ledger"]:
        return ["ledger: ledger.jsonl is not the ledger that was certified"]
    if _events(entries) != content["events"]:
        return ["events: not those of ledger.jsonl"]
    return []


def _close(stated: Any, computed: float | None) -> bool:
    if stated is None or computed is None:
        return stated is None and computed is None
    return isinstance(stated, int | float) and math.isclose(stated, computed, rel_tol=TOLERANCE, abs_tol=1e-9)


def _software() -> dict[str, str]:
    packages = ("sfumato", "torch", "numpy", "dp-accounting", "opendp")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}
