"""Which pointwise nodes a quantize can compute by itself, and from what.

A producer evaluates everything in the index space of z [M, K]. The nodes before a quantize mostly live in other
shapes, [B, S, K] say, but a view keeps the order of the elements, so a node with M · K elements *is* a matrix here, and
a smaller operand that it broadcasts is a row, a column or a scalar of it. What cannot be seen that way, or is not
pointwise, must exist as a tensor: a leaf.

Which nodes join is a rule in bytes, with no list of activations. A node joins if nobody else reads it: then it need
never exist. A node that others read joins if computing it again reads no more bytes than reading it would: so
silu(gate) is computed by the forward product and again by the backward from the gate itself, while a residual sum x + y
with other readers stays a leaf. Only whole matrices are counted; rows and columns stay in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops.pointwise import DTYPES, Operand, Place, Result, Spec, SpecBuilder, SpecError
from te_compile.passes.parts import Parts, parts_of
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
from te_compile.passes.sizes import product, same

# More matrices than these in one kernel cost more in registers than their fusion saves.
MOST_MATRICES = 8
MOST_NODES = 256


@dataclass(frozen=True)
class Item:
    """A node, and how its elements vary over z."""

    node: Node
    place: Place


@dataclass(frozen=True)
class Leaf:
    """A tensor that a producer reads; ``shape``, where it is part of a matrix, the [A, S, G, D] as which."""

    node: Node
    place: Place
    shape: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Closure:
    """What one producer does: ``joined``, z = ``root`` among them, are computed from ``leaves`` as ``spec`` says."""

    root: Item
    joined: frozenset[Item]
    leaves: tuple[Leaf, ...]
    spec: Spec
    columns: int


class IndexSpace:
    """z [rows, columns] on ``device``, and how nodes look from it. Remembers what it has found out about a graph."""

    def __init__(self, rows: Any, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device
        self._operands: dict[Item, list[Item] | None] = {}
        self._reads: dict[Item, frozenset[Item]] = {}
        self._followers: dict[Item, set[Item]] = {}  # by an item those whose reads were found from its own
        self._parts: dict[Node, Parts | None] = {}

    def forget(self, nodes: set[Node]) -> None:
        """``nodes`` read something else now.

        What does not follow from them stays known: a residual stream is one chain through all layers, and a search that
        starts from its beginning after each change takes time with the square of their number.
        """
        waiting = [Item(node, place) for node in nodes for place in Place]
        for item in waiting:
            self._operands.pop(item, None)
        while waiting:
            item = waiting.pop()
            self._reads.pop(item, None)
            waiting.extend(self._followers.pop(item, ()))
        self._parts.clear()

    def row_dimensions(self, shape: Any) -> int | None:
        """How many leading dimensions of ``shape`` make up the rows; None if no cut gives [rows, columns]."""
        for cut in range(len(shape) + 1):
            if same(product(shape[:cut]), self.rows) and same(product(shape[cut:]), self.columns):
                return cut
        return None

    def operands(self, item: Item) -> list[Item] | None:
        """What ``item`` is computed from; None if it must be a leaf."""
        if item not in self._operands:
            self._operands[item] = self._find_operands(item)
        return self._operands[item]

    def _find_operands(self, item: Item) -> list[Item] | None:
        node = item.node
        if not is_pointwise(node) or not _has_meaning(node):
            return None
        operands = []
        for argument in tensor_arguments(node):
            place = self._place_of(argument, item)
            if place is None:
                return None
            operand = Item(argument, place)
            if not self.is_readable(operand) and self.operands(operand) is None:
                return None
            operands.append(operand)
        return operands

    def _place_of(self, argument: Node, consumer: Item) -> Place | None:
        """How an operand varies over z, given how its consumer does."""
        operand, result = value_of(argument), value_of(consumer.node)
        assert operand is not None and result is not None
        if same(operand.numel(), 1):
            return Place.SCALAR
        if consumer.node.target in VIEWS:
            return consumer.place
        shape, sizes = result.shape, (*(1,) * (result.dim() - operand.dim()), *operand.shape)
        if all(map(same, sizes, shape)):
            return consumer.place
        cut = self.row_dimensions(shape) if consumer.place is Place.FULL else None
        if cut is None:
            return None
        if all(same(size, 1) for size in sizes[:cut]) and all(map(same, sizes[cut:], shape[cut:])):
            return Place.ROW
        if all(same(size, 1) for size in sizes[cut:]) and all(map(same, sizes[:cut], shape[:cut])):
            return Place.COLUMN
        return None

    def is_readable(self, item: Item) -> bool:
        """Can the producer read the tensor as it lies in memory (a vector may be copied)?"""
        value = value_of(item.node)
        if value is None or value.dtype not in DTYPES.values() or value.device != self.device:
            return False
        return item.place is not Place.FULL or self.is_matrix(value) or self.parts(item.node) is not None

    def is_matrix(self, value: Tensor) -> bool:
        """Do the elements of a whole matrix lie in rows?"""
        flat = as_matrix(value, self.columns)
        return flat is not None and (same(flat.stride(1), 1) or same(flat.shape[1], 1))

    def parts(self, node: Node) -> Parts | None:
        """What a whole matrix can be read as without its being written."""
        if node not in self._parts:
            self._parts[node] = parts_of(node, self.rows, self.columns)
        return self._parts[node]

    def cost(self, items: frozenset[Item]) -> int:
        """Bytes read for each element of z."""
        full = (value_of(item.node) for item in items if item.place is Place.FULL)
        return sum(value.dtype.itemsize for value in full if value is not None)

    def reads(self, item: Item) -> frozenset[Item]:
        """The leaves that computing ``item`` alone would read."""
        waiting = [item]
        while waiting:
            top = waiting[-1]
            operands = self.operands(top) or []
            unknown = [o for o in operands if self.operands(o) is not None and o not in self._reads]
            if unknown:
                waiting += unknown
                continue
            found: frozenset[Item] = frozenset()
            for operand in operands:
                self._followers.setdefault(operand, set()).add(top)
                found |= self._cheapest(operand)
            self._reads[top] = found if len(found) <= 2 * MOST_MATRICES else frozenset({top})
            waiting.pop()
        return self._reads[item]

    def _cheapest(self, operand: Item) -> frozenset[Item]:
        itself = frozenset({operand})
        if self.operands(operand) is None:
            return itself
        reads = self._reads[operand]
        if len(operand.node.users) == 1 or not self.is_readable(operand) or self.cost(reads) <= self.cost(itself):
            return reads
        return itself


def _has_meaning(node: Node) -> bool:
    """Can the language say what ``node`` computes (from anything)?"""
    builder = SpecBuilder()
    try:
        operands: dict[Node, Operand] = {}
        for argument in tensor_arguments(node):
            value = value_of(argument)
            assert value is not None
            operands[argument] = builder.input(value.dtype, Place.FULL)
        translate(builder, node, operands)
    except SpecError:
        return False
    return True


def as_matrix(value: Tensor, columns: int) -> Tensor | None:
    """``value`` as [M, columns] without a copy; None if its strides do not allow that."""
    if value.dim() == 2 and same(value.shape[1], columns):
        return value
    try:
        matrix = value.view(-1, columns)
    except (RuntimeError, ValueError):
        return None
    # A fake tensor allows some views across a dimension of size one that memory does not allow.
    return matrix if value.is_contiguous() or _lies_as_rows(value, columns) else None


def _lies_as_rows(value: Tensor, columns: int) -> bool:
    """Can the last dimensions, ``columns`` elements together, be walked with one stride, and those before them too?"""
    shape, strides = value.shape, value.stride()
    cuts = [cut for cut in range(value.dim()) if same(product(shape[cut:]), columns)]
    return any(_walked(shape[:cut], strides[:cut]) and _walked(shape[cut:], strides[cut:]) for cut in cuts)


def _walked(sizes: Any, strides: Any) -> bool:
    long = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if not same(size, 1)]
    return all(same(outer, size * stride) for (_, outer), (size, stride) in pairwise(long))


def behind_views(node: Any) -> Node:
    """The node whose elements ``node`` only shows under another shape."""
    while node.target in VIEWS and value_of(tensor_arguments(node)[0]) is not None:
        node = tensor_arguments(node)[0]
    return node


def grow(root: Node, space: IndexSpace, reader: Node) -> frozenset[Item]:
    """The nodes that join the producer of ``root`` for ``reader``, a quantize."""
    start = Item(root, Place.FULL)
    joined: set[Item] = set()
    leaves: set[Item] = set()
    frontier = {start}
    while frontier:
        # Latest first: when a node's turn comes, all its readers have been decided.
        item = max(frontier, key=lambda item: item.node)
        frontier.discard(item)
        if item == start or _joins(item, space, joined, leaves | frontier, reader):
            joined.add(item)
            frontier |= set(space.operands(item) or []) - joined - leaves
        else:
            leaves.add(item)
    return frozenset(joined)


def _joins(item: Item, space: IndexSpace, joined: set[Item], read_anyway: set[Item], reader: Node) -> bool:
    if space.operands(item) is None or not _recomputed_together(item.node, reader) or len(joined) >= MOST_NODES:
        return False
    if not space.is_readable(item):
        return True
    added = space.reads(item) - read_anyway
    matrices = sum(each.place is Place.FULL for each in read_anyway | added)
    if matrices > MOST_MATRICES:
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
    assert value is not None
    joins = item.node.target is torch.ops.aten.cat.default and _is_read_only_by(item.node, inside)
    if item.place is Place.FULL and (joins or not space.is_matrix(value)):
        parts = space.parts(item.node)
        if parts is not None:
            leaves = zip(parts.nodes, parts.shapes, strict=True)
            return tuple(Leaf(node, Place.FULL, shape) for node, shape in leaves), parts.widths
    return (Leaf(item.node, item.place),), ()


def _is_read_only_by(node: Node, inside: frozenset[Node]) -> bool:
    return all(user in inside or (user.target in VIEWS and _is_read_only_by(user, inside)) for user in node.users)


def spec_of(
    root: Item, joined: frozenset[Item], space: IndexSpace, serves: frozenset[Node], results: Any
) -> tuple[Spec, tuple[Leaf, ...]]:
    """The spec of a closure and its inputs in order. ``results(z)`` gives what is emitted and summed of z."""
    builder = SpecBuilder()
    leaves: list[Leaf] = []
    values: dict[Item, Operand] = {}
    inside = serves | {item.node for item in joined}

    def visit(item: Item) -> Operand:
        if item in values:
            return values[item]
        if item in joined:
            operands = space.operands(item)
            assert operands is not None
            value = translate(builder, item.node, {operand.node: visit(operand) for operand in operands})
        else:
            tensor = value_of(item.node)
            assert tensor is not None
            read, widths = _leaf(item, space, inside)
            value = builder.input(tensor.dtype, item.place, widths)
            leaves.extend(read)
        values[item] = value
        return value

    z, tensor = visit(root), value_of(root.node)
    assert tensor is not None
    rounded = builder.cast(z, tensor.dtype)
    if not isinstance(rounded, str):
        raise SpecError("z is a constant")
    emitted, sums = results(rounded)
    return builder.finish(rounded, emitted, sums), tuple(leaves)


def find_closure(root: Node, space: IndexSpace, reader: Node, emitted: bool, sums: list[Node]) -> Closure | None:
    """The producer of ``root`` for the quantize ``reader``; None if there is nothing to compute or no way to say it.

    ``emitted``: the value of ``root`` is wanted in high precision; ``sums``: its column sums, or casts of them.
    """
    start, value = Item(root, Place.FULL), value_of(root)
    assert value is not None
    if space.operands(start) is not None and _recomputed_together(root, reader):
        joined = grow(root, space, reader)
    elif space.is_readable(start):
        joined, emitted = frozenset(), False
    else:
        return None
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
