"""What a producer reads, as nodes of the shapes that its spec declares; and what nobody reads once it is there."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from te_compile.ops.pointwise import Place
from te_compile.passes.closures import Leaf
from te_compile.passes.column_shifts import is_move
from te_compile.passes.new_nodes import call_like, reshaped
from te_compile.passes.parts import place_of_size
from te_compile.passes.pointwise_nodes import is_pointwise

aten = torch.ops.aten


def input_node(leaf: Leaf, columns: int, quantize: Node) -> Node:
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


def erase_dead(nodes: set[Node]) -> None:
    """Erase those of ``nodes`` that nobody reads any more, and what was made for them alone."""
    while nodes:
        node = max(nodes)
        nodes.discard(node)
        if not node.users and (is_pointwise(node) or is_move(node)):
            nodes.update(node.all_input_nodes)
            node.graph.erase_node(node)
