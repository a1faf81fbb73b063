"""Trace a method's feature or loss on public input; the vault runs only the traced graph on private images.

`trace` records the operators that a function applies to *one* record (`make_fx` on fake tensors: shapes, no values).
Side effects (printing, storing, raising) happen while tracing only. `per_record` maps the graph with `torch.vmap`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

PROBES = 3  # public records on which a graph is checked
ZERO_TOLERANCE = 1e-5  # of the largest output: rounding error of an output that should be zero
ROW_TOLERANCE = 2e-2  # relative, between a record alone and in a batch: far above rounding, far below a mistake
COARSE_TOLERANCE = 0.3  # for half precision: relative error of all rows together
DATA_DEPENDENT = (
    "it branches on pixel values, or takes a value out of a tensor (if, .item(), .tolist(), .numpy(), boolean masks), "
    "so that one image could change what is computed. Use torch.where, or multiply by a mask"
)
BATCH_NORM = "batch norm in training mode, which mixes images; call .eval() beforehand, or use group norm"


def trace(function: Callable[..., Any], *examples: Any, subject: str = "this feature") -> GraphModule:
    """Return the operators that `function` applies to one record; `examples` give shapes, types and device only.

    Guarantee: nothing of the function except these operators runs afterwards; `_check_operators` accepted each.
    """
    try:
        traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except GuardOnDataDependentSymNode:
        raise ValueError(f"{subject} cannot be traced: {DATA_DEPENDENT}") from None
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{subject} cannot be traced: {error}\nA likely cause: {DATA_DEPENDENT}") from None
    traced.graph.eliminate_dead_code()
    _check_operators(traced.graph, subject)
    for name in {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}:
        constant = getattr(traced, name).detach()  # same memory, but a tensor object that nobody else can reassign
        delattr(traced, name)
        setattr(traced, name, constant)
    traced.recompile()
    return traced


def per_record(graph: GraphModule, shared: int, records: int) -> Callable[..., Any]:
    """Return the graph mapped over a batch by `vmap`. Guarantee: a row depends on its record and `shared` only."""
    return torch.vmap(graph, in_dims=(None,) * shared + (0,) * records, randomness="error")


def check_on_probes(graph: GraphModule, shared: Sequence[Any], probes: Sequence[Tensor], subject: str) -> list[Any]:
    """Run a graph on public probe records, as a batch and one by one; return the rows of each output.

    Guarantee: an operator whose `vmap` rule fails on, or mixes, the probe records raises before anything is charged.
    """
    try:
        together = tree_leaves(per_record(graph, len(shared), len(probes))(*shared, *probes))
        alone = [tree_leaves(graph(*shared, *(part[index] for part in probes))) for index in range(len(probes[0]))]
    except RuntimeError as error:
        raise ValueError(f"{subject} cannot be computed record by record: {error}") from None
    largest = max(float(rows.double().abs().nan_to_num(0, 0, 0).max()) for rows in together)
    coarse = any(rows.dtype in (torch.bfloat16, torch.float16) for rows in together)
    for rows, single in zip(together, zip(*alone, strict=True), strict=True):
        message = f"{subject} uses an operator that mixes records under torch.vmap"
        check_same_rows(rows, torch.stack(single), message, ZERO_TOLERANCE * largest, coarse)
    return together


def check_same_rows(rows: Tensor, others: Tensor, message: str, absolute: float = 0.0, coarse: bool = False) -> None:
    """Raise unless both are equal up to rounding; `coarse`: compare the norm of all rows, as single signs may flip."""
    if rows.shape != others.shape:
        raise ValueError(f"{message}: {tuple(others.shape)} instead of {tuple(rows.shape)}")
    rows, others = rows.double().nan_to_num(0, 0, 0), others.double().nan_to_num(0, 0, 0)
    within = (rows - others).abs() <= ROW_TOLERANCE * (rows.abs() + float(rows.abs().max())) + absolute
    distance, norm = (rows - others).norm(), rows.norm()
    if not (distance <= COARSE_TOLERANCE * norm + absolute * len(rows) if coarse else within.all()):
        raise ValueError(message)


def probe_records(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return `PROBES` public records: fixed numbers in [-1, 1], multiples of the golden ratio modulo 1."""
    fractions = torch.arange(1, PROBES * torch.Size(shape).numel() + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    return (fractions * 2 - 1).float().reshape(PROBES, *shape).to(device)


def _check_operators(graph: Graph, subject: str) -> None:
    """Raise for operators that could carry information between records or calls, with advice on what to use instead.

    Guarantee: only PyTorch's own deterministic operators on the record, shared arguments and constants remain, and none
    writes to memory that outlives a call.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(
                f"{subject} draws random numbers ({node.target}). Draw them beforehand and pass constants, use "
                "draws= for random numbers per image, and put networks with dropout into eval mode"
            )
    for node in sorted(graph.nodes, key=lambda node: "batch_norm" not in str(node.target)):  # before its counter's add_
        if node.op == "get_attr" and isinstance(getattr(graph.owning_module, str(node.target)), FakeTensor):
            raise ValueError(f"{subject} keeps a tensor that it created in its trace; create it outside the function")
        if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
            continue
        target, results = node.target, tree_leaves(node.meta.get("val"))
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
            raise ValueError(f"{subject} uses {target}, which leaves the graph; use PyTorch's own operators only")
        if any(isinstance(side, torch.SymInt) for each in results for side in getattr(each, "shape", ())):
            raise ValueError(f"{subject} uses {target}, whose result has no fixed shape: {DATA_DEPENDENT}")
        if target._schema.name.startswith(("aten::empty", "aten::new_empty")) and not _overwritten(node):
            raise ValueError(f"{subject} reads uninitialised memory ({target}); use zeros")
        arguments = target._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
        if given.get("training") is True and given.get("running_mean") is not None:
            raise ValueError(f"{subject} has {BATCH_NORM}")
        written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(each, Node) and _base(each).op in ("placeholder", "get_attr") for each in written):
            raise ValueError(f"{subject} changes a tensor that outlives the call ({target}); compute a new one")


def _overwritten(node: Node) -> bool:
    """Return whether new memory is overwritten before anything reads it."""
    first = next(iter(node.users))
    return str(first.target).startswith(("aten.fill_.", "aten.zero_.", "aten.copy_.")) and first.args[0] is node


def _base(node: Node) -> Node:
    """Return the node whose memory this node is a view of."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not (schema.returns and schema.returns[0].alias_info is not None):
            break
        node = node.args[0]
    return node
