"""Make a mask in one go where a model makes a tensor and changes it in place, as the next thing.

    torch.full((n, n), -inf).triu_(1)                        → torch.full((n, n), -inf).triu(1)
    torch.zeros_like(hidden).masked_fill_(hidden, -inf)      as torch.nn's attention adds a mask of booleans

Nobody sees the tensor as it was before. What is written to is no constant to later passes, which evaluate masks; and
the compiler makes a new tensor of each change anyway.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import is_tensor, name_called, wrapped_kind
from te_compile.passes.function_transforms import transforms_around

_MAKERS = {
    "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "triu", "tril", "masked_fill",
}  # fmt: skip
_CHANGES = {"triu_", "tril_", "masked_fill_"}  # whose results have the dtype and the size of what they change


def make_apart(graph: Graph) -> int:
    """Let what changes a new tensor in place make another one; returns how many."""
    transformed, count = transforms_around(graph), 0
    for node in graph.nodes:
        if node.op != "call_method" or node in transformed or not _is_of_a_new_tensor(node):
            continue
        if node.target in _CHANGES:
            node.target = str(node.target).removesuffix("_")
            count += 1
        elif node.target == "fill_" and len(node.args) == 2 and isinstance(node.args[1], (int, float)):
            node.op, node.target = "call_function", torch.full_like
            count += 1
    return count


def _is_of_a_new_tensor(node: Node) -> bool:
    """Does ``node`` change a tensor that was made for it alone?"""
    made = node.args[0] if node.args else None
    if not isinstance(made, Node) or not is_tensor(made) or wrapped_kind(made) or "out" in made.kwargs:
        return False
    return name_called(made) in _MAKERS and list(made.users) == [node] and node.all_input_nodes.count(made) == 1
