"""Write the gradients of parts of one tensor as a ``cat`` of them, in the order in which a quantize reads it.

Where q, k and v come from ``split``, autograd joins their gradients by a ``cat``, and a producer reads them where
attention left them (te_compile.passes.parts). Vision models write ``qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4)``
instead, and take q, k and v by index, by ``unbind`` or by slices. What comes back is the same numbers in other words:

- of indices and slices a sum of tensors that are zero but for one part each, ``select_scatter`` and ``slice_scatter``;
- of ``unbind`` a ``cat`` along the first dimension and a view that makes a dimension of its own of it;
- and behind either the ``permute`` and a copy, for the matrix that a linear's backward quantises.

Parts that cover the whole are a ``cat`` of what was put into them, and a ``cat`` that is permuted is one of parts that
are. A sum that is rid of its zeros is another one in the sign of a zero alone.

Only what a producer can then read in parts is rewritten: for all else the sum is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.ops.quantize import QUANTIZE
from te_compile.passes.arguments import arguments_of
from te_compile.passes.index_space import behind_views
from te_compile.passes.new_nodes import call_like
from te_compile.passes.parts import parts_of
from te_compile.passes.pointwise_nodes import VIEWS, is_zero, tensor_arguments, value_of
from te_compile.passes.sizes import all_same

aten = torch.ops.aten
READERS = {QUANTIZE, aten.sum.dim_IntList}
"""What a producer does with a matrix."""
JOINING = VIEWS | {
    *(aten.add.Tensor, aten.full.default, aten.select_scatter.default, aten.slice_scatter.default),
    *(aten.cat.default, aten.permute.default, aten.clone.default),
}  # fmt: skip
"""What there is for the sake of one tensor alone, and goes with it."""


@dataclass(frozen=True)
class Joined:
    """Tensors that lie one behind the other along ``dim``; ``stacked``: a dimension that they have not got yet."""

    nodes: tuple[Node, ...]
    dim: int
    stacked: bool


@dataclass(frozen=True)
class Placed:
    """A tensor in the places ``start`` to ``stop`` of ``dim``, among zeros."""

    node: Node
    dim: int
    start: int
    stop: int
    stacked: bool


def join_gradients(graph: Graph) -> int:
    """Write what quantizes read as a ``cat`` of its parts, where it is one in other words; returns how many."""
    count = 0
    for quantize in graph.find_nodes(op="call_function", target=QUANTIZE):
        x = value_of(quantize.args[0])
        whole = behind_views(quantize.args[0])
        if x is None or not isinstance(x.shape[1], int) or not _is_for_producers(whole):
            continue
        source, order = _before_permutation(whole)
        joined = _joined_by(source)
        if joined is None:
            continue
        cat = _permuted(joined, order, whole)
        lies_alike = all_same(cat.meta["val"].stride(), whole.meta["val"].stride())
        is_better = lies_alike and parts_of(cat, *x.shape) is not None
        if is_better:
            whole.replace_all_uses_with(cat)
        _erase_unread(whole if is_better else cat)
        count += is_better
    return count


def _is_for_producers(node: Node) -> bool:
    """Do only quantizes and sums read ``node``, under whatever shape?"""
    return all(user.target in READERS or (user.target in VIEWS and _is_for_producers(user)) for user in node.users)


def _before_permutation(whole: Node) -> tuple[Node, list[int]]:
    """What ``whole`` is a copy of with its dimensions in this order, made for it alone; or itself."""
    tensor = value_of(whole)
    node, order = whole, list(range(0 if tensor is None else tensor.dim()))
    if node.target is aten.clone.default and _has_one_reader(tensor_arguments(node)[0]):
        [node] = tensor_arguments(node)
    if node.target is aten.permute.default and _has_one_reader(tensor_arguments(node)[0]):
        given = arguments_of(node)
        node, order = given["self"], [dim % len(order) for dim in given["dims"]]
    return node, order


def _has_one_reader(node: Node) -> bool:
    return len(node.users) == 1


def _joined_by(node: Node) -> Joined | None:
    """The tensors of which ``node`` is made, in other words than a ``cat``."""
    if node.target is aten.add.Tensor:
        return _covering([_placed(each, node) for each in _addends(node)], node)
    return _stacked(node) if node.target in VIEWS else None


def _addends(total: Node) -> list[Any]:
    """What ``total`` is the sum of; sums on the way that others read too are addends themselves."""
    found: list[Any] = []
    waiting: list[Any] = [total]
    while waiting:
        node = waiting.pop()
        is_sum = isinstance(node, Node) and node.target is aten.add.Tensor and not node.kwargs
        if is_sum and (node is total or _has_one_reader(node)):
            waiting += node.args
        else:
            found.append(node)
    return found


def _placed(addend: Any, total: Node) -> Placed | None:
    """What ``addend`` puts among zeros that have the shape and the dtype of ``total``."""
    if not isinstance(addend, Node) or addend.target not in (aten.select_scatter.default, aten.slice_scatter.default):
        return None
    given = arguments_of(addend)
    whole, value, part = value_of(total), value_of(addend), value_of(given["src"])
    if whole is None or value is None or part is None or not is_zero(given["self"]) or not _has_one_reader(addend):
        return None
    if value.dim() != whole.dim() or not all_same(value.shape, whole.shape):
        return None
    dim = given["dim"] % value.dim()
    places = _places(given, value.shape[dim])
    if places is None or not part.dtype == value.dtype == whole.dtype or part.device != whole.device:
        return None
    return Placed(given["src"], dim, *places, stacked="index" in given)


def _places(given: dict[str, Any], size: Any) -> tuple[int, int] | None:
    """Where a scatter along ``size`` elements starts and stops, if that is known beforehand."""
    if not isinstance(size, int):
        return None
    if "index" in given:
        at = given["index"]
        return (at % size, at % size + 1) if isinstance(at, int) else None
    start, stop = given["start"], given["end"]
    if given["step"] != 1 or not all(isinstance(place, int | None) for place in (start, stop)):
        return None
    start, stop, _ = slice(start, stop).indices(size)
    return start, stop


def _covering(placed: Sequence[Placed | None], total: Node) -> Joined | None:
    """The tensors in their places, if each of those is taken once."""
    known = [each for each in placed if each is not None]
    value = value_of(total)
    if len(known) != len(placed) or value is None:
        return None
    known.sort(key=lambda each: each.start)
    dim, stacked = known[0].dim, known[0].stacked
    alike = all((each.dim, each.stacked) == (dim, stacked) for each in known)
    seamless = all(before.stop == after.start for before, after in pairwise(known))
    covers = known[0].start == 0 and known[-1].stop == value.shape[dim]
    return Joined(tuple(each.node for each in known), dim, stacked) if alike and seamless and covers else None


def _stacked(node: Node) -> Joined | None:
    """The tensors of which ``node``, a view of a ``cat``, is a stack."""
    cat, value = tensor_arguments(node)[0], value_of(node)
    if cat.target is not aten.cat.default or not _has_one_reader(cat) or value is None:
        return None
    given = arguments_of(cat)
    nodes: tuple[Node, ...] = tuple(given["tensors"])
    parts = [value_of(each) for each in nodes]
    first = parts[0]
    if first is None or value.dim() != first.dim() + 1:
        return None
    dim = given["dim"] % first.dim()
    sizes = (*first.shape[:dim], len(nodes), *first.shape[dim:])
    alike = all(
        part is not None
        and part.dtype == value.dtype
        and part.dim() == first.dim()
        and all_same(part.shape, first.shape)
        for part in parts
    )
    return Joined(nodes, dim, True) if alike and all_same(value.shape, sizes) else None


def _permuted(joined: Joined, order: list[int], whole: Node) -> Node:
    """A ``cat`` of ``joined``, its dimensions in ``order``, before ``whole``."""
    pieces = []
    with whole.graph.inserting_before(whole):
        for node in joined.nodes:
            piece = call_like(aten.unsqueeze.default, (node, joined.dim), whole) if joined.stacked else node
            if order != sorted(order):
                piece = call_like(aten.permute.default, (piece, order), whole)
            pieces.append(piece)
        return call_like(aten.cat.default, (pieces, order.index(joined.dim)), whole)


def _erase_unread(node: Node) -> None:
    """Erase ``node`` if nobody reads it, and what was made for it alone."""
    if not node.users and node.target in JOINING:
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase_unread(source)
