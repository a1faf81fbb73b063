"""Certificates: the guarantee of a run in a file that anybody can check without the data.

A certificate is made from the ledger alone. It certifies the *plan* on the ledger's first line: a run that stopped
early may have stopped because of its results, and then only the plan's epsilon holds. It depends on the private images
through releases alone: it has no hash of the input, no size, no training loss. Numbers are rounded up.

`digest`, the hash of all other fields, is not a signature: a forger can recompute it. Protection against forgery is the
recomputation of epsilon, the hash of the ledger, and a signature of the digest (`signing.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sfumato.certificate import signing
from sfumato.certificate.statement import statement
from sfumato.privacy.ledger import Ledger, digest

FORMAT = "sfumato-certificate/2"


@dataclass(frozen=True)
class Certificate:
    """The guarantee of a run, and where it comes from.

    - guarantee: "differential-privacy" or "none".
    - void: why it is "none".
    - caveats: restrictions, in sentences.
    - epsilon, delta, adjacency, unit: the guarantee.
    - bounds: epsilon of each accountant.
    - events: the planned releases.
    - noise: kind of noise of each release, and the generator.
    - method, parameters, public_facts: from the ledger's first line.
    - account: name of the budget file, from the ledger's first line.
    - ledger: hash of the ledger's last line.
    - outputs: hash of each covered file or folder.
    - claimed: the guarantee that a published method claims.
    - issuer, subject: who certifies which data.
    - issued: date.
    - software: versions.
    - derived_from: digest of the run's certificate, for samples drawn later.
    - format, signature: version of this format; algorithm, public key and value, or None.

    Guarantee: `epsilon` covers every release of the plan, made or not.
    """

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
        """Return the certificate of a run; `issuer` certifies the data `subject`. Guarantee: that of `statement`."""
        fields = statement(ledger.entries)
        return cls(**fields, claimed=claimed, issuer=issuer, subject=subject, issued=_now(), software=_software())

    def covering(self, folder: str | Path, names: Iterable[str]) -> Certificate:
        """Add hashes of the files and folders that a run wrote; others that lie beside them are not certified."""
        return replace(self, outputs={name: file_digest(Path(folder) / name) for name in sorted(names)}, signature=None)

    def derived(self, folder: str | Path, names: list[str]) -> Certificate:
        """Certify files that were computed from the certified outputs alone. Guarantee: post-processing is free."""
        return replace(self.covering(folder, names), derived_from=self.digest, issued=_now())

    def signed(self, key: str | Path) -> Certificate:
        """Return the certificate signed with the private key in the file `key`."""
        return replace(self, signature=signing.sign(self.digest, key))

    @property
    def digest(self) -> str:
        """SHA-256 of all fields but the signature."""
        return content_digest(asdict(self))

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
        """Read a certificate without checking it; see `verify`."""
        content = json.loads(Path(path).read_text("utf-8"))
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's sorted names and digests. Guarantee: raises for links."""
    if path.is_symlink():
        raise OSError(f"{path.name} is a link")
    if path.is_dir():
        files = sorted(child for child in path.rglob("*") if child.is_symlink() or not child.is_dir())
        return digest(["folder", *([file.relative_to(path).as_posix(), file_digest(file)] for file in files)])
    if not path.is_file():
        raise OSError(f"{path.name} is not a file")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(content: dict[str, Any]) -> str:
    return digest({name: value for name, value in content.items() if name not in ("digest", "signature")})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _software() -> dict[str, str]:
    """Return versions. Never raises for a package without metadata (a source tree): the budget is already spent."""
    names = ("sfumato", "torch", "numpy", "dp-accounting", "opendp")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return "not installed"
