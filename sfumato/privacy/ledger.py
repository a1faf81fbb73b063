"""The ledger: charges are written and flushed to disk before any noise is drawn.

JSON lines, append-only; each line holds the SHA-256 of itself and of its predecessor. A second file (`ledger.lock`) is
locked while a process may spend. It stores the number of lines and the last hash, so that lines missing at the end are
detected. A forger could rewrite both files; a certificate that was handed out pins the ledger's last hash.

Line kinds of a run: `open` (budget, plan, method, public facts), `charge` (`times` of a release, reserved at once),
`unprotected` (the guarantee is void); of a data set's budget (`dataset_budget.py`): `account`, `reserve`, `void`.
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
    """The ledger cannot be used: it was edited or shortened, is in use, or was made for other settings."""


def digest(content: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON. Guarantee: equal values, and only they, have equal digests."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Ledger:
    """Append-only record of charges; in memory if `path` is None. Waits `wait` seconds for a process that holds it.

    Guarantee: when `append` returns, the line is on disk. Nobody else can append while this object is open. Opening
    raises `LedgerError` if lines were changed, reordered or removed by hand.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, wait: float = 0.0) -> None:
        self.path = None if path is None else Path(path).resolve()  # symbolic links share one lock
        self.entries: list[dict[str, Any]] = []
        self._append_lock, self._owner_pid, self._open, self.has_vault = threading.RLock(), os.getpid(), True, False
        self._lock: int | None = None  # file descriptors: no buffer between this object and the disk
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
        """Reason why there is no guarantee, or None. Guarantee: never reset once it is set."""
        return next((str(entry["reason"]) for entry in self.entries if entry["kind"] == "unprotected"), None)

    def charged(self, name: str) -> int:
        """Return how many releases of this name were charged, used or not."""
        return sum(entry["times"] for entry in self.entries if entry["kind"] == "charge" and entry["name"] == name)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the lines of a file without locking it. Guarantee: unedited, but lines may be missing at the end."""
        return _parse(Path(path), (0, ""))[0]

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line. Guarantee: returns only after the line and the head are flushed to disk."""
        self.check_open()  # also before taking the lock: a fork may have copied it in the locked state
        with self._append_lock, ExitStack() as on_failure:
            self.check_open()
            entry = {"seq": len(self.entries), "kind": kind, **fields, "previous": self.head}
            entry["hash"] = digest(entry)
            on_failure.callback(self.close)  # the state of the disk is then unknown, so nothing more may be spent
            if self._file is not None:
                line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
                if os.write(self._file, line) != len(line):
                    raise LedgerError(f"{self.path}: the disk is full; nothing was released. Free space and resume")
                os.fsync(self._file)
                self._write_head(len(self.entries) + 1, entry["hash"])
            self.entries.append(entry)
            on_failure.pop_all()

    def check_open(self) -> None:
        """Guarantee: raises if a charge could be lost: the ledger is closed or deleted, or this process is a fork."""
        if not self._open:
            raise LedgerError("this ledger is closed; nothing more can be charged to it")
        if os.getpid() != self._owner_pid:
            raise LedgerError("this ledger belongs to the parent process; a forked process cannot charge it")
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            raise LedgerError(f"{self.path} was deleted; nothing more can be charged to it")

    def close(self) -> None:
        """Release the lock. Guarantee: later charges through this object raise."""
        self._open = False
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self, path: Path, deadline: float) -> None:
        if path.suffix == ".lock":
            raise LedgerError(f"{path}: a ledger cannot have the suffix .lock of its lock file; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        _recorded_head(path)  # raises before any file is created
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerError(f"{path} is in use by another process; wait for it or stop it") from None
                    time.sleep(0.05)
            self.entries, length = _parse(path, _recorded_head(path))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # A line cut short by a crash was never flushed, so its noise was never drawn: remove it.
            os.ftruncate(self._file, length)
            self._write_head(len(self.entries), self.head)
            flush_folder(path.parent)
            on_failure.pop_all()

    def _write_head(self, count: int, head: str) -> None:
        assert self._lock is not None
        # In place and of constant length, so that a crash leaves the old head or the new one.
        os.pwrite(self._lock, f"{count:012d} {head:64}\n".encode(), 0)
        os.fsync(self._lock)


def _recorded_head(path: Path) -> tuple[int, str]:
    """Return (lines, last hash) of the last finished append. Guarantee: an intact ledger has at least these lines."""
    lock = path.with_suffix(".lock")
    fields = lock.read_bytes().decode(errors="replace").split() if lock.exists() else []
    if fields and fields[0].isdigit() and len(fields) == 1 + (int(fields[0]) > 0):
        return int(fields[0]), (fields[1:] or [""])[0]
    if fields or (path.exists() and path.stat().st_size):
        raise LedgerError(f"{lock} was edited or is missing: {path.name} may have lost lines; start a new run")
    return 0, ""


def _parse(path: Path, recorded: tuple[int, str]) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines and their length in bytes. Guarantee: raises at the first line that was changed."""
    data = path.read_bytes() if path.exists() else b""
    length = data.rfind(b"\n") + 1
    entries: list[dict[str, Any]] = []
    previous = ""
    for number, line in enumerate(data[:length].splitlines(), 1):
        try:
            entry = json.loads(line, object_pairs_hook=reject_duplicate_keys)
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
        raise LedgerError(f"{path}: {count} lines were written, {len(entries)} are there or differ; start a new run")
    return entries, length


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Guarantee: raises if a key is repeated, since parsers disagree on which value counts."""
    if len(content := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return content


def flush_folder(folder: Path) -> None:
    """Flush a directory, so that new file names survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
