"""Take away operands of which only the shape or the dtype is read.

``mask.expand_as(scores)`` and ``softmax(scores.float()).type_as(scores)`` read no number of ``scores``, and yet they
are users of it. Later passes ask who reads a tensor: attention that a model spells out would look like one whose scores
somebody wants to see.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import is_tensor, value_of, wrapped_kind

_OF_A_SHAPE = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}


def _without_operand(node: Node) -> tuple[str, tuple[Any, ...]] | None:
    """A method that does what ``node`` does, and its arguments, without the tensor that is only looked at."""
    if node.op != "call_method" or len(node.args) != 2 or node.kwargs or not all(map(is_tensor, node.args)):
        return None
    if any(wrapped_kind(each) for each in (*node.args, node)) or not isinstance(value_of(node), Tensor):
        return None
    source, result = value_of(node.args[0]), value_of(node)
    if node.target == "type_as" and result.device == source.device:
        return "to", (result.dtype,)
    sizes = tuple(result.shape)
    if node.target in _OF_A_SHAPE and all(isinstance(size, int) for size in sizes):
        return _OF_A_SHAPE[str(node.target)], sizes
    return None


def drop_unread_operands(graph: Graph) -> int:
    """Give shapes and dtypes as such to what takes them from a tensor; returns how many."""
    count = 0
    for node in graph.nodes:
        if (call := _without_operand(node)) is not None:
            node.target, node.args = call[0], (node.args[0], *call[1])
            count += 1
    return count
