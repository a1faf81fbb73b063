"""What was promised, in a file that anybody can check without the data.

The certificate is made from the ledger alone, and certifies the *plan* on its first line: a run that stopped early may
have stopped because of what it saw, and then only the plan's epsilon holds. Nothing in it depends on the private images
except through a release: no hash of the input, no size, no training loss. Numbers are rounded up, never down.

`digest`, of all other fields, is no signature: a forger can compute it again. Against forgery stand the recomputation
of epsilon, the ledger that the certificate pins, and a signature of the digest (`signing.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Context, Decimal
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sfumato.privacy import signing
from sfumato.privacy.accounting import Release, bounds, least
from sfumato.privacy.budget import UNITS, Budget
from sfumato.privacy.ledger import Ledger, LedgerError, digest, unique

FORMAT = "sfumato-certificate/2"
GENERATOR = "operating system entropy; secure: OpenDP discrete Gaussian; fast: Philox, floating point"
EVENT = ("name", "times", "sampling_prob", "noise_multiplier", "nonnegative", "noise")
KINDS = (str, int, float, float, bool, str)  # of an event's fields
SLACK = 1.01  # a stated epsilon may be that much larger than the computed one, and never smaller
MOST_EVENTS, MOST_BYTES, MOST_NAMES = 1000, 2**28, 20  # that are read, or listed
SIZES = (
    "Class sizes were taken as public: what one {0} looks like is hidden, not that a class has one {0} more or less."
)


@dataclass(frozen=True)
class Certificate:
    """The guarantee of a run. Guarantee: `epsilon` covers every release of the plan, made or not."""

    guarantee: str
    epsilon: float | None
    delta: float
    adjacency: str
    unit: str
    caveats: list[str]
    bounds: dict[str, float | None]
    events: list[dict[str, Any]]
    void: str | None
    noise: dict[str, str]
    method: str | None
    parameters: dict[str, Any]
    public_facts: dict[str, Any]
    account: str | None
    ledger: str
    claimed: dict[str, Any] | None
    issuer: str | None
    subject: str | None
    issued: str
    software: dict[str, str]
    derived_from: str | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT
    signature: dict[str, str] | None = None

    @classmethod
    def from_ledger(
        cls, ledger: Ledger, *, claimed: Any = None, issuer: str | None = None, subject: str | None = None
    ) -> Certificate:
        """Certify a run; `issuer`, `subject`: who says so, about which data. Guarantee: that of `_statement`."""
        said = _statement(ledger.entries)
        return cls(**said, claimed=claimed, issuer=issuer, subject=subject, issued=_now(), software=_software())

    def covering(self, folder: str | Path, names: list[str] | None = None) -> Certificate:
        """Pin files and folders; without names, all that a run leaves in `folder` to be shared."""
        found = [path.name for path in Path(folder).iterdir() if _shared(path)] if names is None else names
        return replace(self, outputs={name: file_digest(Path(folder) / name) for name in sorted(found)}, signature=None)

    def derived(self, folder: str | Path, names: list[str]) -> Certificate:
        """Certify files that were made of this one's outputs alone. Guarantee: post-processing costs nothing."""
        return replace(self.covering(folder, names), derived_from=self.digest, issued=_now())

    def signed(self, key: str | Path) -> Certificate:
        """Sign it with the private key in that file."""
        return replace(self, signature=signing.sign(self.digest, key))

    @property
    def digest(self) -> str:
        """SHA-256 of all fields but the signature."""
        return _digest(asdict(self))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "digest": self.digest}

    def save(self, path: str | os.PathLike[str]) -> Path:
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
        os.replace(partial, target)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Certificate:
        """Read a certificate without judging it; see `verify`."""
        content = json.loads(Path(path).read_text("utf-8"))
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})


