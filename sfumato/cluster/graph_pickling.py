"""Traced graphs as they travel to workers: the source of their operators, and constants.

PyTorch's own pickle of a graph traces it again on arrival; here, the code that was checked is the code that runs.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

SPECIFICATIONS = "_in_spec", "_out_spec"  # how nested arguments and results are flattened


class UnpickledGraph:
    """A traced graph on a worker.

    - source: function `forward` of the graph. names: what it refers to. constants: tensors and specifications by name.
    """

    def __init__(self, source: str, names: dict[str, Any], constants: dict[str, Any]) -> None:
        self._constants, space = SimpleNamespace(**constants), dict(names)
        exec(source, space)  # the graph's own code: PyTorch operators, checked by `tracing.trace`
        self._forward = space["forward"]

    def __call__(self, *inputs: Any) -> Any:
        return self._forward(self._constants, *inputs)


def pack(function: Any) -> tuple[bytes, list[Tensor]]:
    """Return a pickled function, in which graphs are replaced by their source and constants, and these constants."""
    pickler: Any = import_module("ray.cloudpickle").CloudPickler
    tensors: list[Tensor] = []

    class Pickler(pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if not isinstance(item, GraphModule):
                return super().reducer_override(item)
            code = item.graph.python_code("self")
            constants = {str(node.target) for node in item.graph.nodes if node.op == "get_attr"}
            constants |= {name for name in SPECIFICATIONS if hasattr(item, name)}
            held = {name: getattr(item, name) for name in constants}
            tensors.extend(each for each in held.values() if isinstance(each, Tensor))
            return UnpickledGraph, (code.src, code.globals, held)

    target = io.BytesIO()
    Pickler(target).dump(function)
    return target.getvalue(), tensors


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written to in place."""
    return [each._version for each in tensors]
