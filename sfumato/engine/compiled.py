"""Compilation of functions on a GPU, where elementwise operators between convolutions cost more than these."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Compiled:
    """A function that is compiled by `torch.compile` at its first call on a GPU; on a CPU it is called directly.

    Where compilation fails, for example without a C compiler, the function is called directly, with a warning.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function, self._failed = function, False
        self._compiled: Callable[..., torch.Tensor] | None = None

    def __call__(self, *inputs: Any) -> torch.Tensor:
        on_gpu = any(isinstance(part, torch.Tensor) and part.is_cuda for part in inputs)
        if not on_gpu or self._failed:
            return self._function(*inputs)
        if self._compiled is None:
            self._compiled = torch.compile(self._function, dynamic=False)
        try:
            return self._compiled(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._failed = True
            reason = str(error).splitlines()[0]
            warnings.warn(f"{self._function.__name__} runs uncompiled, slower: {reason}", stacklevel=2)
            return self._function(*inputs)
