"""Compute what is quantised where it is quantised.

Before a ``te::quantize`` stand the pointwise nodes of an activation, a gate, a dropout, a residual sum or the backward
of one of these. Left alone, Inductor writes their result and the quantize reads it back. This pass puts the closure of
those nodes (te_compile.passes.closures says which) and the quantize into one ``te::fused_quantize``, whose spec is the
text of what they compute.

Two more things come from the same pass over the data. If someone else reads the value in high precision, and could not
as cheaply compute it again, the producer emits it too. Sums over rows, the gradients of biases, become column sums of
the producer; for them alone even a quantize with nothing to compute before it becomes one, because it saves a read.

It runs on the joint graph, forward and backward alike: a backward producer computes forward values again from leaves
that are saved for it, rather than having them saved.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from te_compile.ops.fused_quantize import FIRST_EMITTED, FUSED_QUANTIZE
from te_compile.ops.pointwise import Place
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.closures import Closure, find_closure
from te_compile.passes.index_space import IndexSpace, Item
from te_compile.passes.new_nodes import call_like, in_shape_of, reshaped
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, is_pointwise, tensor_arguments, value_of
from te_compile.passes.producer_inputs import erase_dead, input_node
from te_compile.passes.producer_readers import Readers, readers_of
from te_compile.passes.row_sums import constant_shape
from te_compile.passes.sizes import all_same

aten = torch.ops.aten


def fuse_producers(graph: Graph) -> int:
    """Replace each quantize that has something to compute by a producer; returns how many."""
    spaces: dict[tuple[str, int, torch.device], IndexSpace] = {}
    fused = 0
    for quantize in graph.find_nodes(op="call_function", target=QUANTIZE):
        x = value_of(quantize.args[0])
        if x is None or not isinstance(x.shape[1], int):
            continue  # the spec's views need the number of columns
        rows, columns = x.shape
        space = spaces.setdefault((str(rows), columns, x.device), IndexSpace(rows, columns, x.device))
        readers = readers_of(quantize, space)
        closure = _closure(quantize, readers, space)
        if closure is not None:
            rewired = _replace(quantize, closure, readers)
            fused += 1
            for known in spaces.values() if rewired else ():
                known.forget(rewired)
    return fused


def _closure(quantize: Node, readers: Readers, space: IndexSpace) -> Closure | None:
    """What the producer of ``quantize`` computes; z is given in high precision if its shape can be given back to it."""
    emitted, sums = _is_emitted(readers, space), list(readers.sums)
    closure = find_closure(readers.root, space, quantize, emitted, sums)
    if emitted and closure is not None and not _has_a_known_shape(readers.root, closure):
        closure = find_closure(readers.root, space, quantize, False, sums)
    return closure


def _has_a_known_shape(root: Node, closure: Closure) -> bool:
    return constant_shape(root.meta["val"]) is not None or _of_its_shape(root, closure) is not None


def _in_its_shape(result: Node, node: Node, closure: Closure) -> Node:
    """``result``, which is a matrix or a row, in the shape of ``node``, whose place it takes."""
    shape = constant_shape(node.meta["val"])
    alike = _of_its_shape(node, closure) if shape is None else None
    return reshaped(result, shape, node) if alike is None else in_shape_of(result, alike, node)


def _of_its_shape(root: Node, closure: Closure) -> Node | None:
    """What ``closure`` reads, or a view of that, if it has the shape of ``root`` and is there before it."""
    shape = root.meta["val"].shape
    for leaf in closure.leaves:
        for node in (leaf.node, *(user for user in leaf.node.users if user.target in VIEWS and user < root)):
            value = value_of(node)
            if value is not None and value.dim() == len(shape) and all_same(value.shape, shape):
                return node
    return None


def _is_emitted(readers: Readers, space: IndexSpace) -> bool:
    """Should the producer write z in high precision, because reading that is cheaper than computing it again?"""
    value, item = value_of(readers.root), Item(readers.root, Place.FULL)
    if not readers.others or space.operands(item) is None or value is None or not value.is_contiguous():
        return False
    again = space.cost(space.reads(item)) <= space.cost(frozenset({item}))
    return not (again and all(is_pointwise(other) or other.target is QUANTIZE for other in readers.others))


def _replace(quantize: Node, closure: Closure, readers: Readers) -> set[Node]:
    """Put the producer of ``closure`` in the place of ``quantize``, of the sums, and of z if it is emitted.

    Returns the nodes that read other nodes than before.
    """
    graph, (_, scale, *rest) = quantize.graph, quantize.args
    emitted = bool(closure.spec.emitted)
    with graph.inserting_before(min([quantize, *readers.sums, *(readers.root.users if emitted else ())])):
        inputs = [input_node(leaf, closure.columns, quantize) for leaf in closure.leaves]
        fused = call_like(FUSED_QUANTIZE, (inputs, scale, closure.spec.text(), *rest), quantize)
        results = range(FIRST_EMITTED, FIRST_EMITTED + emitted + len(readers.sums))
        rewired: set[Node] = set()
        for node, index in zip([readers.root] * emitted + [*readers.sums], results, strict=True):
            rewired |= set(node.users)
            result = call_like(operator.getitem, (fused, index), node)
            node.replace_all_uses_with(_in_its_shape(result, node, closure))
    quantize.replace_all_uses_with(fused)
    behind_casts = [tensor_arguments(total)[0] for total in readers.sums if total.target in CASTS]
    for node in (quantize, *readers.sums, *behind_casts):
        graph.erase_node(node)
    erase_dead({*readers.views, readers.root, *(item.node for item in closure.joined)})
    return rewired
