"""One launch in place of hundreds: a step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol, Self

import torch

from sfumato.engine.recording import capture

WARM_UP = 3  # plain calls before a graph is captured


class Bundle(Protocol):
    """Tensors that belong together: what a step looks through, other ones each time."""

    def tensors(self) -> list[torch.Tensor]: ...

    def like(self, tensors: Sequence[torch.Tensor]) -> Self:
        """The same kind of bundle, made of these tensors."""
        ...


class Alone:
    """No bundle: for a step of nothing but tensors."""

    def tensors(self) -> list[torch.Tensor]:
        return []

    def like(self, tensors: Sequence[torch.Tensor]) -> Self:  # noqa: ARG002
        return self


class Graph:
    """A function of a bundle and tensors; on a GPU captured at the fourth call and replayed as one launch from then on.

    Shapes must be the same at each call, and what is returned is overwritten by the next. No random numbers inside.
    Products of matrices are taken in TF32, like convolutions: steps are training, and their batches err more than that.
    """

    def __init__(self, function: Callable[..., torch.Tensor | None]) -> None:
        self._function, self._calls = function, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, bundle: Bundle, *tensors: torch.Tensor) -> torch.Tensor | None:
        inputs = [*bundle.tensors(), *tensors]
        if inputs[0].device.type != "cuda":
            return self._function(bundle, *tensors)
        if self._calls < WARM_UP:
            return self._warm_up(bundle, *tensors)
        if self._graph is None:
            self._inputs = [tensor.clone() for tensor in inputs]
            depth = len(bundle.tensors())
            self._graph = torch.cuda.CUDAGraph()
            with capture(self._graph, _stream()), _tf32():
                self._result = self._function(bundle.like(self._inputs[:depth]), *self._inputs[depth:])
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        return self._result

    def _warm_up(self, bundle: Bundle, *tensors: torch.Tensor) -> torch.Tensor | None:
        """On the stream of the capture: what derivatives leave behind on another stream cannot be captured with."""
        self._calls += 1
        here, stream = torch.cuda.current_stream(), _stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream), _tf32():
            result = self._function(bundle, *tensors)
        here.wait_stream(stream)
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
