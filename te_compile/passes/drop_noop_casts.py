"""Drop casts that change nothing.

Models keep ``x.to(torch.float32)`` around their norms whatever their own dtype. In a float32 model the node does
nothing, but it adds a user to ``x`` and stands between a norm and what follows it, so later patterns would not match.
Eager PyTorch returns ``x`` itself from such a cast, so the replacement is exact, aliasing included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import value_of

CAST_METHODS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
_REAL_COPIES = ("copy", "memory_format")  # arguments of ``to`` that make it more than a cast


def is_cast(node: Node) -> bool:
    """Does ``node`` convert a tensor to a dtype, or to a device, and do nothing else?"""
    if node.op != "call_method" or node.target not in CAST_METHODS or not isinstance(value_of(node), Tensor):
        return False
    return not any(node.kwargs.get(name) for name in _REAL_COPIES) and not any(
        flag is True or isinstance(flag, torch.memory_format) for flag in node.args[1:]
    )


def changes_nothing(cast: Node) -> bool:
    """Is the result of ``cast`` the very tensor that it was given?"""
    source, result = value_of(cast.all_input_nodes[0]), value_of(cast)
    return isinstance(source, Tensor) and source.dtype == result.dtype and source.device == result.device


def drop_noop_casts(graph: Graph) -> int:
    """Replace each cast to the dtype and device that its input has already by that input; returns how many."""
    casts = [node for node in graph.nodes if is_cast(node) and changes_nothing(node)]
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        graph.erase_node(cast)
    return len(casts)
