"""Queries, keys and values [B, H, …, …] of an attention that a model spells out, as fused kernels take them.

A model may have batch and heads in one dimension, scale queries or keys before their product, or widen them for it. The
operands are read from before all of that where they can still be read, and what was a scale there is one of the scores.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_scores import NotAttentionError, same_sizes
from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.contractions import Operand
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.fused_attention_gains import check_that_scores_are_large
from te_compile.passes.mask_numbers import number_in
from te_compile.passes.side_effects import changes_after, undisturbed
from te_compile.passes.softmax_attention import SoftmaxAttention, keeps_rows
from te_compile.passes.writing import Writer

_VIEWS = ("view", "reshape", "flatten")


class AttentionOperands:
    """Writes what one attention reads. ``dtype`` is that of its result; ``batch`` its batch and heads, None where the
    model has them in one dimension alone; ``changes`` what ``may_change`` remembers."""

    def __init__(self, found: SoftmaxAttention, write: Writer, changes: dict[Node, bool]) -> None:
        self.found, self.write, self.changes = found, write, changes
        self.dtype: torch.dtype = value_of(found.output).dtype
        self.batch = _batch(found)

    def written(self) -> tuple[Node, Node, Node, float]:
        """Queries, keys and values, and the factor between their product and the model's."""
        product = self.found.scores.product
        left, of_left = self._stripped(product.left)
        right, of_right = self._stripped(product.right.swapped())
        operands = (left, right, self.found.product.right.before_transpositions(self._readable))
        query, key, value = (self._in_rows(self._operand(each)) for each in operands)
        check_that_scores_are_large(key)
        return query, key, value, of_left * (of_right * product.alpha)

    def beside_scores(self, x: Node, dimensions: int) -> Node:
        """A mask, bias or factor as it broadcasts to scores [B, H, Q, K]; it met scores of ``dimensions``."""
        value = value_of(x)
        if dimensions == 3 and value.dim() == 3 and not statically_known_true(value.shape[0] == 1):
            return self._split(x)
        if dimensions not in (3, 4):
            raise NotAttentionError(f"its scores have {dimensions} dimensions; give them 4 for a fused kernel")
        for _ in range(4 - value.dim()):
            x = self.write.method("unsqueeze", x, 0)
        return x

    def _readable(self, node: Node) -> bool:
        """Can what ``node`` is made from be read in its place, where the new attention stands?"""
        output, sources = self.found.output, node.all_input_nodes
        if any(changes_after(source, output, self.changes) for source in sources):
            return False
        return undisturbed(node, output, self.found.nodes, sources)

    def _stripped(self, operand: Operand) -> tuple[Operand, float]:
        """``operand`` from before its transpositions, its scale and its widening, and that scale."""
        factor = 1.0
        while True:
            operand = operand.before_transpositions(self._readable)
            node = operand.node
            if not self._readable(node) or node.op not in ("call_function", "call_method"):
                return operand, factor
            number = number_in(node.args[1], self.changes) if len(node.args) == 2 and len(node.users) == 1 else None
            is_scaled = number and is_tensor(node.args[0]) and not node.kwargs
            if is_scaled and node.target in (operator.mul, torch.mul, "mul") and _keeps_shape(node):
                factor *= number or 1.0
            elif is_scaled and node.target in (operator.truediv, torch.div, "div") and _keeps_shape(node):
                factor /= number or 1.0
            elif not (is_cast(node) and value_of(node.args[0]).dtype == self.dtype):
                return operand, factor
            source = node.args[0]
            assert isinstance(source, Node)
            operand = Operand(source, operand.order)

    def _operand(self, operand: Operand) -> Node:
        x = operand.written(self.write)
        dimensions = value_of(x).dim()
        if dimensions == 3:
            return self._split(x)
        if dimensions != 4 or self.batch is None:
            raise NotAttentionError(f"its operands have {dimensions} dimensions; give them 4 for a fused kernel")
        sizes = value_of(x).shape[:2]
        if same_sizes(sizes, self.batch):
            return x
        wanted = [-1 if statically_known_true(a == b) else b for a, b in zip(sizes, self.batch, strict=True)]
        if not all(isinstance(size, int) for size in wanted):
            raise NotAttentionError(
                "a batch of symbolic size is broadcast; compile with dynamic=False for a fused kernel"
            )
        return self.write.method("expand", x, *wanted, -1, -1)

    def _in_rows(self, x: Node) -> Node:
        """``x`` with the features of a position side by side, a copy where channels lie before positions: of such
        operands no fused kernel reads any."""
        stride, width = value_of(x).stride(-1), value_of(x).shape[-1]
        lies_otherwise = isinstance(stride, int) and stride != 1 and not statically_known_true(width == 1)
        return self.write.method("contiguous", x) if lies_otherwise else x

    def _split(self, x: Node) -> Node:
        """``x`` [B·H, …, …] with heads of their own: what it is a view of, if that has them."""
        if self.batch is None:
            return self.write.method("unsqueeze", x, 1)
        if x.op == "call_method" and x.target in _VIEWS and is_tensor(x.args[0]):
            source = x.args[0]
            assert isinstance(source, Node)
            if same_sizes(value_of(source).shape, (*self.batch, *value_of(x).shape[-2:])) and self._readable(x):
                return source
        return self.write.method("unflatten", x, 0, self._sizes())

    def _sizes(self) -> list[int]:
        """The batch as arguments of a view: at most one size may be symbolic."""
        assert self.batch is not None
        sizes = [size if isinstance(size, int) else -1 for size in self.batch]
        if sizes.count(-1) > 1:
            raise NotAttentionError(
                "batch and heads are both of symbolic size; compile with dynamic=False for a fused kernel"
            )
        return sizes


def _keeps_shape(node: Node) -> bool:
    return same_sizes(value_of(node).shape, value_of(node.args[0]).shape)


def _batch(found: SoftmaxAttention) -> tuple[Any, Any] | None:
    """Batch and heads as two sizes, wherever the model has them apart."""
    candidates: list[Node] = [*found.nodes, *found.output.users]
    operands = (found.scores.product.left.node, found.scores.product.right.node, found.product.right.node)
    for operand in operands:
        if operand.op == "call_method" and operand.target in _VIEWS:
            source = operand.args[0]
            if is_tensor(source) and keeps_rows(operand, source):
                candidates.append(source)
    for node in candidates:
        value = value_of(node)
        is_view = node not in found.output.users or keeps_rows(node, found.output)
        if isinstance(value, Tensor) and value.dim() == 4 and is_view:
            return value.shape[0], value.shape[1]
    return None