@dataclass
class Verification:
    """What `verify` found: problems, each in a line that names its field; what is stated; what was checked or not."""

    problems: list[str] = field(default_factory=list)
    guarantee: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    unit: str | None = None
    adjacency: str | None = None
    issuer: str | None = None
    subject: str | None = None
    issued: str | None = None
    caveats: list[str] = field(default_factory=list)
    signer: str | None = None
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    @contextmanager
    def judging(self, field: str) -> Iterator[None]:
        """Turn whatever hostile content raises into a problem."""
        try:
            yield
        except Exception as error:
            self.problems.append(f"{field}: {error}")


def verify(
    path: str | os.PathLike[str],
    *,
    allow_none: bool = False,
    max_epsilon: float | None = None,
    max_delta: float | None = None,
    signed_by: str | os.PathLike[str] | None = None,
) -> Verification:
    """Recompute epsilon from the events and compare every hash that the certificate holds.

    Guarantee: `ok` means that the events, as stated, give at most the stated epsilon at the stated delta and relation,
    within the limits asked for; that released files that are there are the ones certified; that a ledger beside the
    certificate is whole and says the same; and with `signed_by`, a public key file, that its owner signed. It reads
    nothing outside the certificate's folder, and lists what is missing there and what is not covered.
    """
    source, result = Path(path), Verification()
    with result.judging(f"{source} is not a certificate"):
        content = json.loads(_plain(source).read_text("utf-8"), parse_constant=_refuse, object_pairs_hook=unique)
        own = _digest(content)
        result.problems += _malformed(content)
    if result.problems:
        return result
    for name in ("guarantee", "epsilon", "delta", "unit", "adjacency", "issuer", "subject", "issued", "caveats"):
        setattr(result, name, content[name])
    result.problems += [] if content["digest"] == own else ["digest: the certificate was edited after it was made"]
    with result.judging("events: cannot be accounted"):
        result.problems += _unfounded(content)
    if content["guarantee"] != "differential-privacy" and not allow_none:
        result.problems.append(f"guarantee: none, so nothing is protected ({content['void']})")
    for name, most in (("epsilon", max_epsilon), ("delta", max_delta)):
        if most is not None and (content[name] is None or not content[name] <= most):
            result.problems.append(f"{name}: {content[name]} is stated, and at most {most:g} is accepted")
    for name, expected in content["outputs"].items():
        with result.judging(f"outputs: {name} cannot be checked"):
            _check_output(result, source.parent, name, expected)
    if len(result.missing) == len(content["outputs"]):
        result.not_checked.append(f"outputs: none of the {len(result.missing)} certified files is here")
    with result.judging("ledger"):
        _check_ledger(result, content, source.parent)
    known = {source.name, *result.checked, *content["outputs"]}
    beside = sorted(os.fsencode(path.name).decode(errors="replace") for path in source.parent.iterdir())
    beside = [name for name in beside if name not in known]
    result.uncovered += beside[:MOST_NAMES] + [f"and {len(beside) - MOST_NAMES} more"] * (len(beside) > MOST_NAMES)
    result.checked += ["digest", "epsilon"]
    with result.judging("signature"):
        _check_signature(result, content["signature"], own, signed_by)
    return result


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


def rounded_up(value: float) -> float:
    """Round up to six significant digits. Guarantee: never below `value`."""
    return float(Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(value)))


