"""Which pointwise nodes a quantize can compute by itself, and from what, in its index space (index_space.py).

It is a rule in bytes, with no list of activations. A node joins if nobody else reads it: then it need never exist. A
node that others read joins if computing it again reads no more bytes than reading it would: so silu(gate) is computed
by the forward product and again by the backward from the gate itself, while a residual sum x + y with other readers
stays a leaf.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from te_compile.ops.pointwise import Operand, Place, Result, Spec, SpecBuilder, SpecError
from te_compile.passes.column_shifts import Seat, is_move, meaning_of
from te_compile.passes.index_space import LAYOUTS, MOST_MATRICES, SHOWN, IndexSpace, Item
from te_compile.passes.moved_inputs import MovedInputs
from te_compile.passes.pointwise_nodes import (
    CASTS,
    CONSTANTS,
    COPIES,
    VIEWS,
    is_pointwise,
    tensor_arguments,
    translate,
    value_of,
)

MOST_NODES = 256


@dataclass(frozen=True)
class Leaf:
    """A tensor that a producer reads; ``shape``, where it is part of a matrix, the [A, S, G, D] as which; ``dims``,
    where it is read by heads, which of its dimensions those four are."""

    node: Node
    place: Place
    shape: tuple[Any, ...] | None = None
    dims: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Closure:
    """What one producer does: ``joined``, z = ``root`` among them, are computed from ``leaves`` as ``spec`` says."""

    root: Item
    joined: frozenset[Item]
    leaves: tuple[Leaf, ...]
    spec: Spec
    columns: int


def grow(root: Node, space: IndexSpace, reader: Node) -> frozenset[Item]:
    """The nodes that join the producer of ``root`` for ``reader``, a quantize; none if it is better read."""
    start = Item(root, Place.FULL)
    for by_heads in (True, False):
        joined = _without_mere_layouts(_grown(root, space, reader, by_heads), space)
        if start not in joined:
            break
        if _made_for(joined, space, reader) <= space.cost(frozenset({start})):
            return joined
    return frozenset()


def _grown(root: Node, space: IndexSpace, reader: Node, by_heads: bool) -> frozenset[Item]:
    """Those nodes; ``by_heads``: among them those that can only be seen so."""
    start = Item(root, Place.FULL)
    joined: set[Item] = set()
    leaves: set[Item] = set()
    frontier = {start}
    while frontier:
        # Latest first: when a node's turn comes, all its readers have been decided.
        item = max(frontier, key=lambda item: item.node)
        frontier.discard(item)
        stays = not by_heads and space.turns(item) and space.is_readable(item)
        if not stays and (item == start or _joins(item, space, joined, leaves | frontier, reader)):
            joined.add(item)
            frontier |= set(space.operands(item) or []) - joined - leaves
        else:
            leaves.add(item)
    return frozenset(joined)


def _without_mere_layouts(joined: frozenset[Item], space: IndexSpace) -> frozenset[Item]:
    """``joined`` without nodes that only bring what is read to other places: in their own place it is read as well."""
    left = set(joined)
    for item in sorted(joined, key=lambda item: item.node):
        operands = space.operands(item) or []
        seen = all(isinstance(operand.place, Seat) for operand in operands)
        if item.node.target in LAYOUTS and seen and left.isdisjoint(operands) and space.is_readable(item):
            left.discard(item)
    return frozenset(left)


def _made_for(joined: frozenset[Item], space: IndexSpace, reader: Node) -> float:
    """Bytes written for each element of z only because a producer of ``joined`` reads them.

    What Inductor would compute on its way to z and nobody else reads, as the parts of a rotation of neighbours, must
    exist for us. More of it than z is worse than z.
    """
    inside = {item.node for item in joined}
    read = {operand for item in joined for operand in space.operands(item) or []} - joined
    made = set()
    for item in read:
        node = _shown_by(item.node)
        computed = (is_pointwise(node) or is_move(node)) and _recomputed_together(node, reader)
        if item.is_matrix and computed and not space.is_joined(item) and _is_read_only_by(node, inside, SHOWN):
            made.add(item)
    return space.cost(frozenset(made))


def _shown_by(node: Node) -> Node:
    """The tensor that ``node`` is, or is a view of."""
    while node.target in SHOWN:
        node = tensor_arguments(node)[0]
    return node


def _joins(item: Item, space: IndexSpace, joined: set[Item], read_anyway: set[Item], reader: Node) -> bool:
    if space.operands(item) is None or not _recomputed_together(item.node, reader) or len(joined) >= MOST_NODES:
        return False
    if not space.is_readable(item):
        return True
    known = {each.node for each in read_anyway}
    added = frozenset(each for each in space.reads(item) if each.node not in known)
    matrices = {each.node for each in read_anyway | added if each.is_matrix}
    if len(matrices) > MOST_MATRICES:
        return False
    inside = {each.node for each in joined}
    nobody_else = all(user in inside for user in item.node.users)
    return nobody_else or space.cost(added) <= space.cost(frozenset({item}))


def _recomputed_together(node: Node, reader: Node) -> bool:
    """Is ``node`` in the same activation-checkpoint region as ``reader``, or the reader in none?

    A node from before the region is saved for it. Computed inside instead, it would make the region save its operands.
    """
    region = reader.meta.get("ac_graph_id")
    return region is None or node.meta.get("ac_graph_id") == region


def _leaf(item: Item, space: IndexSpace, inside: frozenset[Node]) -> tuple[tuple[Leaf, ...], tuple[int, ...]]:
    """The tensors that ``item`` is read from, and their widths if they are parts of it.

    A tensor that others than the nodes ``inside`` read exists anyway, so its parts need not be joined again.
    """
    value = value_of(item.node)
    assert value is not None and isinstance(item.place, Place)
    joins = item.node.target is torch.ops.aten.cat.default and _is_read_only_by(item.node, inside, VIEWS)
    if item.place is Place.FULL and (joins or not space.is_matrix(value)):
        parts = space.parts(item.node)
        if parts is not None:
            leaves = zip(parts.nodes, parts.shapes, strict=True)
            return tuple(Leaf(node, Place.FULL, shape) for node, shape in leaves), parts.widths
    return (Leaf(item.node, item.place),), ()


def _is_read_only_by(node: Node, inside: Set[Node], views: Set[Any]) -> bool:
    """Does nobody else read ``node``, but for ``views`` of it that only those read?"""
    others = [user for user in node.users if user not in inside]
    return all(user.target in views and _is_read_only_by(user, inside, views) for user in others)


def spec_of(
    root: Item, joined: frozenset[Item], space: IndexSpace, serves: frozenset[Node], results: Any
) -> tuple[Spec, tuple[Leaf, ...]]:
    """The spec of a closure and its inputs in order. ``results(z)`` gives what is emitted and summed of z."""
    builder = SpecBuilder()
    leaves: list[Leaf] = []
    values: dict[Item, Operand] = {}
    moved = MovedInputs((each.node, each.place) for each in _leaves_in_order(root, joined, space))
    inside = serves | {item.node for item in joined}

    def visit(item: Item) -> Operand:
        if item in values:
            return values[item]
        if item in joined:
            operands = space.operands(item)
            assert operands is not None
            given = [visit(operand) for operand in operands]
            if is_move(item.node):
                value = meaning_of(builder, item.node, space.seat_of(item), given)
            else:
                names = {operand.node: name for operand, name in zip(operands, given, strict=True)}
                value = translate(builder, item.node, names)
        elif isinstance(item.place, Seat):
            value, read = moved.name(builder, item.node, item.place)
            leaves.extend(Leaf(node, place, dims=dims) for node, place, dims in read)
        else:
            tensor = value_of(item.node)
            assert tensor is not None
            parts, widths = _leaf(item, space, inside)
            value = builder.input(tensor.dtype, item.place, widths)
            leaves.extend(parts)
        values[item] = value
        return value

    z, tensor = visit(root), value_of(root.node)
    assert tensor is not None
    rounded = builder.cast(z, tensor.dtype)
    if not isinstance(rounded, str):
        raise SpecError("z is a constant")
    emitted, sums = results(rounded)
    return builder.finish(rounded, emitted, sums), tuple(leaves)


def _leaves_in_order(root: Item, joined: frozenset[Item], space: IndexSpace) -> list[Item]:
    """What a producer reads, in the order of a depth-first walk from z."""
    found: dict[Item, None] = {}
    seen: set[Item] = set()

    def visit(item: Item) -> None:
        if item in seen:
            return
        seen.add(item)
        if item not in joined:
            found[item] = None
        for operand in (space.operands(item) or []) if item in joined else []:
            visit(operand)

    visit(root)
    return list(found)


def find_closure(root: Node, space: IndexSpace, reader: Node, emitted: bool, sums: list[Node]) -> Closure | None:
    """The producer of ``root`` for the quantize ``reader``; None if there is nothing to compute or no way to say it.

    ``emitted``: the value of ``root`` is wanted in high precision; ``sums``: its column sums, or casts of them.
    """
    start, value = Item(root, Place.FULL), value_of(root)
    assert value is not None
    if space.operands(start) is not None and _recomputed_together(root, reader):
        joined = grow(root, space, reader)
    else:
        joined = frozenset()
    if not joined and not space.is_readable(start):
        return None
    emitted = emitted and bool(joined)
    dtype, of_sums = value.dtype, [total.meta["val"].dtype for total in sums]

    def results(z: str) -> tuple[list[Result], list[Result]]:
        return [Result(z, dtype)] if emitted else [], [Result(z, each) for each in of_sums]

    behind_casts = (tensor_arguments(total)[0] for total in sums if total.target in CASTS)
    serves = frozenset({reader, *sums, *behind_casts})
    try:
        spec, leaves = spec_of(start, joined, space, serves, results)
    except SpecError:
        return None
    computes = any(item.node.target not in VIEWS | COPIES | CONSTANTS for item in joined)
    if not computes and not sums and not any(given.parts for given in spec.inputs):
        return None
    places = {given.place for given in spec.inputs}
    if Place.FULL not in places and not {Place.ROW, Place.COLUMN} <= places:
        return None
    return Closure(start, joined, leaves, spec, space.columns)
