"""Compute equal values once: views, scale selections and quantizes that read the same thing.

The linears of q, k and v each bring a quantize of one shared input, padded first if its size is odd. Equal nodes are
merged, so that the input is quantised once and one GEMM operand serves all. Only views and te:: producers are looked
at: the rest is Inductor's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.passes.arguments import is_te

aten = torch.ops.aten
_MERGED = {
    operator.getitem,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.detach.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
}
_MERGED_TE = {"quantize", "norm_forward"}


def _is_padded_operand(node: Node) -> bool:
    """Does ``node`` pad what is then quantised, and nothing else reads it?"""
    return node.target is aten.constant_pad_nd.default and all(is_te(user, "quantize") for user in node.users)


def _mergeable(node: Node) -> bool:
    if _is_padded_operand(node):
        return True
    name = getattr(node.target, "_schema", None)
    return node.target in _MERGED or (name is not None and name.name in {f"te::{n}" for n in _MERGED_TE})


def _key(node: Node) -> Any:
    """Equal keys, equal values. Recomputation regions are kept apart: a merge would tie one to the other."""

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(plain(v) for v in value)
        if isinstance(value, dict):
            return tuple(sorted((k, plain(v)) for k, v in value.items()))
        # Booleans, integers and floats compare equal across types; a graph must tell them apart.
        return value if isinstance(value, Node) else (type(value), str(value))

    region = (str(node.meta.get("recompute")), node.meta.get("ac_graph_id"))
    return node.target, plain(node.args), plain(node.kwargs), region


def share_inputs(graph: Graph) -> int:
    """Merge equal views and quantizes; returns the number of quantizes saved."""
    first: dict[Any, Node] = {}
    saved = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _mergeable(node):
            continue
        same = first.setdefault(_key(node), node)
        if same is not node:
            saved += node.target not in _MERGED and not _is_padded_operand(node)
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return saved
