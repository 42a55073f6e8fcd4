"""Sum the gradient of a table of few rows by a product.

What looks rows up in a table [R, D], by ``nn.Embedding`` or ``table[ids]``, adds the gradient of each place to one of R
rows. Inductor does that by atomic additions, which wait for each other where thousands of places have one row: token
types and relative positions, as BERT and T5 have them. On an H200 with PyTorch 2.11 the gradient of BERT's two token
types, 20480 tokens of 768 features, took 155.6 µs, and as a product it takes 10.1:

    index_put(zeros, [ids], x, accumulate=True)    becomes    (ids == [[0], [1], … [R - 1]]) · x

The comparison [R, N] is written in the 16 bits of x, where 0 and 1 are exact, and the product sums as all products of
16 bits do: in float32, rounded once. So who reads the sum in the dtype of x gets it rounded as before. One in bfloat16
that was kept in float32, as under autocast, is rounded too, as the gradients of linears are there; one in float16
stays, for it might overflow.

Known are the forms that PyTorch's decomposition of an embedding's backward has had since 2.11, with a ``padding_idx``
or without, and that of ``table[ids]``, whose ids may be negative. One thing differs: 0 · inf is no number. An infinity
in the gradient of one place, which the row of its id alone would get, makes no number of its column in all rows. Loss
scalers skip such a step, and without one the table is lost either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import call_like, keep_in_backward, reshaped
from te_compile.passes.pointwise_nodes import CASTS, CONSTANTS, is_zero, value_of
from te_compile.passes.sizes import all_same, same

aten, prims = torch.ops.aten, torch.ops.prims

ON = {"cuda"}
"""The types of device on which such additions wait for each other."""

# Where the product was the faster one on an H200, of tables of 2 to 1024 rows (docs/passes.md has the times): 64 rows
# with 128 places each gained a third, 256 rows with 32 each lost a fifth, and so did larger tables.
MOST_ROWS = 64
PLACES = 128  # for each row, on average
MOST_BYTES = 128 << 20  # of the comparison: the largest that was measured, and gained

_NARROW = (torch.bfloat16, torch.float16)
_MASKED = aten._unsafe_masked_index_put_accumulate.default
_SUMS = (_MASKED, aten.index_put.default)
_PASSED_ON = CASTS | CONSTANTS | {
    *(aten.where.self, aten.clone.default, aten.unsqueeze.default, aten.bitwise_and.Tensor),
    *(aten.eq.Scalar, aten.ne.Scalar, aten.ge.Scalar, aten.lt.Scalar),
}  # fmt: skip
"""What stands around such a sum for its sake, and goes with it."""


@dataclass(frozen=True)
class RowSums:
    """Row r of the result is the sum of x where ids are r, but for one row that gets none.

    ids: [...] int32 or int64; x: [..., D] of 16 bits; padding: an id whose places do not count; wraps: ids from -R on
    count from the end.
    """

    ids: Node
    x: Node
    rows: int
    padding: int | None
    wraps: bool


def sum_few_rows(graph: Graph) -> int:
    """Sum gradients into tables of few rows by products of 16 bits, where that is faster; returns how many."""
    count = 0
    for target in _SUMS:
        for node in graph.find_nodes(op="call_function", target=target):
            sums = _row_sums(node)
            if sums is not None and _gains(sums) and _is_narrow_enough(node, sums):
                _put_product(node, sums)
                count += 1
    return count


# ---------------------------------------------------------------------------------------------------- what a node sums


def _row_sums(node: Node) -> RowSums | None:
    """What ``node`` adds to rows of zeros, if it does that and no more."""
    given, table = arguments_of(node), value_of(node)
    indices = given["indices"]
    ids = indices[0] if len(indices) == 1 else None
    if not isinstance(ids, Node) or not isinstance(given["values"], Node) or not given.get("accumulate", True):
        return None
    x, padding = _before_padding(given["values"], ids)
    if table is None or not is_zero(given["self"]) or not _fit(table, value_of(ids), value_of(x)):
        return None
    rows = int(table.shape[0])
    if node.target is not _MASKED:
        wraps = not _are_read_by_an_embedding(ids)
        return RowSums(ids, x, rows, _within(padding, -rows if wraps else 0, rows), wraps)
    masked = _padding_of(given["mask"], ids, rows)
    if masked is None or padding is not None:
        return None
    return RowSums(ids, x, rows, _within(masked, 0, rows), wraps=False)


def _fit(table: Tensor, ids: Tensor | None, x: Tensor | None) -> bool:
    """Is ``x`` a row [D] of the table [R, D] for each id, and all sizes of the table numbers?"""
    if ids is None or x is None or ids.dim() == 0 or ids.dtype not in (torch.int32, torch.int64):
        return False
    is_matrix = table.dim() == 2 and all(isinstance(size, int) for size in table.shape)
    if not is_matrix or x.dim() != ids.dim() + 1 or not all_same(x.shape, (*ids.shape, table.shape[1])):
        return False
    return x.dtype in _NARROW and x.device.type in ON and ids.device == x.device == table.device


def _before_padding(values: Node, ids: Node) -> tuple[Node, int | None]:
    """``values`` before they were copied, widened and set to 0 where ``ids`` are padding; and the id that is."""
    padding: int | None = None
    while True:
        if values.target is aten.clone.default or _is_widening(values):
            values = values.all_input_nodes[0]
            continue
        found = _hidden(values, ids) if padding is None else None
        if found is None:
            return values, padding
        values, padding = found


def _is_widening(node: Node) -> bool:
    if node.target not in CASTS:
        return False
    before, after = value_of(node.all_input_nodes[0]), value_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    return before.dtype in _NARROW and after.dtype == torch.float32


def _hidden(values: Node, ids: Node) -> tuple[Node, int] | None:
    """x and p of where(ids == p, 0, x), as PyTorch 2.11 writes it."""
    if values.target is not aten.where.self:
        return None
    condition, zero, x = values.args
    if not isinstance(x, Node) or not isinstance(zero, Node) or not is_zero(zero):
        return None
    conditions = _conditions(condition, ids)
    if conditions is None or len(conditions) != 1 or conditions[0][0] is not aten.eq.Scalar:
        return None
    return x, conditions[0][1]


def _padding_of(mask: Any, ids: Node, rows: int) -> int | None:
    """p of a mask that is 0 ≤ ids < rows and ids ≠ p, as an embedding's backward has it from PyTorch 2.12 on."""
    conditions = _conditions(mask, ids)
    within = {(aten.ge.Scalar, 0), (aten.lt.Scalar, rows)}
    if conditions is None or len(conditions) != 3 or not within <= set(conditions):
        return None
    [(target, padding)] = set(conditions) - within
    return padding if target is aten.ne.Scalar else None


