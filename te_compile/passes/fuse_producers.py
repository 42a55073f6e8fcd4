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
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.ops.fused_quantize import FIRST_EMITTED, FUSED_QUANTIZE
from te_compile.ops.pointwise import Place
from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.closures import Closure, Leaf, find_closure
from te_compile.passes.column_shifts import is_move
from te_compile.passes.index_space import IndexSpace, Item, behind_views
from te_compile.passes.new_nodes import call_like, in_shape_of, reshaped, same_phase
from te_compile.passes.parts import place_of_size
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, is_pointwise, tensor_arguments, value_of
from te_compile.passes.row_sums import constant_shape, is_row_sum
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
        readers = _readers_of(quantize, space)
        closure = _closure(quantize, readers, space)
        if closure is not None:
            rewired = _replace(quantize, closure, readers)
            fused += 1
            for known in spaces.values() if rewired else ():
                known.forget(rewired)
    return fused


@dataclass(frozen=True)
class Readers:
    """Who reads z beside the quantize: ``root`` computes it, ``views`` show it, ``sums`` add up its rows."""

    root: Node
    views: tuple[Node, ...]
    sums: tuple[Node, ...]
    others: tuple[Node, ...]


def _readers_of(quantize: Node, space: IndexSpace) -> Readers:
    """Everyone who reads what ``quantize`` reads, as far as its producer may serve them."""
    root = behind_views(quantize.args[0])
    family, sums, others = [root], [], []
    for member in family:
        for user in member.users:
            if user.target in VIEWS and tensor_arguments(user) == [member]:
                family.append(user)
            elif is_row_sum(user, space) and same_phase(user, quantize):
                sums.append(_as_wanted(user))
            elif user is not quantize and user.target is not aten.sym_size.int:  # who asks for a size reads no number
                others.append(user)
    scale = quantize.args[1]
    late = isinstance(scale, Node) and any(not scale < reader for reader in (*family[1:], *sums, *others))
    if late or not same_phase(root, quantize):
        sums, others = [], []
    return Readers(root, tuple(family[1:]), tuple(sorted(sums)), tuple(others))


def _as_wanted(total: Node) -> Node:
    """The sum, or its cast to the dtype of a bias if that is all that is wanted of it."""
    users = list(total.users)
    if len(users) == 1 and users[0].target in CASTS and value_of(users[0]) is not None and same_phase(users[0], total):
        wanted = users[0].meta["val"].dtype
        return users[0] if wanted in (torch.bfloat16, torch.float16) else total
    return total


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
        inputs = [_input_node(leaf, closure.columns, quantize) for leaf in closure.leaves]
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
    _erase_dead({*readers.views, readers.root, *(item.node for item in closure.joined)})
    return rewired


def _erase_dead(nodes: set[Node]) -> None:
    """Erase those of ``nodes`` that nobody reads any more, and what was made for them alone."""
    while nodes:
        node = max(nodes)
        nodes.discard(node)
        if not node.users and (is_pointwise(node) or is_move(node)):
            nodes.update(node.all_input_nodes)
            node.graph.erase_node(node)


def _input_node(leaf: Leaf, columns: int, quantize: Node) -> Node:
    """The leaf in the shape that the spec declares, a view of it if need be."""
    if leaf.shape is not None:  # a view, but no demand for one: an operator may lay out its result as nobody foretold
        shape = _sizes_of_a_view(leaf.node, leaf.shape, quantize)
        return call_like(aten.reshape.default, (leaf.node, shape), quantize)
    if leaf.dims is not None:
        return _by_heads(leaf.node, leaf.dims, quantize)
    wanted = {Place.FULL: [-1, columns], Place.ROW: [-1], Place.COLUMN: [-1, 1], Place.SCALAR: []}[leaf.place]
    node, value = leaf.node, leaf.node.meta["val"]
    if leaf.place is not Place.FULL and not value.is_contiguous():
        node = call_like(aten.clone.default, (node,), quantize, memory_format=torch.contiguous_format)
    return reshaped(node, wanted, quantize)


def _sizes_of_a_view(node: Node, shape: tuple[Any, ...], quantize: Node) -> list[int | Node]:
    """``shape`` as an operator takes it: a symbolic size follows from the rest, or ``node`` is asked for several."""
    symbols = [size for size in shape if not isinstance(size, int)]
    if len(symbols) <= 1:
        return [size if isinstance(size, int) else -1 for size in shape]

    def asked(size: Any) -> Node:
        return call_like(aten.sym_size.int, (node, place_of_size(size, node.meta["val"])), quantize)

    return [size if isinstance(size, int) else asked(size) for size in shape]


def _by_heads(node: Node, dims: tuple[int | None, ...], quantize: Node) -> Node:
    """A view of ``node`` as [A, S, G, D], which its dimensions ``dims`` are; 1 for those that it does not have."""
    has = [dim for dim in dims if dim is not None]
    others = [dim for dim in range(node.meta["val"].dim()) if dim not in has]
    if [*others, *has] != list(range(len(has) + len(others))):
        node = call_like(aten.permute.default, (node, [*others, *has]), quantize)
    for _ in others:
        node = call_like(aten.squeeze.dim, (node, 0), quantize)
    for position, dim in enumerate(dims):
        if dim is None:
            node = call_like(aten.unsqueeze.default, (node, position), quantize)
    return node
