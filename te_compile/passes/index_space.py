"""The index space of a producer: how nodes vary over what it quantises, and what reading them costs.

A producer evaluates everything in the index space of z [M, K]. The nodes before a quantize mostly live in other
shapes, [B, S, K] say, but a view keeps the order of the elements, so a node with M · K elements *is* a matrix here, and
a smaller operand that it broadcasts is a row, a column or a scalar of it. What cannot be seen that way, or is not
pointwise, must exist as a tensor: a leaf. Beside it stands z seen by heads, in which nodes that permute dimensions or
move columns have a place as well (te_compile.passes.column_shifts).

What is read is counted in bytes. Only whole matrices are counted, each once, wherever its columns are seen; what is the
same for every head is counted as the one head that it is, and rows and columns stay in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops.pointwise import DTYPES, Operand, Place, SpecBuilder, SpecError
from te_compile.passes.column_shifts import Seat, is_move, is_readable_from, seat_in, sources_of
from te_compile.passes.parts import Parts, parts_of
from te_compile.passes.pointwise_nodes import COPIES, VIEWS, is_pointwise, tensor_arguments, translate, value_of
from te_compile.passes.sizes import product, same

# More matrices than these in one kernel cost more in registers than their fusion saves.
MOST_MATRICES = 8
SHOWN = VIEWS | {torch.ops.aten.permute.default, torch.ops.aten.slice.Tensor, torch.ops.aten.expand.default}
"""What takes no memory of its own."""
LAYOUTS = VIEWS | COPIES | {torch.ops.aten.permute.default, torch.ops.aten.cat.default}
"""What a producer reads in parts, or as it lies in memory, if nothing is computed before it."""


@dataclass(frozen=True)
class Item:
    """A node, and how its elements vary over z."""

    node: Node
    place: Place | Seat

    @property
    def is_matrix(self) -> bool:
        """Has it an element for each of z?"""
        return self.place is Place.FULL or (isinstance(self.place, Seat) and not self.place.shared)


class IndexSpace:
    """z [rows, columns] on ``device``, and how nodes look from it. Remembers what it has found out about a graph."""

    def __init__(self, rows: Any, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device
        self._operands: dict[Item, list[Item] | None] = {}
        self._seen: dict[Node, set[Item]] = {}  # the items of each node whose operands are known
        self._reads: dict[Item, frozenset[Item]] = {}
        self._followers: dict[Item, set[Item]] = {}  # by an item those whose reads were found from its own
        self._parts: dict[Node, Parts | None] = {}

    def forget(self, nodes: set[Node]) -> None:
        """``nodes`` read something else now.

        What does not follow from them stays known: a residual stream is one chain through all layers, and a search that
        starts from its beginning after each change takes time with the square of their number.
        """
        waiting = [item for node in nodes for item in self._seen.pop(node, ())]
        for item in waiting:
            self._operands.pop(item, None)
        while waiting:
            item = waiting.pop()
            self._reads.pop(item, None)
            waiting.extend(self._followers.pop(item, ()))
        self._parts.clear()

    def turns(self, item: Item) -> bool:
        """Is ``item`` where z comes to be seen by heads?"""
        seats = (isinstance(operand.place, Seat) for operand in self.operands(item) or [])
        return item.place is Place.FULL and any(seats)

    def seat_of(self, item: Item) -> Seat:
        """How a node is seen by heads, which it may only come to be."""
        seat = item.place if isinstance(item.place, Seat) else seat_in(item.node, self.rows, self.columns)
        assert seat is not None
        return seat

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
            self._seen.setdefault(item.node, set()).add(item)
        return self._operands[item]

    def _find_operands(self, item: Item) -> list[Item] | None:
        if isinstance(item.place, Seat):
            return self._sources(item.node, item.place)
        found = self._find_in_place(item.node, item.place)
        if found is not None or item.place is not Place.FULL:
            return found
        seat = seat_in(item.node, self.rows, self.columns)
        return None if seat is None else self._sources(item.node, seat, whole=True)

    def _sources(self, node: Node, seat: Seat, whole: bool = False) -> list[Item] | None:
        """What ``node`` is computed from, seen by heads. ``whole``: it lies as z does, and could be read as a matrix.

        What is the same for every head is read, and computed by no producer: it would compute it for each. And where
        elements only change places, reading them where they are now is as well.
        """
        known = is_move(node) or (is_pointwise(node) and _has_meaning(node))
        sources = sources_of(node, seat) if known and not seat.shared else None
        if sources is None:
            return None
        items = [Item(source.node, source.seat) for source in sources if source.node is not None]
        if not all(self.is_readable(item) or self.operands(item) is not None for item in items):
            return None
        layout = node.target in LAYOUTS or (whole and node.target in SHOWN)
        shared = any(isinstance(item.place, Seat) and item.place.shared for item in items)
        computed = any(self.operands(item) is not None for item in items)
        return items if computed or shared or not layout else None

    def _find_in_place(self, node: Node, place: Place) -> list[Item] | None:
        """What ``node`` is computed from, element by element."""
        if not is_pointwise(node) or not _has_meaning(node):
            return None
        operands = []
        for argument in tensor_arguments(node):
            found = self._place_of(argument, node, place)
            if found is None:
                return None
            operand = Item(argument, found)
            if not self.is_readable(operand) and self.operands(operand) is None:
                return None
            operands.append(operand)
        return operands

    def _place_of(self, argument: Node, consumer: Node, place: Place) -> Place | None:
        """How an operand varies over z, given how its consumer does."""
        operand, result = value_of(argument), value_of(consumer)
        assert operand is not None and result is not None
        if same(operand.numel(), 1):
            return Place.SCALAR
        if consumer.target in VIEWS:
            return place
        shape, sizes = result.shape, (*(1,) * (result.dim() - operand.dim()), *operand.shape)
        if all(map(same, sizes, shape)):
            return place
        cut = self.row_dimensions(shape) if place is Place.FULL else None
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
        if isinstance(item.place, Seat):
            return is_readable_from(value, item.place)
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

    def is_joined(self, item: Item) -> bool:
        """Is ``item`` read as the tensors that it is made of?"""
        parts = self.parts(item.node) if item.place is Place.FULL else None
        return parts is not None and parts.nodes != (item.node,)

    def cost(self, items: frozenset[Item]) -> float:
        """Bytes read for each element of z. Columns that are read where they are and elsewhere are read once: a head is
        short enough for the caches."""
        shares = {item.node: share for item in items if (share := _share(item))}
        read = ((value_of(node), share) for node, share in shares.items())
        return sum(value.dtype.itemsize * share for value, share in read if value is not None)

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


def _share(item: Item) -> float:
    """How many elements are read for each element of z."""
    if isinstance(item.place, Seat):
        return 1 / item.place.turn.heads if item.place.shared else 1
    return item.place is Place.FULL


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
    if not all(isinstance(size, int) for size in value.shape):
        return _symbolic_matrix(value, columns)
    try:
        matrix = value.view(-1, columns)
    except (RuntimeError, ValueError):
        return None
    # A fake tensor allows some views across a dimension of size one that memory does not allow.
    return matrix if value.is_contiguous() or _lies_as_rows(value, columns) else None


def _symbolic_matrix(value: Tensor, columns: int) -> Tensor | None:
    """The same where sizes are symbols. A view would ask which of them are one, by guesses that can take minutes."""
    cut = _cut_into_rows(value, columns)
    if cut is None:
        return None
    shape, strides = value.shape, value.stride()
    stride, inner = (_innermost(shape[part], strides[part]) for part in (slice(0, cut), slice(cut, None)))
    return value.as_strided((product(shape[:cut]), columns), (stride, inner))


def _innermost(sizes: Any, strides: Any) -> Any:
    """The stride with which dimensions are walked; 1 where they hold one element."""
    return next(
        (stride for size, stride in zip(reversed(sizes), reversed(strides), strict=True) if not same(size, 1)), 1
    )


def _lies_as_rows(value: Tensor, columns: int) -> bool:
    return _cut_into_rows(value, columns) is not None


def _cut_into_rows(value: Tensor, columns: int) -> int | None:
    """Where the last dimensions begin, ``columns`` elements together, that one stride walks, if another walks those
    before them; None if there are none."""
    shape, strides = value.shape, value.stride()
    cuts = [cut for cut in range(value.dim()) if same(product(shape[cut:]), columns)]
    walked = (cut for cut in cuts if _walked(shape[:cut], strides[:cut]) and _walked(shape[cut:], strides[cut:]))
    return next(walked, None)


def _walked(sizes: Any, strides: Any) -> bool:
    long = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if not same(size, 1)]
    return all(same(outer, size * stride) for (_, outer), (size, stride) in pairwise(long))


def behind_views(node: Any) -> Node:
    """The node whose elements ``node`` only shows under another shape."""
    while node.target in VIEWS and value_of(tensor_arguments(node)[0]) is not None:
        node = tensor_arguments(node)[0]
    return node