def _statement(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What a ledger's lines certify.

    Guarantee: epsilon is that of the whole plan, which contains every charge; an `unprotected` line, or a release
    without noise, makes the guarantee "none".
    """
    if not entries:
        raise LedgerError("the ledger is empty: there is nothing to certify")
    opening, events = entries[0], entries[0]["plan"]
    planned = {event["name"]: event for event in events}
    charged: Counter[str] = Counter()
    for entry in entries:
        if entry["kind"] == "charge":
            charged[entry["name"]] += entry["times"]
            event = {name: entry.get(name) for name in EVENT}
            if {**event, "times": None} != {**planned.get(entry["name"], {}), "times": None}:
                raise LedgerError(f"line {entry['seq'] + 1} charges for something that is not in the plan")
    if over := [name for name, times in charged.items() if times > planned[name]["times"]]:
        raise LedgerError(f"release {over[0]!r} was charged more often than planned")
    found, epsilon = _account(events, opening["delta"], opening["adjacency"])
    reasons = [entry["reason"] for entry in entries if entry["kind"] == "unprotected"]
    reasons += ["no noise was asked for (epsilon = inf)"] if epsilon is None else []
    facts = opening.get("public_facts", {})
    return {
        "guarantee": "none" if reasons else "differential-privacy",
        "epsilon": None if reasons or epsilon is None else rounded_up(epsilon),
        **{name: opening[name] for name in ("delta", "adjacency", "unit")},
        "caveats": [*opening.get("caveats", []), *_caveats(facts, opening["unit"])],
        "bounds": {name: None if value is None else rounded_up(value) for name, value in found.items()},
        "events": events,
        "void": reasons[0] if reasons else None,
        "noise": {"generator": GENERATOR, **{event["name"]: event["noise"] for event in events}},
        **{name: opening.get(name) for name in ("method", "account")},
        "parameters": opening.get("parameters", {}),
        "public_facts": facts,
        "ledger": entries[-1]["hash"],
    }


def _caveats(facts: dict[str, Any], unit: str) -> list[str]:
    return [] if facts.get("sizes") is None else [SIZES.format(unit)]


def _account(
    events: list[dict[str, Any]], delta: float, adjacency: Any
) -> tuple[dict[str, float | None], float | None]:
    """(each bound, the least), infinities as None. Guarantee: refuses fields of another kind than were written."""
    budget = Budget(math.inf, delta, adjacency)  # refuses an unknown relation
    for event in events:
        if (
            len(events) > MOST_EVENTS
            or [type(event.get(name)) for name in EVENT] != [*KINDS]
            or len(event) > len(EVENT)
        ):
            raise ValueError(f"an event has the fields {', '.join(EVENT)}")
    releases = [Release(**{name: event[name] for name in EVENT[:-1]}) for event in events]
    found = bounds(releases, budget.delta, budget.adjacency)
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
    return finite, least(found) if math.isfinite(least(found)) else None


def _malformed(content: Any) -> list[str]:
    """Guarantee: without problems, every field of a certificate is there and of its kind, and no other."""
    if content.get("format", FORMAT) != FORMAT:
        older = ", made by an older version" if content["format"] == "sfumato-certificate/1" else ""
        return [f"format: {content['format']!r}{older}; this version reads {FORMAT!r}"]
    hints = {**get_type_hints(Certificate), "digest": str}
    problems = [f"{name}: missing" for name in hints if name not in content]
    problems += [f"{name}: not a field of a certificate" for name in content if name not in hints]
    for name, hint in hints.items():
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        if name in content and type(content[name]) not in kinds:
            problems.append(f"{name}: of the wrong kind")
    if not problems and not all(type(text) is str for text in [*content["caveats"], *content["outputs"].values()]):
        problems.append("outputs: caveats and hashes must be texts")
    return problems


def _unfounded(content: dict[str, Any]) -> list[str]:
    """Guarantee: an understated epsilon, whatever was edited to get there, is named."""
    found, epsilon = _account(content["events"], content["delta"], content["adjacency"])
    epsilon = None if content["void"] is not None else epsilon
    expected = "none" if epsilon is None else "differential-privacy"
    problems = [f"unit: {content['unit']!r} is none of {', '.join(UNITS)}"] if content["unit"] not in UNITS else []
    if not {*_caveats(content["public_facts"], content["unit"])} <= {*content["caveats"]}:
        problems.append("caveats: class sizes are among the public facts, and it is not said")
    if content["guarantee"] != expected:
        problems.append(f"guarantee: {content['guarantee']!r} is stated, the events give {expected!r}")
    if not _follows(content["epsilon"], epsilon):
        problems.append(f"epsilon: {content['epsilon']} is stated and does not follow: the events give {epsilon}")
    wrong = [name for name in found if not _follows(content["bounds"].get(name), found[name])]
    return problems + [f"bounds: {name} does not follow from the events" for name in wrong]


def _follows(stated: Any, computed: float | None) -> bool:
    """Guarantee: a number below the computed one never follows."""
    if stated is None or computed is None:
        return stated is None and computed is None
    return type(stated) is float and computed <= stated <= SLACK * computed + 1e-9


def _check_signature(result: Verification, signature: dict[str, str] | None, own: str, signed_by: Any) -> None:
    """Guarantee: a `signer` has signed this very content, and is the owner of the key in `signed_by` if given."""
    try:
        wanted = None if signed_by is None else signing.public_key_of(signed_by)
        if signature is None:
            result.problems += ["signature: there is none"] * (wanted is not None)
        elif not signing.check(signature, own):
            result.problems.append("signature: it is not one of this certificate")
        elif wanted not in (None, signature["public_key"]):
            result.problems.append(f"signature: it was made with another key, {signature['public_key']}")
        else:
            result.signer = f"ed25519:{signature['public_key']}"
            result.checked.append("signature")
    except ModuleNotFoundError as error:  # then a signature counts for nothing
        (result.not_checked if signed_by is None else result.problems).append(f"signature: {error}")


def _check_output(result: Verification, folder: Path, name: str, expected: str) -> None:
    """Guarantee: reads nothing outside `folder`, and follows no link."""
    if not name or Path(name).is_absolute() or (folder / name).resolve() != folder.resolve() / name:
        result.problems.append(f"outputs: {name!r} is not inside the certificate's folder")
    elif not (folder / name).exists():
        result.missing.append(name)
    elif file_digest(folder / name) != expected:
        result.problems.append(f"outputs: {name} is not what was certified")
    else:
        result.checked.append(name)


def _check_ledger(result: Verification, content: dict[str, Any], folder: Path) -> None:
    """Guarantee: the certificate says what the ledger says, field by field."""
    if not os.path.lexists(folder / "ledger.jsonl"):
        return
    entries = Ledger.read(_plain(folder / "ledger.jsonl"))
    said = _statement(entries)
    if said["ledger"] != content["ledger"]:  # samples may have been put beside another run
        result.problems += ["ledger: ledger.jsonl is not the ledger that was certified"] * (not content["derived_from"])
        return
    wrong = [n for n, value in said.items() if n not in ("epsilon", "bounds") and digest(value) != digest(content[n])]
    result.problems += [f"{name}: ledger.jsonl says otherwise" for name in wrong]
    result.checked += ["ledger.jsonl"] * ("ledger.jsonl" not in content["outputs"])
    lock, head = folder / "ledger.lock", f"{len(entries):012d} {said['ledger']:64}\n".encode()
    if lock.is_file() and file_digest(lock) == hashlib.sha256(head).hexdigest():
        result.checked.append(lock.name)


def _digest(content: dict[str, Any]) -> str:
    return digest({name: value for name, value in content.items() if name not in ("digest", "signature")})


def _shared(path: Path) -> bool:
    return path.name not in ("certificate.json", "private") and path.suffix not in (".lock", ".partial")


def _plain(path: Path) -> Path:
    """Guarantee: not a link, not a device, not more than memory holds."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise OSError(f"{path.name} is missing, a link, no file, or too large")
    return path


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _software() -> dict[str, str]:
    """Versions; the budget is spent by now, so that what is not installed (a source tree on the path) stops nothing."""
    found = {"python": platform.python_version()}
    for name in ("sfumato", "torch", "numpy", "dp-accounting", "opendp"):
        try:
            found[name] = metadata.version(name) or "unknown"
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
