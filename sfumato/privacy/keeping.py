"""Noised results on disk, so that a run that was killed goes on without paying or asking twice.

Each noised result is written to `releases.log` and flushed *before* the method gets it. So after a crash a result is
either in the log, and is handed out again, or nobody has ever seen it, and the same release is drawn with fresh noise:
one charge, one result that left. Exact sums and noise are never stored. A method that has stored a state of its own
lets the log forget the results that went into it; a forgotten result is never drawn again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sfumato.privacy.ledger import Ledger, LedgerError, flush_folder

LOG = "releases.log"


class Kept:
    """The results of one run, in its folder; nothing is kept where `folder` is None.

    Guarantee: only what was noised is written. A result is on the disk before `put` returns.
    """

    def __init__(self, folder: Path | None, ledger: Ledger) -> None:
        self._path = None if folder is None else folder / LOG
        self._forgotten: dict[str, int] = {}
        self._places: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
        self._log: int | None = None
        if self._path is not None:
            if any(entry["kind"] == "charge" for entry in ledger.entries) and not self._path.exists():
                raise LedgerError(f"{self._path} is gone: what was charged is spent; start a new run")
            self._log = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            flush_folder(self._path.parent)
            os.ftruncate(self._log, self._scan())

    def get(self, name: str, number: int) -> torch.Tensor | None:
        """Return a kept result. Guarantee: exactly what was stored; raises for one that was handed out and forgotten."""
        if number < self._forgotten.get(name, 0):
            raise LedgerError(f"result {number} of {name!r} was handed out before; its checkpoint is gone; start a new run")
        if self._log is None or (name, number) not in self._places:
            return None
        begin, header = self._places[name, number]
        data = bytearray(os.pread(self._log, header["bytes"], begin))
        return torch.frombuffer(data, dtype=torch.float32).reshape(header["shape"]).clone()

    def put(self, name: str, number: int, result: torch.Tensor) -> None:
        """Keep a result. Guarantee: returns only when it is on the disk."""
        if self._log is None:
            return
        data = result.detach().float().cpu().contiguous().numpy().tobytes()
        header = {"name": name, "number": number, "shape": list(result.shape), "bytes": len(data)}
        place = self._write({**header, "sha256": hashlib.sha256(data).hexdigest()}, data)
        self._places[name, number] = place, header

    def forget(self, before: Mapping[str, int]) -> None:
        """Drop the first `before[name]` results of each release. Guarantee: they are never drawn again."""
        if self._log is None or self._path is None:
            return
        kept = {key: self.get(*key) for key in self._places if key[1] >= before.get(key[0], 0)}
        partial, old = self._path.with_suffix(".partial"), self._log
        self._forgotten |= before
        self._log, self._places = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), {}
        self._write({"forgotten": self._forgotten, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}, b"")
        for (name, number), result in kept.items():
            assert result is not None
            self.put(name, number, result)
        os.replace(partial, self._path)
        flush_folder(self._path.parent)
        os.close(old)

    def close(self, *, finished: bool) -> None:
        """Let go of the log; of a finished run, remove it."""
        if self._log is not None and self._path is not None:
            os.close(self._log)
            self._log = None
            if finished:
                self._path.unlink()

    def _write(self, header: dict[str, Any], data: bytes) -> int:
        """Append an entry and flush; return where its data begin."""
        assert self._log is not None
        line = json.dumps(header).encode() + b"\n"
        begin = os.lseek(self._log, 0, os.SEEK_END)
        if os.write(self._log, line + data) != len(line) + len(data):
            raise LedgerError("the disk is full: this result is lost, nothing has left; free space and resume")
        os.fsync(self._log)
        return begin + len(line)

    def _scan(self) -> int:
        """Find the kept results; return where the first entry that is not whole begins."""
        assert self._log is not None
        begin, data = 0, os.pread(self._log, os.fstat(self._log).st_size, 0)
        while (end := data.find(b"\n", begin) + 1) > 0:
            try:
                header = json.loads(data[begin:end])
                whole = hashlib.sha256(data[end : end + header["bytes"]]).hexdigest() == header["sha256"]
            except (ValueError, KeyError, TypeError):
                whole = False
            if not whole:
                break
            self._forgotten |= header.get("forgotten", {})
            if "name" in header:
                self._places[header["name"], header["number"]] = end, header
            begin = end + header["bytes"]
        return begin
