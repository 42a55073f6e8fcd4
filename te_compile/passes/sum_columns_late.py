"""Add up the columns' sums of a whole backward pass at once.

The gradient of a bias is a sum over rows, as are those of a norm's weight and bias. Kernels that read or write the
matrix sum it on their way, and leave partial rows; adding these up is a launch of its own, small and often: 67 of them
in a training step of eight BERT layers. Nobody but the caller waits for their results, so they wait for each other:

    q, …, db = te.fused_quantize(…)           q, …, p = te.fused_quantize(…, partial_sums)
    dx, dw, none = te.norm_backward(…)        dx, r, none = te.norm_backward(…, partial_sums)
                                              db, dw = te.column_sums([p, r])

It takes what kernels sum and the graph returns as it is, or as a view, and as many sums as one launch does; the partial
rows of these are memory until then, which is bounded.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from te_compile.ops.column_sums import AT_ONCE, COLUMN_SUMS, text_of
from te_compile.ops.fused_quantize import FIRST_EMITTED
from te_compile.ops.partial_sums import ROWS
from te_compile.ops.pointwise import Spec, extent
from te_compile.ops.triton_implementations import TRITON
from te_compile.passes.arguments import arguments_of, is_te, refresh_value, result, set_arguments, values_of
from te_compile.passes.new_nodes import call_like, same_phase
from te_compile.passes.pointwise_nodes import VIEWS

KERNELS = {TRITON}
"""The implementations that sum in part."""

MOST_BYTES = 32 << 20  # of partial rows that wait


@dataclass(frozen=True)
class _Source:
    """An operator, the elements of the matrix that it sums, and those of its results that are sums: their nodes, each
    with its place among the results."""

    node: Node
    elements: int
    sums: list[tuple[int, Node]]


def sum_columns_late(graph: Graph) -> int:
    """Give the sums of several operators to one; returns how many sums."""
    summed = 0
    waiting: list[_Source] = []
    for node in list(graph.nodes):
        source = _source(node)
        if source is None:
            continue
        if waiting and not (_belong_together(waiting[0], source) and _fit([*waiting, source])):
            summed += _add_up_at_once(waiting)
            waiting = []
        waiting.append(source)
    return summed + _add_up_at_once(waiting)


def _source(node: Node) -> _Source | None:
    """``node`` as one, if it is an operator whose sums a kernel has in part and can all wait."""
    if not (is_te(node, "fused_quantize") or is_te(node, "norm_backward")):
        return None
    given = arguments_of(node)
    if "spec" in given:
        matrix = extent(Spec.parse(given["spec"]), values_of(given["inputs"]))
    else:
        matrix = given["x"].meta["val"].shape
    if given["implementation"] not in KERNELS or not all(isinstance(size, int) and size > 0 for size in matrix):
        return None
    sums = [(place, each) for place in _places_of_sums(given) for each in result(node, place)]
    return _Source(node, math.prod(matrix), sums) if sums and all(_only_leaves(each) for _, each in sums) else None


def _places_of_sums(given: dict[str, Any]) -> list[int]:
    """Where sums are among the results of an operator that is given this."""
    if "spec" not in given:
        return [place for place, wanted in ((1, given["wants_dw"]), (2, given["bias_dtype"] is not None)) if wanted]
    spec = Spec.parse(given["spec"])
    first = FIRST_EMITTED + len(spec.emitted)
    return list(range(first, first + len(spec.sums)))


def _only_leaves(node: Node) -> bool:
    """Does ``node`` go nowhere but out of the graph, as it is or as a view?"""
    return all(user.op == "output" or (user.target in VIEWS and _only_leaves(user)) for user in node.users)


def _belong_together(one: _Source, other: _Source) -> bool:
    """Are both of one phase and on one device?"""
    devices = {source.sums[0][1].meta["val"].device for source in (one, other)}
    return same_phase(one.node, other.node) and len(devices) == 1


def _fit(sources: list[_Source]) -> bool:
    """Can the sums of these wait together?"""
    partial = sum(4 * len(source.sums) * source.elements // ROWS for source in sources)
    return sum(len(source.sums) for source in sources) <= AT_ONCE and partial <= MOST_BYTES


def _add_up_at_once(sources: list[_Source]) -> int:
    if len(sources) < 2:
        return 0
    sums = [each for source in sources for _, each in source.sums]
    dtypes = text_of([each.meta["val"].dtype for each in sums])
    for source in sources:
        _leave_in_part(source)
    last, implementation = max(sums), arguments_of(sources[0].node)["implementation"]
    with last.graph.inserting_after(last):
        totals = call_like(COLUMN_SUMS, (sums, dtypes, implementation), last)
    totals.meta["eager_input_vals"] = values_of((totals.args, totals.kwargs))  # which Inductor asks for
    after = totals
    for index, old in enumerate(sums):
        with last.graph.inserting_after(after):
            after = call_like(operator.getitem, (totals, index), old)
        for user in [user for user in old.users if user is not totals]:
            user.replace_input_with(old, after)
    for each in list(totals.users):
        _move_readers(each, after)
    return len(sums)


def _leave_in_part(source: _Source) -> None:
    set_arguments(source.node, partial_sums=True)
    refresh_value(source.node)
    for place, each in source.sums:
        each.meta["val"] = source.node.meta["val"][place]


def _move_readers(node: Node, after: Node) -> None:
    """Move the views of ``node`` behind ``after``, with views of theirs behind them."""
    for user in list(node.users):
        if user.op != "output":
            after.append(user)
            _move_readers(user, user)
