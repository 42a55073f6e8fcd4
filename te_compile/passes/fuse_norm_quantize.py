"""Merge each norm with the quantize of its result into one ``te::norm_quantize``.

Between the two stand only views: the norm works on [M, K] and returns [batch, sequence, K], the linear flattens it.
Apart they write y and read it back; merged, a pre-norm transformer never has y in memory. Where y has other readers (a
residual in post-norm models, a second linear with another scale, a linear in high precision) the merged operator
returns it as well.

The new node stands where the norm stood, so what reads y, mean or rstd needs no move; the selection of the scale, which
lowering put before the linear, moves up instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.ops.norm_quantize import NORM_QUANTIZE
from te_compile.passes.arguments import arguments_of, is_te, refresh_value, result, set_arguments

aten = torch.ops.aten
_SAME_ROWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default,
}  # fmt: skip
_SELECTIONS = _SAME_ROWS | {
    aten.select.int, aten.slice.Tensor, aten.squeeze.dims, aten.squeeze.dim, aten.unbind.int, operator.getitem,
}  # fmt: skip
# Where norm_forward's results are among norm_quantize's, then quantize's.
_NORM_RESULTS = {0: 0, 1: 5, 2: 6}
_QUANTIZE_RESULTS = {0: 1, 1: 2, 2: 3, 3: 4}


def _views_of(norm: Node) -> list[Node]:
    """Every node that holds y of ``norm``, as it is or in another shape, sources before their views."""
    found = result(norm, 0)
    for node in found:
        views = (user for user in node.users if user.target in _SAME_ROWS or _is_whole_slice(user))
        found.extend(view for view in views if view.args[0] is node)
    return found


def _is_whole_slice(node: Node) -> bool:
    """Is ``node`` the no-op ``x[:, 0:, :]``?"""
    if node.target is not aten.slice.Tensor:
        return False
    source = node.args[0]
    return isinstance(source, Node) and node.meta["val"].shape == source.meta["val"].shape


def _region(node: Node) -> tuple[Any, Any]:
    return node.meta.get("recompute"), node.meta.get("ac_graph_id")


def _quantizes(norm: Node) -> list[Node]:
    """The quantizes of y as [M, K] that agree with the first of them in scale, dtype and rule, in graph order."""
    columns = norm.meta["val"][0].shape[-1]
    readers = {
        user: arguments_of(user)
        for view in _views_of(norm)
        for user in view.users
        if is_te(user, "quantize") and view.meta["val"].shape[-1] == columns and _region(user) == _region(norm)
    }
    ordered = sorted(readers)
    same = ("scale", "dtype", "rule")
    return [node for node in ordered if all(readers[node][name] == readers[ordered[0]][name] for name in same)]


def _move_up(node: Node | None, norm: Node) -> bool:
    """Make ``node`` available before ``norm``, moving selections only; False if that is not possible."""
    if node is None or node < norm:
        return True
    if node.target not in _SELECTIONS or node is norm:
        return False
    if not all(_move_up(source, norm) for source in node.all_input_nodes):
        return False
    norm.prepend(node)
    return True


def _take_over(old: Node, merged: Node, indices: dict[int, int]) -> None:
    """Let the results of ``old`` be those of ``merged`` at the given indices."""
    moves = [(item, new) for index, new in indices.items() for item in result(old, index)]
    for item, new in moves:
        item.args = (merged, new)


def _merge(graph: Graph, norm: Node, quantizes: list[Node]) -> None:
    of_norm, asked = arguments_of(norm), [arguments_of(node) for node in quantizes]
    views = _views_of(norm)
    with graph.inserting_before(norm):
        args = (
            *(of_norm[name] for name in ("x", "weight", "bias", "eps", "kind")),
            *(asked[0][name] for name in ("scale", "dtype")),
            *(any(arguments[name] for arguments in asked) for name in ("rowwise", "columnwise")),
            False,
            asked[0]["rule"],
        )
        merged = graph.create_node("call_function", NORM_QUANTIZE, args, name="norm_quantize")
    merged.meta = {key: value for key, value in norm.meta.items() if key != "val"}
    _take_over(norm, merged, _NORM_RESULTS)
    for node in quantizes:
        _take_over(node, merged, _QUANTIZE_RESULTS)
    for node in [*quantizes, *reversed(views), norm]:
        if not node.users:
            graph.erase_node(node)
    set_arguments(merged, emit=bool(result(merged, 0)))
    refresh_value(merged)


def fuse_norm_quantize(graph: Graph) -> int:
    """Replace each ``te::norm_forward`` whose y is quantised by one ``te::norm_quantize``; returns how many."""
    count = 0
    for norm in [node for node in graph.nodes if is_te(node, "norm_forward")]:
        quantizes = _quantizes(norm)
        if quantizes and _move_up(arguments_of(quantizes[0])["scale"], norm):
            _merge(graph, norm, quantizes)
            count += 1
    return count
