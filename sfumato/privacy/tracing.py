"""Author's code as a graph. A feature or loss runs once, on public input without values; the vault runs only the graph.

`trace` records which PyTorch operators a function applies to *one* record (`make_fx` on fake tensors: shapes, no
numbers). What the function prints, stores, raises or decides happens then and never again; private images meet nothing
but the recorded operators. `per_record` runs the graph on many records by `torch.vmap`, so that a row is computed from
its own record alone.

Refused, with a message that says what to write instead: decisions that depend on pixels, values taken out of tensors,
randomness, state that changes, batch norm in training mode, uninitialised memory, operators that are not PyTorch's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

Tensors = Sequence[torch.Tensor]
TRIED = 3  # public records on which a graph is tried
ROUNDING = 1e-5  # of the largest output: what should be zero may be so much
AGREEMENT = 1e-2  # relative, between a record alone and among others: a mistake shows, rounding does not

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
    traced.recompile()
    return traced


def per_record(graph: GraphModule, shared: int, records: int) -> Callable[..., Any]:
    """Return the graph as a function of `shared` arguments, the same for all, and `records` batches.

    Guarantee: each output row is computed from one record and what is shared: that is what `torch.vmap` does.
    """
    return torch.vmap(graph, in_dims=(None,) * shared + (0,) * records, randomness="error")


def try_out(graph: GraphModule, shared: Sequence[Any], records: Tensors, what: str = "this feature") -> list[Any]:
    """Run a graph on public records, together and one by one; return the rows of each output.

    Guarantee: an operator whose rule for `vmap` fails or mixes records is found here, before anything is charged.
    """
    try:
        together = tree_leaves(per_record(graph, len(shared), len(records))(*shared, *records))
        alone = [tree_leaves(graph(*shared, *(part[index] for part in records))) for index in range(len(records[0]))]
    except RuntimeError as error:
        raise ValueError(f"{what} cannot be computed record by record: {error}") from None
    largest = max(float(rows.abs().nan_to_num(0, 0, 0).max()) for rows in together)
    for rows, single in zip(together, zip(*alone, strict=True), strict=True):
        message = f"{what} uses an operator that mixes records under torch.vmap"
        same_rows(rows, torch.stack(single), message, ROUNDING * largest)
    return together


def same_rows(rows: torch.Tensor, others: torch.Tensor, message: str, rounding: float = 0.0) -> None:
    """Raise `ValueError` unless both are the same but for rounding."""
    if rows.shape != others.shape:
        raise ValueError(f"{message}: {tuple(others.shape)} in place of {tuple(rows.shape)}")
    rows, others = rows.double(), others.double()
    most = AGREEMENT * float(rows.abs().nan_to_num(0, 0, 0).max()) + rounding
    if not torch.allclose(rows, others, AGREEMENT, most, equal_nan=True):
        raise ValueError(message)


def public_records(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `TRIED` public images: fixed numbers (multiples of the golden ratio) in [-1, 1], no record."""
    count = TRIED * torch.Size(shape).numel()
    spread = torch.arange(1, count + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    return (spread * 2 - 1).float().reshape(TRIED, *shape).to(device)


def _check(graph: Graph, what: str) -> None:
    """Refuse operators that could carry something from one record or call to another.

    Guarantee: all that remains are PyTorch's own deterministic operators on the record, shared inputs and constants.
    """
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
            continue
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
            raise ValueError(f"{what} uses {target}, which leaves the graph; use PyTorch's own operators only")
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise ValueError(
                f"{what} draws random numbers ({target}); draw them before and pass them as constants, ask for numbers "
                "of each image's own (draws=), and put networks with dropout into eval mode"
            )
        made = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]
        if any(isinstance(side, torch.SymInt) for each in made for side in each.shape):
            raise ValueError(f"{what} uses {target}, whose outcome has no fixed shape: {DECISION}")
        if target._schema.name.startswith(("aten::empty", "aten::new_empty")) and not _filled(node):
            raise ValueError(f"{what} reads uninitialised memory ({target}); use zeros")
        _check_state(node, what)


def _check_state(node: Node, what: str) -> None:
    """Refuse writes into anything that outlives a call. Guarantee: a graph has no memory."""
    schema, target = node.target._schema, node.target  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    if given.get("training") is True and given.get("running_mean") is not None:
        raise ValueError(f"{what} has batch norm in training mode, which mixes images; call .eval(), or use group norm")
    for argument in schema.arguments:
        written = given.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(written, Node):
            root = _root(written)
            if root.op in ("placeholder", "get_attr"):
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
