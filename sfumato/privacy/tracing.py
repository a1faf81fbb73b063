"""Author's code as a graph. A feature or loss is traced on public input; the vault runs only the graph.

`trace` records which PyTorch operators a function applies to *one* record (`make_fx` on fake tensors: shapes, no
numbers). What the function prints, stores, raises or decides happens then and never again; private images meet nothing
but the recorded operators. `per_record` runs the graph on many records by `torch.vmap`, a row from its own record.
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

TRIED = 3  # public records on which a graph is tried
ROUNDING = 1e-5  # of the largest output: what should be zero may be so much
AGREEMENT = 2e-2  # relative, between a record alone and among others: a mistake shows, rounding does not
COARSE = 0.3  # the same as a whole where numbers have less than float32
DECISION = (
    "it decides by the values of pixels, or takes a value out of a tensor (if, .item(), .tolist(), .numpy(), boolean "
    "masks): that would let one image change what is computed. Use torch.where, or multiply by a mask"
)


def trace(function: Callable[..., Any], *examples: Any, what: str = "this feature") -> GraphModule:
    """Return the operators that `function` applies to one record; `examples` give shapes, types and device only.

    Guarantee: nothing of the function but these operators runs afterwards; each was looked at by `_check`.
    """
    try:
        traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except GuardOnDataDependentSymNode:
        raise ValueError(f"{what} cannot be traced: {DECISION}") from None
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{what} cannot be traced: {error}\nIf this is about values: {DECISION}") from None
    traced.graph.eliminate_dead_code()
    _check(traced.graph, what)
    for name in {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}:
        held = getattr(traced, name).detach()  # the same memory in a tensor of our own, which nobody can exchange
        delattr(traced, name)
        setattr(traced, name, held)
    traced.recompile()
    return traced


def per_record(graph: GraphModule, shared: int, records: int) -> Callable[..., Any]:
    """Return the graph over batches. Guarantee: a row comes from one record and what is `shared`, as `vmap` does it."""
    return torch.vmap(graph, in_dims=(None,) * shared + (0,) * records, randomness="error")


def try_out(graph: GraphModule, shared: Sequence[Any], records: Sequence[Tensor], what: str) -> list[Any]:
    """Run a graph on public records, together and one by one; return the rows of each output.

    Guarantee: an operator whose rule for `vmap` fails or mixes records is found here, before anything is charged.
    """
    try:
        together = tree_leaves(per_record(graph, len(shared), len(records))(*shared, *records))
        alone = [tree_leaves(graph(*shared, *(part[index] for part in records))) for index in range(len(records[0]))]
    except RuntimeError as error:
        raise ValueError(f"{what} cannot be computed record by record: {error}") from None
    largest = max(float(rows.double().abs().nan_to_num(0, 0, 0).max()) for rows in together)
    coarse = any(rows.dtype in (torch.bfloat16, torch.float16) for rows in together)
    for rows, single in zip(together, zip(*alone, strict=True), strict=True):
        message = f"{what} uses an operator that mixes records under torch.vmap"
        same_rows(rows, torch.stack(single), message, ROUNDING * largest, coarse)
    return together


def same_rows(rows: Tensor, others: Tensor, message: str, rounding: float = 0.0, coarse: bool = False) -> None:
    """Raise `ValueError` unless both are the same but for rounding; `coarse`: as a whole, for signs may flip."""
    if rows.shape != others.shape:
        raise ValueError(f"{message}: {tuple(others.shape)} in place of {tuple(rows.shape)}")
    rows, others = rows.double().nan_to_num(0, 0, 0), others.double().nan_to_num(0, 0, 0)
    within = (rows - others).abs() <= AGREEMENT * (rows.abs() + float(rows.abs().max())) + rounding
    apart, whole = (rows - others).norm(), rows.norm()
    if not (apart <= COARSE * whole + rounding * len(rows) if coarse else within.all()):
        raise ValueError(message)


def public_records(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return `TRIED` public images: fixed numbers (multiples of the golden ratio) in [-1, 1], no record."""
    spread = torch.arange(1, TRIED * torch.Size(shape).numel() + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    return (spread * 2 - 1).float().reshape(TRIED, *shape).to(device)


def _check(graph: Graph, what: str) -> None:
    """Refuse what could carry something from one record or call to another, and say what to write instead.

    Guarantee: what remains are PyTorch's own deterministic operators on the record, shared inputs and constants; none
    writes to anything that outlives a call.
    """
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(
                f"{what} draws random numbers ({node.target}); draw them before and pass them as constants, ask for "
                "numbers of each image's own (draws=), and put networks with dropout into eval mode"
            )
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph.owning_module, str(node.target)), FakeTensor):
            raise ValueError(f"{what} keeps a tensor that it made while it was traced; make such tensors before")
        if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
            continue
        target, made = node.target, tree_leaves(node.meta.get("val"))
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
            raise ValueError(f"{what} uses {target}, which leaves the graph; use PyTorch's own operators only")
        if any(isinstance(side, torch.SymInt) for each in made for side in getattr(each, "shape", ())):
            raise ValueError(f"{what} uses {target}, whose outcome has no fixed shape: {DECISION}")
        if target._schema.name.startswith(("aten::empty", "aten::new_empty")) and not _filled(node):
            raise ValueError(f"{what} reads uninitialised memory ({target}); use zeros")
        arguments = target._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)} | node.kwargs
        if given.get("training") is True and given.get("running_mean") is not None:
            raise ValueError(f"{what} has batch norm in training mode, which mixes images; call .eval() before")
        written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(each, Node) and _root(each).op in ("placeholder", "get_attr") for each in written):
            raise ValueError(f"{what} changes a tensor that outlives the call ({target}); compute a new one")


def _filled(node: Node) -> bool:
    """Return whether new memory is overwritten before anything reads it."""
    first = next(iter(node.users))
    return str(first.target).startswith(("aten.fill_.", "aten.zero_.", "aten.copy_.")) and first.args[0] is node


def _root(node: Node) -> Node:
    """Return the node whose memory this one is a view of."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not (schema.returns and schema.returns[0].alias_info is not None):
            break
        node = node.args[0]
    return node
