"""Replay a function of a batch as one CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

WARM_UP = 2  # plain calls before a capture


class Recorded:
    """A function of tensors of fixed shapes, captured at its third call on a GPU and replayed from then on.

    It does what the function does: inputs are copied to fixed memory, the same kernels run, the result is copied out.
    The first replay is compared with a plain call. On a CPU it is the function itself.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function, self._calls, self._turn = function, 0, threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not inputs[0].is_cuda or self._calls < 0:
            return self._function(*inputs)
        with self._turn, torch.cuda.device(inputs[0].device):
            if self._graph is None:
                self._calls += 1
                if self._calls <= WARM_UP:
                    return self._warm_up(*inputs)
                return self._capture(*inputs)
            return self._replay(*inputs)

    def _warm_up(self, *inputs: torch.Tensor) -> torch.Tensor:
        here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = self._function(*inputs)
        here.wait_stream(stream)
        return result

    def _capture(self, *inputs: torch.Tensor) -> torch.Tensor:
        plain = self._function(*inputs)
        self._inputs = [part.clone() for part in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, torch.cuda.Stream()):
                self._result = self._function(*self._inputs)
        except RuntimeError:
            self._calls = -1  # plain from now on
            warnings.warn("this query cannot be captured as a CUDA graph, so it is slower", stacklevel=2)
            return plain
        self._graph = graph
        if not torch.allclose(self._replay(*inputs), plain, 1e-3, 1e-3 * float(plain.abs().max()), equal_nan=True):
            raise RuntimeError("a replay gives something else than a plain call")
        return plain

    def _replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        assert self._graph is not None
        if any(mine.shape != given.shape for mine, given in zip(self._inputs, inputs, strict=True)):
            raise RuntimeError("a recording is for batches of one shape")
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return self._result.clone()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is done meanwhile. Disables garbage collection: freeing another CUDA graph would invalidate it."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if collecting:
            gc.enable()
