"""Noised results on disk, so that a run that was killed goes on without paying or asking twice.

Each noised result is written to `releases.log` and flushed *before* the method gets it. So after a crash a result is
either in the log, and is handed out again, or nobody has ever seen it, and the same release is drawn with fresh noise:
one charge, one result that left. Exact sums and noise are never stored. A method that has stored a state of its own
lets the log forget the results that went into it; a forgotten result is never drawn again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from sfumato.privacy.ledger import Ledger, LedgerError, flush_folder

LOG = "releases.log"
CHUNK = 2**30  # bytes in one call of the operating system


class Kept:
    """The results of one run, in its folder.

    Guarantee: only what was noised is written. A result is on the disk before `put` returns.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._path = folder / LOG
        self._forgotten: dict[str, int] = {}
        self._places: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
        if any(entry["kind"] == "charge" for entry in ledger.entries) and not self._path.exists():
            raise LedgerError(f"{self._path} is gone: what was charged is spent; start a new run")
        self._log = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        flush_folder(folder)
        size = os.fstat(self._log).st_size
        with mmap.mmap(self._log, size, prot=mmap.PROT_READ) if size else nullcontext(b"") as data:
            whole = self._scan(data)
        os.ftruncate(self._log, whole)

    def get(self, name: str, number: int) -> torch.Tensor | None:
        """Return a kept result. Guarantee: exactly what was stored; raises for one that was forgotten."""
        if number < self._forgotten.get(name, 0):
            raise LedgerError(
                f"result {number} of {name!r} was handed out, and its checkpoint is gone; start a new run"
            )
        if (name, number) not in self._places:
            return None
        begin, header = self._places[name, number]
        parts = (
            os.pread(self._log, min(CHUNK, header["bytes"] - at), begin + at) for at in range(0, header["bytes"], CHUNK)
        )
        data = bytearray(b"".join(parts))
        return torch.frombuffer(data, dtype=torch.float32).reshape(header["shape"]).clone()

    def put(self, name: str, number: int, result: torch.Tensor) -> None:
        """Keep a result. Guarantee: returns only when it is on the disk."""
        data = result.detach().float().cpu().contiguous().numpy().tobytes()
        header = {"name": name, "number": number, "shape": list(result.shape)}
        self._places[name, number] = self._write(header, data)

    def forget(self, before: Mapping[str, int]) -> None:
        """Drop the first `before[name]` results of each release. Guarantee: they are never drawn again."""
        kept = [(*key, self.get(*key)) for key in self._places if key[1] >= before.get(key[0], 0)]
        partial, old = self._path.with_suffix(".partial"), self._log
        self._log = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._places, self._forgotten = {}, {**self._forgotten, **before}
        self._write({"forgotten": self._forgotten}, b"")
        for name, number, result in kept:
            assert result is not None
            self.put(name, number, result)
        os.replace(partial, self._path)
        flush_folder(self._path.parent)
        os.close(old)

    def close(self) -> None:
        """Let go of the log."""
        os.close(self._log)

    def _write(self, header: dict[str, Any], data: bytes) -> tuple[int, dict[str, Any]]:
        """Append an entry and flush; return where its data begin, and its header."""
        header |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        line = json.dumps(header).encode() + b"\n"
        begin = os.lseek(self._log, 0, os.SEEK_END)
        with ExitStack() as failed:
            failed.callback(os.ftruncate, self._log, begin)  # nothing may stand behind an entry that is not whole
            for part in (line, *(data[start : start + CHUNK] for start in range(0, len(data), CHUNK))):
                if os.write(self._log, part) != len(part):
                    raise LedgerError("the disk is full: this result is lost, nothing has left; free space and resume")
            os.fsync(self._log)
            failed.pop_all()
        return begin + len(line), header

    def _scan(self, data: bytes | mmap.mmap) -> int:
        """Find the kept results; return where the first entry that is not whole begins."""
        begin = 0
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
