"""Compute a weight's gradient after the backward of the activation before it.

Autograd takes a linear's two gradients one after the other, and then comes the activation before it, whose backward is
where memory is tightest: what its result's gradient is in high precision, what its forward read, and the codes that it
writes. The gradient of the weight would be there as well, as large as the weight. It has no hurry. What it reads waits
anyway: its one operand is made again (remake_transposed.py) from what the activation's backward reads, and the other
one is codes of a gradient. Where that gradient itself is read later, as the one of a residual stream is, not even the
codes wait: they are made again, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of, is_te, result
from te_compile.passes.index_space import behind_views
from te_compile.passes.prune_outputs import layouts_of
from te_compile.passes.remake_transposed import is_in_backward, matrices_read_by, remake

_LARGE = ("fused_quantize", "fused_quantize_cat", "fused_quantize_pair")


def delay_weight_gradients(graph: Graph) -> int:
    """Move the products whose remade operand comes from what a later producer reads behind that; returns how many."""
    remade: dict[Node, list[Node]] = {}  # by what they read
    moved = 0
    for node in list(graph.nodes):
        if not is_in_backward(node):
            continue
        if is_te(node, "fused_quantize") and not arguments_of(node)["rowwise"]:
            for source in _sources(node):
                remade.setdefault(source, []).append(node)
        elif any(is_te(node, name) for name in _LARGE):
            waiting = {each: None for source in _sources(node) for each in remade.pop(source, ())}
            moved += sum(_move_behind(node, each) for each in waiting)
    return moved


def _sources(producer: Node) -> list[Node]:
    return list(map(behind_views, matrices_read_by(producer)))


def _move_behind(activation: Node, remade: Node) -> bool:
    """Put ``remade`` and the one product that reads it behind the results of ``activation``, if nobody minds."""
    items, readers = list(remade.users), {reader for item in remade.users for reader in item.users}
    product = min(readers)
    place = max([activation, *activation.users])
    is_private = len(readers) == 1 and is_te(product, "gemm")
    if not is_private or product > place or any(user < place for user in product.users):
        return False
    for node in (product, *items, remade):
        place.append(node)
    for codes in _codes_of_gradients(product, remade):
        if _can_be_made_again(codes, place):
            remake(codes)
    return True


def _codes_of_gradients(product: Node, remade: Node) -> Iterator[Node]:
    """The producer of the other operand's codes."""
    for name in ("a", "b"):
        operand = arguments_of(product)[name]
        producer = operand.args[0] if isinstance(operand, Node) and operand.target is operator.getitem else None
        if isinstance(producer, Node) and producer is not remade:
            yield producer


def _can_be_made_again(producer: Node, place: Node) -> bool:
    """Is it one matrix that is quantised, in both layouts, and will that be read anyway after ``place``?"""
    if not any(is_te(producer, name) for name in ("quantize", "fused_quantize")):
        return False
    sources = _sources(producer)
    readers = [reader for qt in result(producer, layouts_of(producer)["columnwise"]) for reader in qt.users]
    is_split = all(reader > place for reader in readers) and bool(result(producer, layouts_of(producer)["rowwise"]))
    return is_split and len(sources) == 1 and any(user > max(readers) for user in _readers(sources[0]))


def _readers(source: Node) -> Iterator[Node]:
    """Who reads the elements of ``source``, in its own or in another shape."""
    for user in source.users:
        if behind_views(user) is not user:
            yield from _readers(user)
        else:
            yield user
