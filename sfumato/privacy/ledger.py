"""The ledger: what was spent, written and flushed to disk before any noise is drawn.

JSON lines, append-only, each with the SHA-256 of itself and of its predecessor. A file beside it (`ledger.lock`) is
held while a process may spend, and keeps the number of lines and the last hash, so that removing lines from the end
is noticed, too. A forger could rewrite both files; the certificate, once handed out, pins the ledger's last hash.

Lines of a run: `open` (budget, plan, method, public facts), `charge` (a release, `times` of them reserved at once),
`unprotected` (the guarantee is void, and why). Of a data set's budget (`account.py`): `account`, `reserve`, `void`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

KINDS = ("open", "charge", "unprotected", "account", "reserve", "void")


class LedgerError(RuntimeError):
    """The ledger cannot be trusted or used: edited, shortened, busy, or made for other settings."""


def digest(content: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON. Guarantee: equal values, and only they, have equal digests."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    """Append-only record of charges; in memory when `path` is None. `wait`: seconds for another process that holds it.

    Guarantee: when `append` returns, the line is on the disk; nobody else can append while this object is
    open; lines that were changed, reordered or removed by hand raise `LedgerError` on opening.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, wait: float = 0.0) -> None:
        self.path = None if path is None else Path(path).resolve()  # one lock, whatever link led here
        self.entries: list[dict[str, Any]] = []
        self._spending, self._owner, self._open, self.taken = threading.RLock(), os.getpid(), True, False
        self._lock: int | None = None  # file descriptors: nothing is buffered between us and the disk
        self._file: int | None = None
        if self.path is not None:
            self._acquire(self.path, time.monotonic() + wait)

    @property
    def head(self) -> str:
        """Hash of the last line; it commits to all lines before it."""
        return str(self.entries[-1]["hash"]) if self.entries else ""

    @property
    def opening(self) -> dict[str, Any] | None:
        """The first line: budget, plan, method, public facts."""
        return self.entries[0] if self.entries else None

    @property
    def void(self) -> str | None:
        """Why there is no guarantee, if raw images have ever left. Guarantee: once set, set for good."""
        return next((str(entry["reason"]) for entry in self.entries if entry["kind"] == "unprotected"), None)

    def charged(self, name: str) -> int:
        """Return how many releases of that name were paid for, used or not."""
        return sum(entry["times"] for entry in self.entries if entry["kind"] == "charge" and entry["name"] == name)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return somebody's lines. Guarantee: unedited; whether all are there, the certificate's hash tells."""
        return _parse(Path(path), (0, ""))[0]

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line. Guarantee: returns only after the line and the head are flushed to disk."""
        self.check_open()  # before the lock too: a fork may have copied it locked
        with self._spending, ExitStack() as failed:
            self.check_open()
            entry = {"seq": len(self.entries), "kind": kind, **fields, "previous": self.head}
            entry["hash"] = digest(entry)
            failed.callback(self.close)  # what is on the disk is then unknown: nothing more may be spent here
            if self._file is not None:
                line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
                if os.write(self._file, line) != len(line):
                    raise LedgerError(f"{self.path}: the disk is full; nothing was released")
                os.fsync(self._file)
                self._write_head(len(self.entries) + 1, entry["hash"])
            self.entries.append(entry)
            failed.pop_all()

    def check_open(self) -> None:
        """Guarantee: raises where a charge could be missed: closed, taken away, or in a forked process."""
        if not self._open:
            raise LedgerError("this ledger is closed; nothing more can be charged to it")
        if os.getpid() != self._owner:
            raise LedgerError("this ledger belongs to the parent process; a forked process cannot spend from it")
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            raise LedgerError(f"{self.path} was deleted; nothing more can be charged to it")

    def close(self) -> None:
        """Let go of the ledger. Guarantee: later charges through this object raise."""
        self._open = False
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self, path: Path, until: float) -> None:
        if path.suffix == ".lock":
            raise LedgerError(f"{path}: a ledger cannot be named like its lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        _recorded_head(path)  # refuses before it creates anything
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        with ExitStack() as failed:
            failed.callback(self.close)
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise LedgerError(f"{path} is in use by another process; wait for it or stop it") from None
                    time.sleep(0.05)
            self.entries, length = _parse(path, _recorded_head(path))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # A line cut short by a crash was never flushed, so its noise was never drawn: take it away.
            os.ftruncate(self._file, length)
            self._write_head(len(self.entries), self.head)
            flush_folder(path.parent)
            failed.pop_all()

    def _write_head(self, count: int, head: str) -> None:
        assert self._lock is not None
        # In place and always of one length, so that a crash leaves the old head or the new one.
        os.pwrite(self._lock, f"{count:012d} {head:64}\n".encode(), 0)
        os.fsync(self._lock)


def _recorded_head(path: Path) -> tuple[int, str]:
    """Return (lines, last hash) as of the last finished append. Guarantee: the ledger may have more, never fewer."""
    lock = path.with_suffix(".lock")
    fields = lock.read_bytes().decode(errors="replace").split() if lock.exists() else []
    if fields and fields[0].isdigit() and len(fields) == 1 + (int(fields[0]) > 0):
        return int(fields[0]), (fields[1:] or [""])[0]
    if fields or (path.exists() and path.stat().st_size):
        raise LedgerError(f"{lock} was edited or is missing: {path.name} may have lost lines; start a new run")
    return 0, ""


def _parse(path: Path, recorded: tuple[int, str]) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines and their length in bytes. Guarantee: raises at the first that is not as written."""
    data = path.read_bytes() if path.exists() else b""
    length = data.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    previous = ""
    for number, line in enumerate(data[:length].splitlines(), 1):
        try:
            entry = json.loads(line, object_pairs_hook=unique)
            body = {key: value for key, value in entry.items() if key != "hash"}
            intact = entry["hash"] == digest(body) and entry["previous"] == previous and entry["seq"] == len(entries)
            intact = intact and entry["kind"] in KINDS
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise LedgerError(f"{path}, line {number}: edited after it was written; start a new run")
        entries.append(entry)
        previous = entry["hash"]
    count, head = recorded
    if len(entries) < count or (count and entries[count - 1]["hash"] != head):
        raise LedgerError(f"{path}: {count} lines were written and {len(entries)} are there; start a new run")
    return entries, length


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without repeated keys, of which a reader and a parser might see different ones."""
    if len(content := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return content


def flush_folder(folder: Path) -> None:
    """Make the names of new files survive a power cut, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
