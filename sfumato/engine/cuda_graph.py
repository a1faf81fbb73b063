"""CUDA graphs: one launch instead of hundreds, for vault queries (`CapturedQuery`) and training steps (`Graph`)."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol, Self

import torch

QUERY_WARM_UP = 2  # calls of a query before it is captured
STEP_WARM_UP = 3  # calls of a training step before it is captured


class CapturedQuery:
    """A function of tensors of fixed shapes, captured at its third call on a GPU and replayed afterwards.

    Each replay copies the inputs to fixed memory, runs the same kernels and copies the result. The first replay is
    compared with a plain call. On a CPU the function is called directly.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function, self._calls, self._lock = function, 0, threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not inputs[0].is_cuda or self._calls < 0:
            return self._function(*inputs)
        with self._lock, torch.cuda.device(inputs[0].device):
            if self._graph is None:
                self._calls += 1
                if self._calls <= QUERY_WARM_UP:
                    return self._warm_up(*inputs)
                return self._capture(*inputs)
            return self._replay(*inputs)

    def _warm_up(self, *inputs: torch.Tensor) -> torch.Tensor:
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = self._function(*inputs)
        current.wait_stream(stream)
        return result

    def _capture(self, *inputs: torch.Tensor) -> torch.Tensor:
        plain = self._function(*inputs)
        self._inputs = [part.clone() for part in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph, torch.cuda.Stream()):
                self._result = self._function(*self._inputs)
        except RuntimeError:
            self._calls = -1  # plain calls from now on
            warnings.warn("this query cannot be captured as a CUDA graph and runs without one, slower", stacklevel=2)
            return plain
        self._graph = graph
        if not torch.allclose(self._replay(*inputs), plain, 1e-3, 1e-3 * float(plain.abs().max()), equal_nan=True):
            raise RuntimeError("the replay of a CUDA graph differs from a plain call; use Performance(record=False)")
        return plain

    def _replay(self, *inputs: torch.Tensor) -> torch.Tensor:
        assert self._graph is not None
        if any(fixed.shape != given.shape for fixed, given in zip(self._inputs, inputs, strict=True)):
            raise RuntimeError("a CUDA graph was captured for other shapes")
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return self._result.clone()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the body. Disables garbage collection: freeing another CUDA graph would invalidate the capture."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if collecting:
            gc.enable()


class Bundle(Protocol):
    """An object that holds tensors, such as a set of features, and can be rebuilt from other tensors."""

    def tensors(self) -> list[torch.Tensor]: ...

    def like(self, tensors: Sequence[torch.Tensor]) -> Self:
        """Return an object of the same kind that holds these tensors."""
        ...


class NoBundle:
    """The empty bundle, for a step whose arguments are all tensors."""

    def tensors(self) -> list[torch.Tensor]:
        return []

    def like(self, tensors: Sequence[torch.Tensor]) -> Self:  # noqa: ARG002
        return self


class Graph:
    """A training step, `function(bundle, *tensors)`, captured at its fourth call on a GPU and replayed afterwards.

    All calls must have the same shapes and draw no random numbers. The next call overwrites the returned tensor. Matrix
    products use TF32, like convolutions; its error is small against that of a training batch.
    """

    def __init__(self, function: Callable[..., torch.Tensor | None]) -> None:
        self._function, self._calls = function, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, bundle: Bundle, *tensors: torch.Tensor) -> torch.Tensor | None:
        inputs = [*bundle.tensors(), *tensors]
        if inputs[0].device.type != "cuda":
            return self._function(bundle, *tensors)
        if self._calls < STEP_WARM_UP:
            return self._warm_up(bundle, *tensors)
        if self._graph is None:
            self._inputs = [tensor.clone() for tensor in inputs]
            bundled = len(bundle.tensors())
            self._graph = torch.cuda.CUDAGraph()
            with capture(self._graph, _stream()), _tf32():
                self._result = self._function(bundle.like(self._inputs[:bundled]), *self._inputs[bundled:])
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        return self._result

    def _warm_up(self, bundle: Bundle, *tensors: torch.Tensor) -> torch.Tensor | None:
        """Run on the stream of the capture: autograd state that was created on another stream cannot be captured."""
        self._calls += 1
        current, stream = torch.cuda.current_stream(), _stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _tf32():
            result = self._function(bundle, *tensors)
        current.wait_stream(stream)
        return result


@contextmanager
def _tf32() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before, settings.allow_tf32 = settings.allow_tf32, True
    try:
        yield
    finally:
        settings.allow_tf32 = before


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()
