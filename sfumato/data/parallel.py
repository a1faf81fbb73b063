"""Apply a function in threads, in order and with bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from sfumato.data.errors import DataError
from sfumato.threads import usable_cores

Input = TypeVar("Input")
Output = TypeVar("Output")

# Items in one future: one image is less work than a future, and large batches use too much memory.
BATCH = 8


def map_in_order(
    function: Callable[[Input], Output], items: Iterable[Input], workers: int | None = None
) -> Generator[Output, None, None]:
    """Apply `function` to all items in threads and yield the results in order, with few batches pending at a time."""
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
