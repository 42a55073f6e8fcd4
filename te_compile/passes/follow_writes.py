"""Let what reads a tensor after it was changed in place read the result of the change.

    scores.masked_fill_(mask, -1e9)                        a statement of its own: nobody takes its result,
    weights = F.softmax(scores, -1)                        though it is the very tensor that is read here

Both names are of one tensor. Where later passes walk from what is read to what made it, the change must not lie beside
the way: they would find the scores as they were before it.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import is_tensor, value_of, wrapped_kind
from te_compile.passes.written_tensors import written_by

_OTHER_RESULTS = {"out"}  # keywords of calls whose result is not their first operand


def _changed(node: Node) -> Node | None:
    """The tensor that ``node`` changes in place and returns, if nobody takes it from there."""
    if node.users or not is_tensor(node) or _OTHER_RESULTS & node.kwargs.keys() or not node.args:
        return None
    written, source = written_by(node), node.args[0]
    if written != [source] or not is_tensor(source) or wrapped_kind(source) or wrapped_kind(node):
        return None
    if source.op == "placeholder":  # a parameter or an input of the user's stays what it is known as
        return None
    before, after = value_of(source), value_of(node)
    same = isinstance(after, Tensor) and (before.dtype, before.shape) == (after.dtype, after.shape)
    return source if same and node.op == "call_method" else None


def follow_writes(graph: Graph) -> int:
    """Replace tensors by the results of in-place methods where these were dropped; returns how many."""
    count = 0
    for node in graph.nodes:
        if (source := _changed(node)) is None:
            continue
        later = [user for user in source.users if node < user]
        for user in later:
            user.replace_input_with(source, node)
        count += bool(later)
    return count
