"""Inputs of a producer that are read by heads: how few of them there can be.

A rotation sees the first half of a head where the second is, and the second where the first is. Neither is wanted where
the other is, so both are one input, whose columns come from two places (te_compile.ops.pieces). That is half of the
loads, and what is computed of both is written once. Different tensors of one kind share an input too, as the gradients
of q and k do where they come to lie in one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.fx import Node

from te_compile.ops.pieces import Piece
from te_compile.ops.pointwise import Input, Place, SpecBuilder
from te_compile.passes.column_shifts import Seat, Turn
from te_compile.passes.parts import is_long
from te_compile.passes.pointwise_nodes import value_of

Dims = tuple[int | None, ...]
Part = tuple[Node, Dims, int]
"""A tensor, as which it is read, and how far its columns are moved."""


@dataclass
class _Group:
    """What one input is read from: in columns ``start`` to ``stop`` of a head this part, in others that one."""

    turn: Turn
    dtype: torch.dtype
    shared: bool
    found: list[tuple[int, int, Part]] = field(default_factory=list)
    name: str = ""

    def takes(self, node: Node, seat: Seat) -> bool:
        """Is there room for ``node`` in the columns in which it is wanted?"""
        value = value_of(node)
        if value is None or (seat.turn, value.dtype, seat.shared) != (self.turn, self.dtype, self.shared):
            return False
        one = (seat.start, seat.stop, (node, seat.dims, seat.shift))
        if any(_collide(one, other) for other in self.found):
            return False
        found = sorted([*self.found, one], key=lambda each: each[:2])
        # A tile is read from one tensor.
        borders = [after[0] for before, after in pairwise(found) if before[2][:2] != after[2][:2]]
        return is_long(math.gcd(self.turn.width, *borders))

    def add(self, node: Node, seat: Seat) -> None:
        self.found.append((seat.start, seat.stop, (node, seat.dims, seat.shift)))

    def pieces(self, numbers: dict[tuple[Node, Dims], int]) -> tuple[Piece, ...]:
        """The pieces that make it up. ``numbers``: those of the tensors, to which new ones are added."""
        made: list[Piece] = []
        start = 0
        for first, last, (node, dims, shift) in sorted(self.found, key=lambda each: each[:2]):
            if last <= start:  # seen before, as part of more
                continue
            first = max(first, start)
            made += [Piece(None, 0, first - start)] * (first > start)
            tensor = numbers.setdefault((node, dims), len(numbers))
            before = made[-1] if made else None
            if before is not None and (before.tensor, before.start + before.width) == (tensor, first + shift):
                made[-1] = Piece(tensor, before.start, before.width + last - first)
            else:
                made.append(Piece(tensor, first + shift, last - first))
            start = last
        made += [Piece(None, 0, self.turn.width - start)] * (start < self.turn.width)
        return tuple(made)


def _collide(one: tuple[int, int, Part], other: tuple[int, int, Part]) -> bool:
    """Are two different columns wanted in one?"""
    return one[2] != other[2] and one[0] < other[1] and other[0] < one[1]


class MovedInputs:
    """The inputs that the leaves of a closure make, of those of them that are seen by heads."""

    def __init__(self, leaves: Iterable[tuple[Node, Place | Seat]]) -> None:
        self._groups: list[_Group] = []
        self._of: dict[tuple[Node, Seat], _Group] = {}
        self._numbers: dict[tuple[Node, Dims], int] = {}  # of the tensors, as they come
        for node, seat in leaves:
            if isinstance(seat, Seat):
                self._of[node, seat] = self._group_for(node, seat)

    def _group_for(self, node: Node, seat: Seat) -> _Group:
        group = next((each for each in self._groups if each.takes(node, seat)), None)
        if group is None:
            value = value_of(node)
            assert value is not None
            group = _Group(seat.turn, value.dtype, seat.shared)
            self._groups.append(group)
        group.add(node, seat)
        return group

    def name(self, builder: SpecBuilder, node: Node, seat: Seat) -> tuple[str, list[tuple[Node, Place, Dims]]]:
        """What ``node`` is called in the spec, and the tensors that its input is read from and none was before."""
        group = self._of[node, seat]
        if group.name:
            return group.name, []
        place, known = Place.HEAD if group.shared else Place.FULL, len(self._numbers)
        group.name = builder.again(Input(group.dtype, place, pieces=group.pieces(self._numbers)))
        return group.name, [(tensor, place, dims) for tensor, dims in list(self._numbers)[known:]]
