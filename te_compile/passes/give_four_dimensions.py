"""Give attention the four dimensions, batch, head, position and feature, that PyTorch's fused kernels ask for.

``F.scaled_dot_product_attention`` takes any number of leading dimensions. A model without heads hands over three, and
one that attends within windows or blocks five; PyTorch, up to 2.13 for three, has no fused kernel for either, computes
scores in float32 and stores them all. A single head is a view of the former. Of the latter all leading dimensions but
one become the batch, which is a view as well where that one is chosen so that the others lie behind one another in
memory. The result gets its dimensions back.

What stays as it is: operands that broadcast to each other, attention with a dropout, whose draws would be others, a
mask that would have to be copied for each part of the batch, and more than one leading dimension of symbolic size. So
do heads of more than 256 features where there are gradients: of the fused kernels the memory-efficient one alone takes
them, whose backward pass takes longer for them than products in float32 (``python -m benchmarks.odd_attention``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_calls import WIDEST_HEAD, attention_calls, has_sinks
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, is_tensor, size_hint, value_of, wrapped_kind
from te_compile.passes.side_effects import may_change
from te_compile.passes.writing import Writer

_LONGEST_GRID = 65535  # of CUDA, along the dimensions that fused kernels have for batch and heads


def give_four_dimensions(graph: Graph) -> int:
    """Rewrite calls of other than four dimensions; returns how many."""
    count, changes = 0, dict[Node, bool]()
    for attention in attention_calls(graph):
        if has_sinks(attention) or (torch.is_grad_enabled() and may_change(attention, changes)):
            continue
        operands: list[Any] = [argument(attention, place, name) for place, name in enumerate(("query", "key", "value"))]
        if not all(is_tensor(each) and not wrapped_kind(each) for each in operands):
            continue
        found = _way(attention, operands)
        if found is not None:
            _rewrite(attention, operands, found)
            count += 1
    return count


@dataclass(frozen=True)
class _Way:
    """How many ``dimensions`` there are, which of them is for ``heads``, None if none is, and what the others are."""

    dimensions: int
    heads: int | None
    batch: list[int]

    @property
    def order(self) -> list[int]:
        """The dimensions with that of the heads behind the others."""
        leading = range(self.dimensions - 2)
        behind = [] if self.heads is None else [self.heads]
        return [*(each for each in leading if each != self.heads), *behind, self.dimensions - 2, self.dimensions - 1]

    def given(self, write: Writer, x: Node) -> Node:
        """Queries, keys, values or a mask of all dimensions in four."""
        if self.heads is None:
            x = x if self.dimensions == 3 else write.method("unsqueeze", x, 0)
            return write.method("unsqueeze", x, 1)
        if self.order != sorted(self.order):
            x = write.method("permute", x, *self.order)
        return write.method("flatten", x, 0, self.dimensions - 4)

    def taken_back(self, write: Writer, x: Node) -> Node:
        """The result in the dimensions of the model."""
        if self.heads is None:
            x = write.method("squeeze", x, 1)
            return x if self.dimensions == 3 else write.method("squeeze", x, 0)
        x = write.method("unflatten", x, 0, self.batch)
        back = [self.order.index(each) for each in range(self.dimensions)]
        return x if back == sorted(back) else write.method("permute", x, *back)


def _way(attention: Node, operands: Sequence[Node]) -> _Way | None:
    """How ``attention`` gets four dimensions; None if it has them, or cannot."""
    values: list[Tensor] = [value_of(each) for each in operands]
    dimensions, shares_heads = values[0].dim(), argument(attention, 7, "enable_gqa", False) is not False
    if dimensions == 4 or dimensions < 2 or any(value.dim() != dimensions for value in values):
        return None
    if argument(attention, 4, "dropout_p", 0.0) != 0.0:
        return None
    if torch.is_grad_enabled() and any(size_hint(value.shape[-1]) > WIDEST_HEAD for value in values):
        return None
    same_dimensions = dimensions - 3 if shares_heads else dimensions - 2
    leading = [value.shape[:same_dimensions] for value in values]
    if not all(same_sizes(each, leading[0]) for each in leading[1:]) or (shares_heads and dimensions < 4):
        return None
    mask = argument(attention, 3, "attn_mask")
    heads = None if dimensions < 4 else dimensions - 3
    if heads is not None and mask is None and not shares_heads:
        heads = _heads_that_leave_a_view(values)
    batch = [values[0].shape[each] for each in range(dimensions - 2) if each != heads]
    others = [size if isinstance(size, int) else -1 for size in batch]
    way = _Way(dimensions, heads, others)
    if others.count(-1) > (1 if heads is not None else dimensions) or (mask is not None and not _takes_mask(way, mask)):
        return None
    extents = [math.prod(map(size_hint, batch)), 1 if heads is None else size_hint(values[0].shape[heads])]
    return way if max(extents) <= _LONGEST_GRID else None


def _heads_that_leave_a_view(values: Sequence[Tensor]) -> int:
    """The leading dimension without which the others of all operands are one in memory; the last, if there is none."""
    leading = values[0].dim() - 2
    for heads in range(leading - 1, -1, -1):
        others = [each for each in range(leading) if each != heads]
        if all(_lie_as_one(value, others) for value in values):
            return heads
    return leading - 1


def _lie_as_one(x: Tensor, dimensions: Sequence[int]) -> bool:
    strides = ((x.stride(a), x.shape[b] * x.stride(b)) for a, b in itertools.pairwise(dimensions))
    return all(statically_known_true(stride == wanted) for stride, wanted in strides)


def _takes_mask(way: _Way, mask: Any) -> bool:
    """Can ``mask`` be read as one of four dimensions, without a copy for each part of the batch?"""
    if not is_tensor(mask) or wrapped_kind(mask):
        return False
    shape = value_of(mask).shape
    if len(shape) <= (2 if way.heads is None else 3):
        return len(shape) > 0  # it broadcasts along the batch
    if len(shape) != way.dimensions:
        return False
    if way.heads is None:
        return True
    sizes = [size if isinstance(size, int) else -1 for size in shape[: way.dimensions - 3]]
    return (way.batch == sizes and -1 not in sizes) or all(size == 1 for size in sizes)


def _rewrite(attention: Node, operands: Sequence[Node], way: _Way) -> None:
    write = Writer(attention)
    query, key, value = (way.given(write, each) for each in operands)
    mask = argument(attention, 3, "attn_mask")
    if mask is not None and value_of(mask).dim() == 1:  # which in four dimensions PyTorch does not take
        mask = write.method("unsqueeze", mask, 0)
    elif mask is not None and value_of(mask).dim() == way.dimensions > 2:
        mask = way.given(write, mask)
    new = write.product(
        F.scaled_dot_product_attention, query, key, value, mask, 0.0, argument(attention, 5, "is_causal", False),
        scale=argument(attention, 6, "scale"), enable_gqa=argument(attention, 7, "enable_gqa", False),
    )  # fmt: skip
    result = write.laid_out_like(way.taken_back(write, new), attention)
    attention.replace_all_uses_with(result)
    attention.graph.erase_node(attention)
