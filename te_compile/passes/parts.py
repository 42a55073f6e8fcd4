"""How a producer can read what does not lie in memory as a matrix: heads, and tensors to be joined.

Attention works on [B, H, S, D]. What it gives back, transposed and with its heads side by side, is the matrix that a
linear's backward quantises, and with one linear for q, k and v three such tensors are joined first. Each of that is a
pass over memory. A producer reads the parts where they are (te_compile.ops.pointwise says how an input has parts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.passes.pointwise_nodes import COPIES, VIEWS, tensor_arguments, value_of
from te_compile.passes.sizes import all_same, product, same

aten = torch.ops.aten
NARROWEST = 32  # columns in a run of memory: reading shorter ones is slower than a copy in between
MOST_PARTS = 4


@dataclass(frozen=True)
class Parts:
    """The tensors that make up one matrix, each [A, S, G, D] under the given shape, and their widths in it."""

    nodes: tuple[Node, ...]
    shapes: tuple[tuple[Any, ...], ...]
    widths: tuple[int, ...]


def parts_of(node: Node, rows: Any, columns: int) -> Parts | None:
    """How ``node``, a matrix [rows, columns] in its own shape, can be read without being written; None if it cannot.

    It is either one tensor, strided like heads, or a ``cat`` of such tensors.
    """
    if node.target is not aten.cat.default:
        return _one_part(node, rows, columns)
    given: Any = node.args[0]
    sources: list[Node] = list(given)
    shape = _shape(node)
    cut = _cut(shape, rows, columns)
    if cut is None or len(sources) > MOST_PARTS:
        return None
    dimension: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dimension %= len(shape)
    if dimension < cut or not all(isinstance(size, int) for size in shape[cut:]):
        return None
    after = math.prod(shape[dimension + 1 :])
    found, widths = [], []
    for source in sources:
        width = _shape(source)[dimension] * after
        part = _one_part(source, rows, columns // (shape[dimension] * after) * width) if width else None
        if part is None or not is_long(math.gcd(width, part.shapes[0][3])) or not _alike(part.nodes[0], node):
            return None
        found.append(part)
        widths.append(width)
    shapes, nodes = _with_equal_rows([part.shapes[0] for part in found]), tuple(part.nodes[0] for part in found)
    if shapes is None or not all(map(can_be_asked_for, shapes, map(_known_value, nodes))):
        return None
    return Parts(nodes, shapes, tuple(widths))


def _alike(node: Node, other: Node) -> bool:
    """Are both of one dtype, on one device? ``cat`` promotes."""
    a, b = value_of(node), value_of(other)
    return a is not None and b is not None and a.dtype == b.dtype and a.device == b.device


def _with_equal_rows(shapes: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...] | None:
    """The shapes [A, S, G, D] with one A and S for all; rows that can be walked in one go can be cut anywhere."""
    outer, inner = next((shape[:2] for shape in shapes if not same(shape[0], 1)), shapes[0][:2])
    if all(all_same(shape[:2], (outer, inner)) or same(shape[0], 1) for shape in shapes):
        return tuple((outer, inner, *shape[2:]) for shape in shapes)
    return None


def _one_part(node: Node, rows: Any, columns: int) -> Parts | None:
    """The first tensor, as it lies in memory, that ``node`` is a copy of under this or another shape; or itself."""
    found, source = None, node
    while value_of(source) is not None:
        shape = as_heads(value_of(source), rows, columns)
        if shape is not None:
            found = Parts((source,), (shape,), (columns,))
        before = _source(source)
        if before is None:
            break
        source = before
    return found


def _source(node: Node) -> Node | None:
    """The tensor whose elements ``node`` has in the same order."""
    if node.target not in VIEWS | COPIES:
        return None
    (source,) = tensor_arguments(node)[:1]
    a, b = value_of(node), value_of(source)
    assert a is not None
    return source if b is not None and b.dtype == a.dtype and same(a.numel(), b.numel()) else None


def as_heads(value: Tensor | None, rows: Any, columns: int) -> tuple[Any, ...] | None:
    """[A, S, G, D] as which ``value`` can be seen without a copy, A · S = rows and G · D = columns, the innermost
    dimension in one piece; None if its strides do not allow it."""
    if value is None:
        return None
    shape, strides = tuple(value.shape), value.stride()
    cut = _cut(shape, rows, columns)
    if cut is None:
        return None
    left, right = _two(shape[:cut], strides[:cut]), _two(shape[cut:], strides[cut:])
    if left is None or right is None or not same(right[1][1], 1) or not is_long(right[0][1]):
        return None
    return (*left[0], *right[0]) if can_be_asked_for(left[0], value) else None


def can_be_asked_for(sizes: Sequence[Any], value: Tensor) -> bool:
    """Are ``sizes`` of a view of ``value`` known when it runs? It can find out one that is symbolic; where there are
    more, each has to be one of ``value``'s own."""
    symbols = [size for size in sizes if not isinstance(size, int)]
    return len(symbols) <= 1 or all(place_of_size(size, value) is not None for size in symbols)


def place_of_size(size: Any, value: Tensor) -> int | None:
    """Which dimension of ``value`` has ``size``; None for none."""
    return next((place for place, own in enumerate(value.shape) if same(own, size)), None)


def is_long(run: Any) -> bool:
    """Is a run of so many columns made of tiles that are wide enough?"""
    return isinstance(run, int) and run & -run >= NARROWEST


def _two(sizes: Any, strides: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
    """Dimensions merged into two, sizes and strides; None if there are more that do not merge."""
    merged: list[tuple[Any, Any]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if same(size, 1):
            continue
        if merged and same(merged[-1][1], size * stride):
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    merged = [(1, 0)] * (2 - len(merged)) + merged
    return (merged[0][0], merged[1][0]), (merged[0][1], merged[1][1])


def _cut(shape: tuple[Any, ...], rows: Any, columns: int) -> int | None:
    """How many leading dimensions of ``shape`` are the rows."""
    for cut in range(len(shape) + 1):
        if same(product(shape[cut:]), columns) and same(product(shape[:cut]), rows):
            return cut
    return None


def _known_value(node: Node) -> Tensor:
    value = value_of(node)
    assert value is not None
    return value


def _shape(node: Node) -> tuple[Any, ...]:
    value = value_of(node)
    return () if value is None else tuple(value.shape)