def _conditions(mask: Any, ids: Node) -> list[tuple[Any, int]] | None:
    """The comparisons of ``ids`` with numbers that must all hold in a mask [..., 1] of them; None for another mask."""
    value, places = value_of(mask), value_of(ids)
    if value is None or places is None or value.dim() != places.dim() + 1:
        return None
    if not all_same(value.shape, (*places.shape, 1)):
        return None
    found: list[tuple[Any, int]] = []
    for node in _comparisons(mask):
        compared, number = node.args[:2] if len(node.args) > 1 else (None, None)
        if compared is not ids or not isinstance(number, int):
            return None
        found.append((node.target, number))
    return found


def _comparisons(mask: Node) -> Iterator[Node]:
    """What ``mask`` is the conjunction of, each under whatever shape."""
    if mask.target in (aten.bitwise_and.Tensor, aten.unsqueeze.default):
        for each in mask.all_input_nodes:
            yield from _comparisons(each)
    else:
        yield mask


def _are_read_by_an_embedding(ids: Node) -> bool:
    """Does an embedding of the graph look up ``ids``, which takes no negative ones?"""
    return any(
        user.target is aten.embedding.default and arguments_of(user)["indices"] is ids
        for source in (ids, *(ids.all_input_nodes if ids.target in CASTS else ()))
        for user in source.users
    )


def _within(padding: int | None, first: int, end: int) -> int | None:
    """``padding`` if there may be such an id."""
    return padding if padding is not None and first <= padding < end else None


