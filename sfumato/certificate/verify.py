"""Check a certificate without the data: recompute epsilon from its events, compare every hash, check its signature."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from sfumato.certificate import signing
from sfumato.certificate.issue import FORMAT, Certificate, content_digest, file_digest
from sfumato.certificate.statement import accounted, caveats, statement
from sfumato.privacy.budget import UNITS
from sfumato.privacy.ledger import Ledger, digest, unique

SLACK = 1.01  # a stated epsilon may be that much larger than the computed one, and never smaller
MOST_BYTES, MOST_NAMES = 2**28, 20  # that are read, or listed


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
        own = content_digest(content)
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
    with result.judging("folder"):
        known = {source.name, *result.checked, *content["outputs"]}
        beside = sorted(os.fsencode(path.name).decode(errors="replace") for path in source.parent.iterdir())
        beside = [name for name in beside if name not in known]
        result.uncovered += beside[:MOST_NAMES] + [f"and {len(beside) - MOST_NAMES} more"] * (len(beside) > MOST_NAMES)
    result.checked += ["digest", "epsilon"]
    with result.judging("signature"):
        _check_signature(result, content["signature"], own, signed_by)
    return result


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
    found, epsilon = accounted(content["events"], content["delta"], content["adjacency"])
    epsilon = None if content["void"] is not None else epsilon
    expected = "none" if epsilon is None else "differential-privacy"
    problems = [f"unit: {content['unit']!r} is none of {', '.join(UNITS)}"] if content["unit"] not in UNITS else []
    if not {*caveats(content["public_facts"], content["unit"])} <= {*content["caveats"]}:
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
    said = statement(entries)
    if said["ledger"] != content["ledger"]:  # samples may have been put beside another run
        result.problems += ["ledger: ledger.jsonl is not the ledger that was certified"] * (
            not content["derived_from"] or "ledger.jsonl" in content["outputs"]
        )
        return
    wrong = [n for n, value in said.items() if n not in ("epsilon", "bounds") and digest(value) != digest(content[n])]
    result.problems += [f"{name}: ledger.jsonl says otherwise" for name in wrong]
    result.checked += ["ledger.jsonl"] * ("ledger.jsonl" not in content["outputs"])
    lock, head = folder / "ledger.lock", f"{len(entries):012d} {said['ledger']:64}\n".encode()
    if lock.is_file() and file_digest(lock) == hashlib.sha256(head).hexdigest():
        result.checked.append(lock.name)


def _plain(path: Path) -> Path:
    """Guarantee: not a link, not a device, not more than memory holds."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise OSError(f"{path.name} is missing, a link, no file, or too large")
    return path


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
