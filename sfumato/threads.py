"""Choose the number of threads from the cores that this process may really use. Imports no PyTorch.

PyTorch starts a thread for each core of the machine, and its threads wait for each other by spinning. In a container
with a quota, or beside another busy program, most of that time is wasted. `choose_threads` sets what OpenMP reads when
PyTorch is loaded; variables that the user has set are kept. `import sfumato` calls it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "SFUMATO_THREADS"
WAITING = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # how threads wait for each other; PASSIVE: they sleep


def choose_threads(number: int | None = None) -> int:
    """Set the number of threads and how they wait, and return the number.

    - number: threads; default: SFUMATO_THREADS, or OMP_NUM_THREADS, or `usable_cores`.

    Before PyTorch is imported this sets environment variables, which child processes inherit. Afterwards it can only
    lower the number of threads; the way they wait is then that of PyTorch.
    """
    wanted = os.environ.get(VARIABLE) if number is None else str(number)
    if wanted is not None and not (wanted.isdecimal() and int(wanted) > 0):
        raise ValueError(f"the number of threads (--threads, {VARIABLE}) must be an integer from 1, got {wanted!r}")
    if wanted is not None:
        os.environ[VARIABLE] = os.environ["OMP_NUM_THREADS"] = wanted
    given = os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    if not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = "PASSIVE"
    threads = int(given) if given.isdecimal() else usable_cores()  # OpenMP also accepts a list, one for each level
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads") and torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
    return threads


def usable_cores() -> int:
    """Return the number of cores that this process may use: affinity, and the CPU quota of its control groups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _quota(membership: Path, root: Path) -> float | None:
    """Return the smallest quota of the process's control groups and of all above them, in cores; None without one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        for mount in [root / controllers, root / "cpu"] if controllers else [root, root / "unified"]:
            group = mount / path.lstrip("/")
            for folder in [group, *group.parents]:
                if folder.is_relative_to(mount):
                    found.append(_group_quota(folder))
    return min((cores for cores in found if cores is not None), default=None)


def _group_quota(folder: Path) -> float | None:
    """Return the quota of one control group: `cpu.max` of version 2, or two files of version 1."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
