"""Check a certificate without the data: recompute epsilon from its events, compare all hashes, check the signature."""

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
from sfumato.certificate.statement import account_events, caveats, statement
from sfumato.privacy.budget import UNITS
from sfumato.privacy.ledger import Ledger, digest, reject_duplicate_keys

MAX_OVERSTATEMENT = 1.01  # a stated epsilon may exceed the computed one by this factor; it may never be smaller
MAX_BYTES, MAX_NAMES = 2**28, 20  # size of a file that is read, number of uncovered files that are listed


@dataclass
class Verification:
    """The result of `verify`.

    - problems: one line per problem, which names the field; empty if the certificate is valid.
    - guarantee, epsilon, delta, unit, adjacency, issuer, subject, issued, caveats: as the certificate states them.
    - signer: public key of a valid signature, or None.
    - signature: `valid`, `missing`, `invalid`, `by another key` (than the wanted one), or `not checked`.
    - checked, not_checked: what was compared, and what could not be.
    - missing, uncovered: certified files that are absent, and files beside the certificate that it does not cover.
    """

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
    signature: str = "missing"
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
    def collecting(self, field: str) -> Iterator[None]:
        """Turn any exception that hostile content raises into a problem of `field`."""
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
    """Check a certificate: recompute epsilon from its events and compare all its hashes.

    - path: the certificate; its files and ledger are looked up in the same folder.
    - allow_none: accept certificates with `guarantee: none`, default False.
    - max_epsilon, max_delta: largest values to accept, default None: any.
    - signed_by: file with the public key that must have signed, default None.

    Guarantee: `ok` means that the stated events give at most the stated epsilon at the stated delta and adjacency,
    within the limits; that released files in the folder are those certified; that a ledger in the folder is intact and
    agrees with the certificate; and with `signed_by` that the owner of this key signed. Nothing outside the folder is
    read, except `signed_by`.
    """
    source, result = Path(path), Verification()
    if not os.path.lexists(source):
        result.problems.append(f"{source}: there is no such certificate")
        return result
    with result.collecting(f"{source} is not a certificate"):
        content = json.loads(
            _regular_file(source).read_text("utf-8"),
            parse_constant=_reject_constant,
            object_pairs_hook=reject_duplicate_keys,
        )
        computed_digest = content_digest(content)
        result.problems += _format_problems(content)
    if result.problems:
        return result
    for name in ("guarantee", "epsilon", "delta", "unit", "adjacency", "issuer", "subject", "issued", "caveats"):
        setattr(result, name, content[name])
    result.problems += (
        [] if content["digest"] == computed_digest else ["digest: the certificate was edited after it was made"]
    )
    with result.collecting("events: cannot be accounted"):
        result.problems += _event_problems(content)
    if content["guarantee"] != "differential-privacy" and not allow_none:
        result.problems.append(f"guarantee: none, so nothing is protected ({content['void']})")
    for name, limit in (("epsilon", max_epsilon), ("delta", max_delta)):
        if limit is not None and (content[name] is None or not content[name] <= limit):
            result.problems.append(f"{name}: {content[name]} is stated, at most {limit:g} is accepted")
    for name, expected in content["outputs"].items():
        with result.collecting(f"outputs: {name} cannot be checked"):
            _check_output(result, source.parent, name, expected)
    if len(result.missing) == len(content["outputs"]):
        result.not_checked.append(f"outputs: none of the {len(result.missing)} certified files is in this folder")
    with result.collecting("ledger"):
        _check_ledger(result, content, source.parent)
    with result.collecting("folder"):
        known = {source.name, *result.checked, *content["outputs"]}
        beside = sorted(os.fsencode(path.name).decode(errors="replace") for path in source.parent.iterdir())
        beside = [name for name in beside if name not in known]
        result.uncovered += beside[:MAX_NAMES] + [f"and {len(beside) - MAX_NAMES} more"] * (len(beside) > MAX_NAMES)
    result.checked += ["digest", "epsilon"]
    with result.collecting("signature"):
        _check_signature(result, content["signature"], computed_digest, signed_by)
    return result


def _format_problems(content: Any) -> list[str]:
    """Return format problems. Guarantee: if there are none, all fields exist with their types, and no others."""
    if content.get("format", FORMAT) != FORMAT:
        older = ", made by an older version" if content["format"] == "sfumato-certificate/1" else ""
        return [f"format: {content['format']!r}{older}; this version reads {FORMAT!r}"]
    hints = {**get_type_hints(Certificate), "digest": str}
    problems = [f"{name}: missing" for name in hints if name not in content]
    problems += [f"{name}: not a field of a certificate" for name in content if name not in hints]
    for name, hint in hints.items():
        types = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        if name in content and type(content[name]) not in types:
            problems.append(f"{name}: wrong type")
    if not problems and not all(type(text) is str for text in [*content["caveats"], *content["outputs"].values()]):
        problems.append("outputs: caveats and hashes must be strings")
    return problems


