"""Quantise a weight right before the product that reads it.

Where products quantise their weights themselves (``cache_weights=False``), tracing leaves those quantizes where
autograd came to them, before that of the other operand: there the copy of a weight would lie beside all that a producer
reads and writes. Nothing holds it there, for it is made of inputs of the graph alone.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from te_compile.passes.arguments import is_te
from te_compile.passes.memory import is_tangent
from te_compile.passes.remake_transposed import matrices_read_by


def quantize_late(graph: Graph) -> int:
    """Move each quantize of a graph's inputs to its first reader; returns how many."""
    moved = 0
    quantizes = [node for node in graph.nodes if is_te(node, "quantize") or is_te(node, "fused_quantize")]
    for node in reversed(quantizes):  # the last one to move stands next to the product: that of the weight
        items = sorted(node.users)
        readers = [reader for item in items for reader in item.users]
        if not readers or not all(map(_is_input, matrices_read_by(node))):
            continue
        first = min(readers)
        if all(item.target is operator.getitem for item in items) and items[-1].next is not first:
            for each in (node, *items):
                first.prepend(each)
            moved += 1
    return moved


def _is_input(node: Node) -> bool:
    """Is ``node`` an input of the graph, or another form of one: a view, a cast, padded?"""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and not is_tangent(node)
