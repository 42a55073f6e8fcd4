"""Give the backward of a loss the other gradient of its logits.

Models return their logits beside the loss, so AOTAutograd takes a gradient for them, which is a tensor of zeros where
only the loss is trained on, and adds it to what comes from the loss. That sum would read and write [tokens, vocabulary]
once more; the kernel that computes the one addend adds the other on the way:

    add(tangent, view(te.cross_entropy_backward(...)))   becomes   view(te.cross_entropy_backward(..., addend=tangent))

Between the two stand only views, for the loss works on [N, V]. Where the model returns its logits in float32, their
gradient is cast before it is added; the kernel reads it as it was before. A sum is left alone if something else reads
the gradient of the loss too, if it is no plain sum of two equals (alpha, another dtype, a broadcast), or if the other
gradient does not lie in memory as a matrix of rows.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.ops.cross_entropy import CROSS_ENTROPY_BACKWARD
from te_compile.passes.arguments import arguments_of, set_arguments
from te_compile.passes.index_space import as_matrix
from te_compile.passes.new_nodes import reshaped, same_phase
from te_compile.passes.pointwise_nodes import CASTS, tensor_arguments, value_of
from te_compile.passes.sizes import same
from te_compile.passes.sums import added_to, way_to_a_sum

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fuse_loss_backward(graph: Graph) -> int:
    """Make sums of the gradient of a loss and another one part of the loss's backward; returns how many."""
    return sum(map(_fuse, graph.find_nodes(op="call_function", target=CROSS_ENTROPY_BACKWARD)))


def _fuse(backward: Node) -> bool:
    found, columns = way_to_a_sum(backward), backward.meta["val"].shape[1]
    if found is None or arguments_of(backward)["addend"] is not None:
        return False
    way, total = found
    other = added_to(way[-1], total)
    if other is None or not same_phase(total, backward):
        return False
    addend = _before_cast(other, total)
    matrix = as_matrix(addend.meta["val"], columns)
    # A matrix whose rows do not run element by element would be copied first.
    if matrix is None or not same(matrix.stride(1), 1):
        return False
    if not addend < backward:  # down to where both are there: until the sum nobody reads what the loss has
        for node in way:
            total.prepend(node)
    with backward.graph.inserting_before(backward):
        set_arguments(backward, addend=reshaped(addend, [-1, columns], total))
    total.replace_all_uses_with(way[-1])
    backward.graph.erase_node(total)
    return True


def _before_cast(node: Node, total: Node) -> Node:
    """``node``, or what it is a cast of for ``total`` alone."""
    source = tensor_arguments(node)[0] if node.target in CASTS else node
    before, after = value_of(source), value_of(node)
    if before is None or after is None or before.dtype not in _DTYPES or before.device != after.device:
        return node
    return source if list(node.users) == [total] and same_phase(node, total) else node
