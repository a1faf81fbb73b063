"""Allocate memory for decoded pixels, or an unnamed temporary file if they do not fit."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

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
