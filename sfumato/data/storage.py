"""Allocate memory for decoded pixels, or an unnamed temporary file if they do not fit."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.data.errors import DataError, reason

MEMORY_SHARE = 0.5


def available_memory() -> int:
    """Return the bytes that are free without swapping, within the limits of the system and the container."""
    free = _read_meminfo(Path("/proc/meminfo"), "MemAvailable:")
    if free is None:
        try:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return 8 << 30  # a guess for systems that do not report it
    group = Path("/sys/fs/cgroup")
    limit, used = _read_integer(group / "memory.max"), _read_integer(group / "memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def allocate(shape: tuple[int, int, int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a uint8 array of zeros. Above `MEMORY_SHARE` of the available memory, use a temporary file.

    The file has no name (it is unlinked when it is created), so private pixels do not outlive the process.
    """
    size = math.prod(shape)
    if size <= MEMORY_SHARE * available_memory():
        return np.zeros(shape, np.uint8)
    try:
        with tempfile.TemporaryFile(prefix="sfumato-") as file:
            _reserve(file.fileno(), size)
            return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        what = f"{size / 2**30:.1f} GiB of images fit neither in memory nor in {tempfile.gettempdir()}"
        how = "set TMPDIR to a larger disk, or pass a smaller size"
        raise DataError(f"{what} ({reason(error)}); {how}") from error


class Spool:
    """An unnamed temporary file that several `FileRows` share, one after the other."""

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(prefix="sfumato-", buffering=0)  # noqa: SIM115
        self.descriptor, self.end = file.fileno(), 0
        self._close = weakref.finalize(self, file.close)


class FileRows:
    """Rows of one shape in an unnamed temporary file: they take no memory, and do not outlive the process.

    Reads and writes go through the file system's cache, not through mapped memory, so memory stays flat.

    - spool: file to write to, at its end, default: a new one. Only its last rows may grow.
    """

    device = torch.device("cpu")

    def __init__(self, shape: Sequence[int], dtype: Any, spool: Spool | None = None) -> None:
        self._row, self._dtype, self._count = tuple(shape), np.dtype(dtype), 0
        self._bytes = math.prod(self._row) * self._dtype.itemsize
        self._spool = spool or Spool()
        self._begin = self._spool.end

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._count, *self._row))

    def write(self, first: int, rows: np.ndarray[Any, Any]) -> None:
        """Write consecutive rows, from number `first` on."""
        data = memoryview(np.ascontiguousarray(rows, self._dtype).tobytes())
        end = self._begin + (first + len(rows)) * self._bytes
        try:
            while data:
                data = data[os.pwrite(self._spool.descriptor, data, end - len(data)) :]
        except OSError as error:
            raise DataError(f"{tempfile.gettempdir()}: {reason(error)}; set TMPDIR to a larger disk") from error
        self._count = max(self._count, first + len(rows))
        self._spool.end = max(self._spool.end, end)

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        """Return the rows at some indices, in their shape. Rows that were never written are zero."""
        rows = np.zeros((index.numel(), *self._row), self._dtype)
        places = index.flatten().tolist()
        begin = 0
        for end in range(1, len(places) + 1):  # consecutive rows in one call
            if end == len(places) or places[end] != places[end - 1] + 1:
                at = self._begin + places[begin] * self._bytes
                data = os.pread(self._spool.descriptor, (end - begin) * self._bytes, at)
                rows[begin:end].reshape(-1).view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
                begin = end
        return torch.from_numpy(rows).reshape(*index.shape, *self._row)


def _reserve(descriptor: int, size: int) -> None:
    # Without reserved blocks, a full disk would kill the process (SIGBUS) during decoding.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _read_meminfo(path: Path, name: str) -> int | None:
    try:
        lines: Iterable[str] = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _read_integer(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
