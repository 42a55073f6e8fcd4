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

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.ops.cross_entropy import CROSS_ENTROPY_BACKWARD
from te_compile.ops.pointwise import DTYPES
from te_compile.passes.arguments import arguments_of, set_arguments
from te_compile.passes.closures import as_matrix
from te_compile.passes.new_nodes import reshaped, same_phase
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, aten, tensor_arguments, value_of
from te_compile.passes.sizes import all_same, same


def fuse_loss_backward(graph: Graph) -> int:
    """Make sums of the gradient of a loss and another one part of the loss's backward; returns how many."""
    return sum(map(_fuse, graph.find_nodes(op="call_function", target=CROSS_ENTROPY_BACKWARD)))


def _fuse(backward: Node) -> bool:
    found = _way_to_a_sum(backward)
    if found is None or arguments_of(backward)["addend"] is not None:
        return False
    way, total = found
    addend = _added_to(way[-1], total)
    if addend is None or not same_phase(total, backward):
        return False
    columns = _tensor_of(backward).shape[1]
    matrix = as_matrix(_tensor_of(addend), columns)
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


def _tensor_of(node: Node) -> Tensor:
    """The value of a node that is known to hold a tensor."""
    value = value_of(node)
    assert value is not None
    return value


def _way_to_a_sum(backward: Node) -> tuple[list[Node], Node] | None:
    """The gradient of the loss and the views of it up to the one that a sum reads, and that sum; None if anything else
    reads one of them."""
    way = [backward]
    for node in way:
        (reader, *others) = node.users or [None]
        if reader is None or others:
            return None
        if reader.target is aten.add.Tensor:
            return way, reader
        if reader.target in VIEWS and tensor_arguments(reader) == [node]:
            way.append(reader)
    return None


def _added_to(gradient: Node, total: Node) -> Node | None:
    """What ``total`` adds to ``gradient``, before a cast to its dtype; None if it is more than a sum of two alike."""
    arguments = arguments_of(total)
    others = [each for each in (arguments["self"], arguments["other"]) if each is not gradient]
    if arguments["alpha"] != 1 or len(others) != 1 or not isinstance(others[0], Node):
        return None
    other = others[0]
    values = [value_of(node) for node in (gradient, other, total)]
    if not _are_alike(values):
        return None
    source = tensor_arguments(other)[0] if other.target in CASTS else None
    is_read_as_it_was = source is not None and len(other.users) == 1 and same_phase(other, total)
    return source if is_read_as_it_was and _is_plain_cast(source, other) else other


def _are_alike(values: list[Tensor | None]) -> bool:
    first = values[0]
    return first is not None and all(
        value is not None
        and (value.dtype, value.device, value.dim()) == (first.dtype, first.device, first.dim())
        and all_same(value.shape, first.shape)
        for value in values
    )


def _is_plain_cast(source: Node | None, cast: Node) -> bool:
    """Does ``cast`` change nothing but the dtype, from one that the backward reads?"""
    before, after = value_of(source), value_of(cast)
    if before is None or after is None or before.dtype not in DTYPES.values() or not before.is_floating_point():
        return False
    return before.device == after.device
