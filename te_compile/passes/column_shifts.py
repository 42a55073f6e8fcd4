"""What a producer can compute of heads: nodes that permute their dimensions and move columns within them.

A rotary embedding takes the halves of each head apart, exchanges and joins them, and so does its backward, of what
attention gave back as [B, H, S, D]; only then do its heads come to lie side by side as the matrix that a linear's
backward quantises. None of these nodes computes anything: seen from z as [A, S, G, W], its rows by its heads, each
says which dimensions of a tensor are A, S, G and W, and which of its columns is seen in a column of z, a constant
away. So a node has a seat in z, and from that and from what the node does follows the seat of what it reads:

- ``permute``, and views that add or drop dimensions of size one, name the dimensions anew;
- ``slice`` along the columns moves them by where it starts;
- ``slice_scatter``, ``cat`` and ``constant_pad_nd`` along the columns are one tensor in some columns and another one,
  or a constant, in the rest: ``where`` by columns;
- pointwise nodes leave everything in its place; an operand that is the same for every head (cos, sin) is read so.

Which nodes join is decided elsewhere (te_compile.passes.closures). Shifts are numbers known to the compiler; a step in
a slice, heads of symbolic width or any other view leaves the node to be read, as it was before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.ops.pieces import Span
from te_compile.ops.pointwise import Operand, Place, SpecBuilder
from te_compile.passes.arguments import arguments_of
from te_compile.passes.parts import is_long
from te_compile.passes.pointwise_nodes import CASTS, CONSTANTS, COPIES, TRANSLATIONS, VIEWS, tensor_arguments, value_of
from te_compile.passes.sizes import same

aten = torch.ops.aten
MOVES = {
    aten.permute.default,
    aten.slice.Tensor,
    aten.slice_scatter.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
}
WIDEST = 1024
"""Columns of a head: what is read twice, at two columns of one head, should be in a cache still."""
VECTOR = 8
"""Columns that are read at once: pieces of heads start at multiples of it."""


@dataclass(frozen=True)
class Turn:
    """z as [A, S, G, W]: ``heads`` = G of ``width`` = W. ``sizes`` are all four; A and S may be symbols."""

    heads: int
    width: int
    rows: str
    sizes: tuple[Any, ...] = field(compare=False)


@dataclass(frozen=True)
class Seat:
    """How a tensor is seen from z, in columns ``start`` to ``stop`` of each head.

    ``dims``: which of its dimensions is A, S, G and W, None for one that it does not have. Column d of a head of z sees
    its column d + ``shift``. ``shared``: it is the same for every head.
    """

    turn: Turn
    dims: tuple[int | None, ...]
    shift: int
    start: int
    stop: int
    shared: bool = False

    @property
    def columns(self) -> int:
        """The dimension in which its columns lie."""
        assert self.dims[3] is not None
        return self.dims[3]


@dataclass(frozen=True)
class Source:
    """What a node is in some columns of z, those of ``seat``: another node, or ``constant`` if ``node`` is None."""

    node: Node | None
    seat: Seat | Place
    constant: float = 0.0


def is_move(node: Node) -> bool:
    """Does ``node`` only take elements elsewhere?"""
    return node.op == "call_function" and node.target in MOVES


def seat_in(node: Node, rows: Any, columns: int) -> Seat | None:
    """The seat of ``node``, a matrix [rows, columns] of z in its own shape [A, S, G, W]; any but W may be missing."""
    value = value_of(node)
    if value is None or value.dim() == 0:
        return None
    last = value.dim() - 1
    long = [dim for dim, size in enumerate(value.shape) if dim == last or not same(size, 1)]
    for of_rows, of_heads in ((long[:-2], long[-2:-1]), (long[:-1], [])):
        if len(of_rows) > 2:
            continue
        missing = [None] * (2 - len(of_rows))
        dims: tuple[int | None, ...] = (*missing, *of_rows, of_heads[0] if of_heads else None, last)
        a, s, heads, width = sizes = tuple(1 if dim is None else value.shape[dim] for dim in dims)
        if not isinstance(heads, int) or not isinstance(width, int):
            continue
        if heads * width == columns and same(a * s, rows) and is_long(width) and width <= WIDEST:
            return Seat(Turn(heads, width, str((a, s)), sizes), dims, 0, 0, width)
    return None


def sources_of(node: Node, seat: Seat) -> list[Source] | None:
    """What ``node`` is made of, in the columns of its seat; None if that cannot be said."""
    value = value_of(node)
    if value is None or node.op != "call_function":
        return None
    if node.target in MOVES:
        return _MOVED[node.target](node, seat) if value.dtype.is_floating_point else None
    if node.target in VIEWS:
        return _renamed(node, seat)
    if node.target in CONSTANTS or node.target in TRANSLATIONS or node.target in CASTS | COPIES:
        operands = [_operand(argument, value, seat) for argument in tensor_arguments(node)]
        found = [operand for operand in operands if operand is not None]
        return found if len(found) == len(operands) else None
    return None


def meaning_of(builder: SpecBuilder, node: Node, seat: Seat, operands: list[Operand]) -> Operand:
    """What a node of :data:`MOVES` is, of what its sources are that are nodes: one of them in each column."""
    sources = sources_of(node, seat)
    assert sources is not None
    given = iter(operands)
    values = [source.constant if source.node is None else next(given) for source in sources]
    value = values[-1]
    for source, other in zip(reversed(sources[:-1]), reversed(values[:-1]), strict=True):
        assert isinstance(source.seat, Seat)
        truth = builder.span(Span(source.seat.start, source.seat.stop, seat.turn.width))
        value = builder.step("where", truth, other, value)
    return value


def is_readable_from(value: Tensor, seat: Seat) -> bool:
    """Can a producer read ``value`` from its seat, by vectors?"""
    at = value.stride(seat.columns)
    return same(at, 1) and all(number % VECTOR == 0 for number in (seat.shift, seat.start, seat.stop))


def _permuted(node: Node, seat: Seat) -> list[Source] | None:
    given = arguments_of(node)
    order: list[int] = given["dims"]
    dims = tuple(None if dim is None else order[dim] % len(order) for dim in seat.dims)
    return [Source(given["self"], replace(seat, dims=dims))]


def _renamed(node: Node, seat: Seat) -> list[Source] | None:
    """A view whose dimensions are those of its source, but for some of size one."""
    [source] = tensor_arguments(node)
    value, before = value_of(node), value_of(source)
    if value is None or before is None:
        return None
    long, was_long = ([d for d, size in enumerate(x.shape) if not same(size, 1)] for x in (value, before))
    alike = len(long) == len(was_long)
    if not alike or not all(same(value.shape[d], before.shape[e]) for d, e in zip(long, was_long, strict=True)):
        return None
    names = dict(zip(long, was_long, strict=True))
    dims = tuple(None if dim is None else names.get(dim) for dim in seat.dims)
    return None if dims[3] is None else [Source(source, replace(seat, dims=dims))]


def _sliced(node: Node, seat: Seat) -> list[Source] | None:
    given = arguments_of(node)
    found = _extent(given, value_of(given["self"]), seat)
    return None if found is None else [Source(given["self"], replace(seat, shift=seat.shift + found[0]))]


def _scattered(node: Node, seat: Seat) -> list[Source] | None:
    given = arguments_of(node)
    found = _extent(given, value_of(given["self"]), seat)
    if found is None or not _alike(node, given["src"]):
        return None
    start, stop = found
    inner = replace(seat, shift=seat.shift - start)
    first = _within(seat, 0, start, Source(given["self"], seat))
    middle = _within(seat, start, stop, Source(given["src"], inner))
    last = _within(seat, stop, None, Source(given["self"], seat))
    return [*first, *middle, *last]


def _joined(node: Node, seat: Seat) -> list[Source] | None:
    given = arguments_of(node)
    value, dim = value_of(node), given.get("dim", 0)
    assert value is not None
    if dim % value.dim() != seat.columns:
        return None
    found: list[Source] = []
    start = 0
    for source in given["tensors"]:
        part = value_of(source)
        if part is None or not _alike(node, source) or part.dim() != value.dim():
            return None
        width = part.shape[seat.columns]
        if not isinstance(width, int):
            return None
        inner = Source(source, replace(seat, shift=seat.shift - start))
        found += _within(seat, start, start + width, inner)
        start += width
    return found


def _padded(node: Node, seat: Seat) -> list[Source] | None:
    given = arguments_of(node)
    source, amounts, constant = given["self"], given["pad"], given.get("value", 0)
    value = value_of(source)
    if value is None or seat.columns != value.dim() - 1 or len(amounts) != 2 or not isinstance(constant, (int, float)):
        return None
    width = value.shape[-1]
    if constant != constant or not all(isinstance(n, int) and n >= 0 for n in (*amounts, width)):
        return None
    before = amounts[0]
    outside, inner = Source(None, seat, float(constant)), Source(source, replace(seat, shift=seat.shift - before))
    first, last = _within(seat, 0, before, outside), _within(seat, before + width, None, outside)
    return [*first, *_within(seat, before, before + width, inner), *last]


_MOVED = {
    aten.permute.default: _permuted,
    aten.slice.Tensor: _sliced,
    aten.slice_scatter.default: _scattered,
    aten.cat.default: _joined,
    aten.constant_pad_nd.default: _padded,
}


def _extent(given: dict[str, Any], whole: Tensor | None, seat: Seat) -> tuple[int, int] | None:
    """Where a slice of ``whole`` starts and stops, if it is one of columns, in steps of one, known beforehand."""
    if whole is None or given.get("dim", 0) % whole.dim() != seat.columns or given.get("step", 1) != 1:
        return None
    width = whole.shape[seat.columns]
    start, stop = given.get("start"), given.get("end")
    start, stop = 0 if start is None else start, width if stop is None else stop
    if not all(isinstance(number, int) for number in (width, start, stop)):
        return None
    start, stop, _ = slice(start, stop).indices(width)
    return (start, stop) if start < stop else None


def _within(seat: Seat, first: int, last: int | None, source: Source) -> list[Source]:
    """``source`` in those columns of ``seat`` that are columns ``first`` to ``last`` of the node; nothing if none."""
    start = max(seat.start, first - seat.shift)
    stop = seat.stop if last is None else min(seat.stop, last - seat.shift)
    assert isinstance(source.seat, Seat)
    return [replace(source, seat=replace(source.seat, start=start, stop=stop))] if start < stop else []


def _alike(node: Node, source: Node) -> bool:
    """Are both of one dtype and device? ``cat`` and ``slice_scatter`` convert."""
    a, b = value_of(node), value_of(source)
    return a is not None and b is not None and a.dtype == b.dtype and a.device == b.device


def _operand(argument: Node, result: Tensor, seat: Seat) -> Source | None:
    """An operand of a pointwise node in ``seat``, or what a copy shows; None if it varies as no input can."""
    value = value_of(argument)
    assert value is not None
    if same(value.numel(), 1):
        return Source(argument, Place.SCALAR)
    missing = result.dim() - value.dim()
    dims = [None if dim is None or dim < missing else dim - missing for dim in seat.dims]
    if dims[3] is None or not same(value.shape[dims[3]], result.shape[seat.columns]):
        return None
    spread = [_is_spread(value, dim, size) for dim, size in zip(dims, seat.turn.sizes, strict=True)]
    shared = any(spread)
    if shared and not (spread[2] or seat.turn.heads == 1):
        return None
    return Source(argument, replace(seat, dims=tuple(dims), shared=shared))


def _is_spread(value: Tensor, dim: int | None, size: Any) -> bool:
    """Is ``value`` the same along a dimension of ``size``?"""
    return not same(size, 1) and (dim is None or same(value.shape[dim], 1))
