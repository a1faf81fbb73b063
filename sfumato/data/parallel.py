"""Ordered work in threads with bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from .errors import DataError

Input = TypeVar("Input")
Output = TypeVar("Output")

# One future per image would cost more than a small image; large batches would hold too many pixels.
BATCH = 8


def usable_cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_order(
    function: Callable[[Input], Output], items: Iterable[Input], workers: int | None = None
) -> Generator[Output, None, None]:
    """Apply `function` in threads and yield results in order, with a few batches in flight at a time."""
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers}: at least one thread is needed")
    threads = workers or min(usable_cores(), 32)

    def run(batch: list[Input]) -> list[Output]:
        return [function(item) for item in batch]

    remaining = iter(items)
    pending: deque[Future[list[Output]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="sfumato-data") as pool:
        try:
            while batch := list(islice(remaining, BATCH)):
                pending.append(pool.submit(run, batch))
                if len(pending) > 2 * threads:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
