"""Room for decoded pixels: memory, or an unnamed temporary file when they would not fit."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError, reason

MEMORY_SHARE = 0.5


def available_memory() -> int:
    """Bytes that can still be used without swapping: what the system and the container's limit leave."""
    free = _field(Path("/proc/meminfo"), "MemAvailable:")
    if free is None:
        try:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return 8 << 30  # A system that does not tell; a modest guess.
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def allocate(shape: tuple[int, int, int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A uint8 array of zeros; above `MEMORY_SHARE` of the available memory it lives in a temporary file.

    The file has no name (it is unlinked as it is made), so that private pixels do not outlive the process.
    """
    size = math.prod(shape)
    if size <= MEMORY_SHARE * available_memory():
        return np.zeros(shape, np.uint8)
    try:
        with tempfile.TemporaryFile(prefix="sfumato-") as file:
            _reserve(file.fileno(), size)
            return np.memmap(file, np.uint8, "r+", shape=shape)
    except OSError as error:
        what = f"{size / 2**30:.1f} GiB of images fit neither into memory nor into {tempfile.gettempdir()}"
        how = "set TMPDIR to a larger disk, or pass a smaller size"
        raise DataError(f"{what} ({reason(error)}); {how}") from error


def _reserve(descriptor: int, size: int) -> None:
    # Without reserved blocks a full disk would kill the process (SIGBUS) in the middle of decoding.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)


def _field(path: Path, name: str) -> int | None:
    try:
        lines: Iterable[str] = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