def _event_problems(content: dict[str, Any]) -> list[str]:
    """Return contradictions with the events. Guarantee: names an understated epsilon, whatever was edited."""
    found, epsilon = account_events(content["events"], content["delta"], content["adjacency"])
    epsilon = None if content["void"] is not None else epsilon
    expected = "none" if epsilon is None else "differential-privacy"
    problems = [f"unit: {content['unit']!r} is not one of {', '.join(UNITS)}"] if content["unit"] not in UNITS else []
    if not {*caveats(content["public_facts"], content["unit"])} <= {*content["caveats"]}:
        problems.append("caveats: class sizes are public facts, but the caveat that says so is missing")
    if content["guarantee"] != expected:
        problems.append(f"guarantee: {content['guarantee']!r} is stated, the events give {expected!r}")
    if not _follows(content["epsilon"], epsilon):
        problems.append(f"epsilon: {content['epsilon']} is stated, but the events give {epsilon}")
    wrong = [name for name in found if not _follows(content["bounds"].get(name), found[name])]
    return problems + [f"bounds: {name} does not follow from the events" for name in wrong]


def _follows(stated: Any, computed: float | None) -> bool:
    """Return whether a stated number follows from the computed one. Guarantee: False for a smaller number."""
    if stated is None or computed is None:
        return stated is None and computed is None
    return type(stated) is float and computed <= stated <= MAX_OVERSTATEMENT * computed + 1e-9


def _check_signature(
    result: Verification, signature: dict[str, str] | None, computed_digest: str, signed_by: Any
) -> None:
    """Guarantee: sets `signer` only if this key signed this content; with `signed_by` it is that key, or a problem."""
    result.signature = "missing" if signature is None else "not checked"
    try:
        wanted = None if signed_by is None else signing.public_key_of(signed_by)
        if signature is None:
            result.problems += ["signature: missing"] * (wanted is not None)
        elif not signing.check(signature, computed_digest):
            result.signature = "invalid"
            result.problems.append("signature: not valid for this certificate")
        elif wanted not in (None, signature["public_key"]):
            result.signature = "by another key"
            result.problems.append(f"signature: made with another key, {signature['public_key']}")
        else:
            result.signature, result.signer = "valid", f"ed25519:{signature['public_key']}"
            result.checked.append("signature")
    except ModuleNotFoundError as error:  # a signature that cannot be checked does not count
        (result.not_checked if signed_by is None else result.problems).append(f"signature: {error}")


def _check_output(result: Verification, folder: Path, name: str, expected: str) -> None:
    """Compare the hash of an output. Guarantee: reads nothing outside `folder` and follows no link."""
    if not name or Path(name).is_absolute() or (folder / name).resolve() != folder.resolve() / name:
        result.problems.append(f"outputs: {name!r} is not inside the certificate's folder")
    elif not (folder / name).exists():
        result.missing.append(name)
    elif file_digest(folder / name) != expected:
        result.problems.append(f"outputs: {name} is not what was certified")
    else:
        result.checked.append(name)


def _check_ledger(result: Verification, content: dict[str, Any], folder: Path) -> None:
    """Compare with the ledger. Guarantee: any field that differs from what the ledger certifies is a problem."""
    if not os.path.lexists(folder / "ledger.jsonl"):
        return
    entries = Ledger.read(_regular_file(folder / "ledger.jsonl"))
    certified = statement(entries)
    if certified["ledger"] != content["ledger"]:  # samples may be stored in the folder of another run
        result.problems += ["ledger: ledger.jsonl is not the ledger that was certified"] * (
            not content["derived_from"] or "ledger.jsonl" in content["outputs"]
        )
        return
    wrong = [
        n for n, value in certified.items() if n not in ("epsilon", "bounds") and digest(value) != digest(content[n])
    ]
    result.problems += [f"{name}: differs from ledger.jsonl" for name in wrong]
    result.checked += ["ledger.jsonl"] * ("ledger.jsonl" not in content["outputs"])
    lock, head = folder / "ledger.lock", f"{len(entries):012d} {certified['ledger']:64}\n".encode()
    if lock.is_file() and file_digest(lock) == hashlib.sha256(head).hexdigest():
        result.checked.append(lock.name)


def _regular_file(path: Path) -> Path:
    """Return the path. Guarantee: a regular file, not a link, of at most `MAX_BYTES`."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise OSError(f"{path.name} is missing, a link, not a regular file, or too large")
    return path


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not valid JSON")
