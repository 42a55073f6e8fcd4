"""Have the loss's backward sum the gradient of the logits, which is what the bias of the head gets.

That sum reads [tokens, vocabulary] once more, for a row of numbers; the kernel that writes the gradient adds up what it
writes on the way:

    dx = te.cross_entropy_backward(...); sum(view(dx), [0])

becomes

    dx, sums = te.cross_entropy_backward_with_sums(..., dtype of the sum)

Between the two stand only views and casts to float32, for the kernel sums in fp32 whatever the gradient is stored as.
It comes after fuse_loss_backward, whose sum of two gradients is what the bias's gradient sums then, and after
fuse_producers: in a head that runs in FP8 the quantize of the gradient reads it anyway, and sums it. A sum is left
alone if it is over other dimensions, if something is computed before it, or if no kernel would run the operator.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.ops.cross_entropy import (
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_BACKWARD_DEFERRED,
    CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
    CROSS_ENTROPY_BACKWARD_WITH_SUMS,
)
from te_compile.passes.arguments import arguments_of, values_of
from te_compile.passes.index_space import IndexSpace
from te_compile.passes.new_nodes import call_like, reshaped, same_phase
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, tensor_arguments, value_of
from te_compile.passes.row_sums import constant_shape, is_row_sum

_WITH_SUMS = {
    CROSS_ENTROPY_BACKWARD: CROSS_ENTROPY_BACKWARD_WITH_SUMS,
    CROSS_ENTROPY_BACKWARD_DEFERRED: CROSS_ENTROPY_BACKWARD_DEFERRED_WITH_SUMS,
}
_DECIDED_LATER = ("overwrite", "implementation")


def sum_loss_gradients(graph: Graph) -> int:
    """Make sums over the rows of a loss's gradient results of the loss's backward; returns how many."""
    return sum(_fuse(node) for plain in _WITH_SUMS for node in graph.find_nodes(op="call_function", target=plain))


def _fuse(backward: Node) -> int:
    sums = _sums_of(backward)
    if not sums:
        return 0
    arguments = {**arguments_of(backward), "sums_dtype": sums[0].meta["val"].dtype}
    if not _is_run_by_a_kernel(backward, arguments):
        return 0
    graph, target = backward.graph, _WITH_SUMS[backward.target]
    names = [argument.name for argument in target._schema.arguments]
    with graph.inserting_before(backward):
        both = call_like(target, tuple(arguments[name] for name in names if name not in _DECIDED_LATER), backward)
        gradient, row = (call_like(operator.getitem, (both, index), backward) for index in range(2))
    backward.replace_all_uses_with(gradient)
    graph.erase_node(backward)
    for total in sums:
        _replace(total, row)
    return len(sums)


def _sums_of(backward: Node) -> list[Node]:
    """The sums over exactly the rows of what ``backward`` writes, in the graph's order; of one dtype, the first's."""
    rows, columns = backward.meta["val"].shape
    if not isinstance(columns, int):
        return []
    space = IndexSpace(rows, columns, backward.meta["val"].device)
    family, found = [backward], []
    for member in family:
        for user in member.users:
            if not same_phase(user, backward):
                continue
            if _shows(user, member):
                family.append(user)
            elif is_row_sum(user, space) and user.meta["val"].dtype in (torch.float32, member.meta["val"].dtype):
                found.append(user)  # with a dtype narrower than what it reads, it may round before it adds up
    found.sort()
    return [total for total in found if total.meta["val"].dtype == found[0].meta["val"].dtype]


def _shows(node: Node, source: Node) -> bool:
    """Has ``node`` the numbers of ``source``, in another shape or in float32?"""
    if node.target in CASTS:
        before, after = value_of(source), value_of(node)
        if before is None or after is None:
            return False
        return after.dtype == torch.float32 and before.device == after.device
    return node.target in VIEWS and tensor_arguments(node) == [source]


def _is_run_by_a_kernel(backward: Node, arguments: dict[str, object]) -> bool:
    """Does the registry have something better than the reference, which would read the gradient for its sums?"""
    name = _WITH_SUMS[backward.target]._schema.name.removeprefix("te::")
    return registry.are_run_by_kernels([name], backward.meta["val"].device, values_of(arguments))


def _replace(total: Node, row: Node) -> None:
    """Put ``row``, in its shape, in the place of ``total``, and take away what only ``total`` read."""
    with total.graph.inserting_before(total):
        total.replace_all_uses_with(reshaped(row, constant_shape(total.meta["val"]), total))
    node = total
    while not node.users and (node is total or node.target in VIEWS | CASTS):
        source = node.all_input_nodes[0]
        node.graph.erase_node(node)
        node = source