# --------------------------------------------------------------------------------------------------- where that is done


def _gains(sums: RowSums) -> bool:
    """Is the product the faster one, for as many places as there were when the graph was traced?"""
    places = size_hint(sums.ids.meta["val"].numel())
    size = sums.rows * places * sums.x.meta["val"].element_size()
    return sums.rows <= MOST_ROWS and places >= PLACES * sums.rows and size <= MOST_BYTES


def _is_narrow_enough(node: Node, sums: RowSums) -> bool:
    """Does the sum overflow in 16 bits only where it did before?"""
    dtype = sums.x.meta["val"].dtype
    if node.meta["val"].dtype == dtype or dtype == torch.bfloat16:
        return True
    return all(_is_cast_to(user, dtype) for user in node.users)


def _is_cast_to(node: Node, dtype: torch.dtype) -> bool:
    return node.target in CASTS and node.meta["val"].dtype == dtype


# ---------------------------------------------------------------------------------------------------------- the product


def _put_product(node: Node, sums: RowSums) -> None:
    """Put the product in the place of ``node``, and take away what only that read."""
    value, dtype, last = node.meta["val"], sums.x.meta["val"].dtype, node.prev
    with node.graph.inserting_before(node):
        x = _flattened(sums.x, [-1, value.shape[1]], node)
        product = call_like(aten.mm.default, (_one_hot(sums, dtype, node), x), node)
        keep_in_backward(_between(last, product))  # the comparison may have fewer bytes than the ids
        for user in [user for user in node.users if _is_cast_to(user, dtype)]:
            user.replace_all_uses_with(product)
            node.graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(_cast(product, value.dtype, node))
    _erase_unread(node)


def _one_hot(sums: RowSums, dtype: torch.dtype, like: Node) -> Node:
    """[R, N]: 1 where the place has the row's id, else 0."""
    given = ids = _flattened(sums.ids, [1, -1], like)
    if sums.wraps:
        is_negative = call_like(aten.lt.Scalar, (given, 0), like)
        from_end = call_like(aten.add.Tensor, (given, sums.rows), like)
        ids = call_like(aten.where.self, (is_negative, from_end, given), like)
    hits = call_like(aten.eq.Tensor, (ids, _rows(sums, like)), like)
    if sums.padding is not None:
        counts = call_like(aten.ne.Scalar, (given, sums.padding), like)
        hits = call_like(aten.bitwise_and.Tensor, (hits, counts), like)
    return _cast(hits, dtype, like)


def _rows(sums: RowSums, like: Node) -> Node:
    """[R, 1]: 0 to R - 1."""
    ids = sums.ids.meta["val"]
    numbers = call_like(
        prims.iota.default, (sums.rows,), like,
        start=0, step=1, dtype=ids.dtype, device=ids.device, requires_grad=False,
    )  # fmt: skip
    return call_like(aten.unsqueeze.default, (numbers, 1), like)


def _cast(node: Node, dtype: torch.dtype, like: Node) -> Node:
    if node.meta["val"].dtype == dtype:
        return node
    return call_like(prims.convert_element_type.default, (node, dtype), like)


def _flattened(node: Node, shape: list[int], like: Node) -> Node:
    """``node`` with the dimensions of places made one; a copy if they do not lie one behind the other."""
    value = node.meta["val"]
    places = value.dim() - (0 if shape[-1] == -1 else 1)
    longer = [dim for dim in range(places) if not same(value.shape[dim], 1)]
    if not all(
        same(value.stride(outer), value.stride(inner) * value.shape[inner]) for outer, inner in pairwise(longer)
    ):
        node = call_like(aten.clone.default, (node,), like, memory_format=torch.contiguous_format)
    return reshaped(node, shape, like)


def _between(last: Node, end: Node) -> Iterator[Node]:
    """The nodes behind ``last`` up to ``end``, from the end on."""
    while end is not last:
        yield end
        end = end.prev


def _erase_unread(node: Node) -> None:
    """Erase ``node``, if nobody reads it, and what was made for it alone."""
    if not node.users and node.target in (*_SUMS, *_PASSED_ON):
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        for source in sources:
            _erase_unread(source)
