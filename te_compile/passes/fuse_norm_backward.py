"""Give each norm's backward the gradient of the residual stream, which is added to its dx.

Where x goes to a norm and around it, autograd adds what comes back along both ways. The sum reads dx, which was just
written; a kernel that computes dx adds on the way. Between the two stand only views, for the norm works on [M, K].

It comes after open_norms: what is left then is run by kernels, and a sum after operators that were opened is
Inductor's. A sum is left alone if something else reads dx too, if it is no plain sum of two equals (alpha, another
dtype, a broadcast), or if the residual's gradient does not lie in memory as a matrix of rows.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of, is_te, result, set_arguments
from te_compile.passes.index_space import as_matrix
from te_compile.passes.new_nodes import reshaped, same_phase
from te_compile.passes.pointwise_nodes import value_of
from te_compile.passes.sizes import same
from te_compile.passes.sums import added_to, way_to_a_sum


def _make_available(norm: Node, residual: Node, way: list[Node], total: Node) -> bool:
    """Let ``norm`` stand after ``residual``: where it is, or moved down to ``total``. False if a reader of dw or db
    comes before that."""
    if residual < norm:
        return True
    if any(reader < total for item in (*result(norm, 1), *result(norm, 2)) for reader in item.users):
        return False
    for node in (norm, *result(norm, 1), *result(norm, 2), *way):
        total.prepend(node)
    return True


def _fuse(norm: Node) -> bool:
    items = result(norm, 0)
    found = way_to_a_sum(items[0]) if len(items) == 1 else None
    if found is None or arguments_of(norm)["residual"] is not None:
        return False
    way, total = found
    residual = added_to(way[-1], total)
    dx = value_of(way[0])
    if residual is None or dx is None or not same_phase(total, norm):
        return False
    given = value_of(residual)
    matrix = None if given is None else as_matrix(given, dx.shape[1])
    # A matrix whose rows do not run element by element would be copied first.
    if matrix is None or not same(matrix.stride(1), 1):
        return False
    if not _make_available(norm, residual, way, total):
        return False
    with norm.graph.inserting_before(norm):
        set_arguments(norm, residual=reshaped(residual, [-1, dx.shape[1]], total))
    total.replace_all_uses_with(way[-1])
    norm.graph.erase_node(total)
    return True


def fuse_norm_backward(graph: Graph) -> int:
    """Make sums of dx of a ``te::norm_backward`` and another gradient part of it; returns how many."""
    return sum(_fuse(node) for node in list(graph.nodes) if is_te(node, "norm_backward"))
