"""Noised results on disk, so that a killed run can resume without a second charge or a second draw.

Each noised result is written to `releases.log` and flushed *before* the method receives it. After a crash, a result is
either in the log and returned again, or nobody has seen it and the release is drawn with fresh noise: one charge, one
result that was returned. Exact sums and noise are never stored. After a method has written a checkpoint, `forget`
deletes the results that went into it; a forgotten result is never drawn again.
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
CHUNK = 2**30  # bytes per system call


class KeptResults:
    """The noised results of one run, in the log of its folder.

    - folder: the run's folder.
    - ledger: the run's ledger. The constructor raises `LedgerError` if it has charges and there is no log, or if the
      log holds results that it was not charged for: those of another run.

    Guarantee: only noised results are written. A result is on disk before `put` returns.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._path = folder / LOG
        self._forgotten: dict[str, int] = {}
        self._index: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
        if any(entry["kind"] == "charge" for entry in ledger.entries) and not self._path.exists():
            raise LedgerError(f"{self._path} is gone, so the results that were charged are lost; start a new run")
        self._log = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        flush_folder(folder)
        size = os.fstat(self._log).st_size
        with mmap.mmap(self._log, size, prot=mmap.PROT_READ) if size else nullcontext(b"") as data:
            intact = self._scan(data)
        os.ftruncate(self._log, intact)
        held = [*((name, number + 1) for name, number in self._index), *self._forgotten.items()]
        if any(results > ledger.charged(name) for name, results in held):
            os.close(self._log)
            raise LedgerError(f"{self._path} holds results that this run was not charged for; use a new folder")

    def get(self, name: str, number: int) -> torch.Tensor | None:
        """Return a stored result, or None. Guarantee: bit for bit what was stored; raises if it was forgotten."""
        if number < self._forgotten.get(name, 0):
            raise LedgerError(
                f"result {number} of {name!r} was handed out, and its checkpoint is gone; start a new run"
            )
        if (name, number) not in self._index:
            return None
        begin, header = self._index[name, number]
        parts = (
            os.pread(self._log, min(CHUNK, header["bytes"] - at), begin + at) for at in range(0, header["bytes"], CHUNK)
        )
        data = bytearray(b"".join(parts))
        return torch.frombuffer(data, dtype=torch.float32).reshape(header["shape"]).clone()

    def put(self, name: str, number: int, result: torch.Tensor) -> None:
        """Store a result. Guarantee: returns only when it is on disk."""
        data = result.detach().float().cpu().contiguous().numpy().tobytes()
        header = {"name": name, "number": number, "shape": list(result.shape)}
        self._index[name, number] = self._write(header, data)

    def forget(self, before: Mapping[str, int]) -> None:
        """Delete the first `before[name]` results of each release. Guarantee: they are never drawn again."""
        kept = [(*key, self.get(*key)) for key in self._index if key[1] >= before.get(key[0], 0)]
        partial, old = self._path.with_suffix(".partial"), self._log
        self._log = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._index, self._forgotten = {}, {**self._forgotten, **before}
        self._write({"forgotten": self._forgotten}, b"")
        for name, number, result in kept:
            assert result is not None
            self.put(name, number, result)
        os.replace(partial, self._path)
        flush_folder(self._path.parent)
        os.close(old)

    def close(self) -> None:
        """Close the log."""
        os.close(self._log)

    def _write(self, header: dict[str, Any], data: bytes) -> tuple[int, dict[str, Any]]:
        """Append an entry and flush; return the offset of its data, and its header."""
        header |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        line = json.dumps(header).encode() + b"\n"
        begin = os.lseek(self._log, 0, os.SEEK_END)
        with ExitStack() as on_failure:
            on_failure.callback(os.ftruncate, self._log, begin)  # entries after an incomplete one would be lost
            for part in (line, *(data[start : start + CHUNK] for start in range(0, len(data), CHUNK))):
                if os.write(self._log, part) != len(part):
                    raise LedgerError("the disk is full: this result was not released; free space and resume")
            os.fsync(self._log)
            on_failure.pop_all()
        return begin + len(line), header

    def _scan(self, data: bytes | mmap.mmap) -> int:
        """Index the stored results; return the offset of the first incomplete entry."""
        begin = 0
        while (end := data.find(b"\n", begin) + 1) > 0:
            try:
                header = json.loads(data[begin:end])
                intact = hashlib.sha256(data[end : end + header["bytes"]]).hexdigest() == header["sha256"]
            except (ValueError, KeyError, TypeError):
                intact = False
            if not intact:
                break
            self._forgotten |= header.get("forgotten", {})
            if "name" in header:
                self._index[header["name"], header["number"]] = end, header
            begin = end + header["bytes"]
        return begin
