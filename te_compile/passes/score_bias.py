"""What a model does to its attention scores, told to the queries, to one scale and to one bias of a fused kernel.

What was added to scores stays added, and where scores were overwritten a number that hides is added. A row that a mask
hides entirely needs care (``hidden_rows``): there the mask is shifted up to zero, and where the model forgets the
scores of such a row, the query is set to zero. The weights and the gradients are those of what is computed. (Autograd
does not see that an addition rounded the scores away, and would send queries and keys gradients; they get none.) A mask
that provably hides no row is used as it is.

ALiBi is often made in float32 and added to scores in 16 bits. Fused kernels read a bias in the dtype of the queries
alone, where -1447.3 and -1446.6 are one number. So each row of it is shifted first, until its largest element is zero,
which softmax does not see. What is rounded then by much belongs to keys of little weight: a bias of b counts with e^b,
and as far as scores make up for b, they are as large and the model itself rounded them. A bias that learns stays:
slopes sum gradients times positions, where the roundings of a gradient in 16 bits do not cancel as the numbers do.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_operands import AttentionOperands
from te_compile.passes.attention_scores import Addend, Factor, Fill, NotAttentionError, Step
from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.fold_masks import GUARDS, hides_no_row
from te_compile.passes.hidden_rows import check_sinks_beside, forgets_its_scores, hides, number_to_fill_with
from te_compile.passes.mask_numbers import HIDES_A_ROW, is_zero_or_hidden, may_hide
from te_compile.passes.writing import Writer


@dataclass
class ScoreBias:
    """The steps of one attention's scores so far: ``query`` and ``scale`` with what they multiplied, ``bias`` with what
    they added, None while that is nothing. ``hiding`` is the part of ``bias`` that hides keys, the same node where that
    is all of it."""

    operands: AttentionOperands
    query: Node
    scale: float
    bias: Node | None = None
    hiding: Node | None = None

    def take(self, step: Step) -> None:
        """Tell ``step`` to the queries, the scale and the bias."""
        if isinstance(step, Factor):
            if isinstance(step.by, Node):
                self.query = self._scaled(self.query, step)
            else:
                self.scale = self.scale / step.by if step.divides else self.scale * step.by
        is_same, is_hiding = self.hiding is self.bias, isinstance(step, Factor) or hides(step, self._changes)
        self.bias = self._stepped(self.bias, step)
        if is_same and is_hiding:
            self.hiding = self.bias
        elif is_hiding:
            self.hiding = self._stepped(self.hiding, step)

    def finish(self, key: Node) -> None:
        """Once all steps are told: make of query and bias what fused kernels read beside ``key``."""
        sinks = self.operands.found.scores.sinks
        if self.scale <= 0:
            why = (
                f"its scores are multiplied by {self.scale:g}, and fused kernels look for the largest before they scale"
            )
            raise NotAttentionError(f"{why}; negate the queries instead for a fused kernel")
        if self.bias is None:
            return
        if self.hiding is not None and not hides_no_row(self.hiding, self._changes):
            if sinks is None:
                self.query, self.bias = self._guarded(self.query, self.bias, self.hiding)
            else:
                check_sinks_beside(self.operands.found.scores.steps)
        if value_of(self.bias).dtype != self._dtype:
            if sinks is not None:
                wide = value_of(self.bias).dtype
                why = f"a bias in {wide} would be rounded to {self._dtype}, beside sinks that are not"
                raise NotAttentionError(f"{why}; cast it in the model for a fused kernel, if that is exact enough")
            self.bias = self._narrowed(self.bias)
        if not statically_known_true(value_of(self.bias).shape[-1] == value_of(key).shape[-2]):
            advice = "leave it out for a fused kernel: softmax cancels it"
            if sinks is not None:  # which it is not added to
                advice = "expand it to the keys for a fused kernel beside sinks"
            raise NotAttentionError(f"its bias is the same for every key; {advice}")

    @property
    def _write(self) -> Writer:
        return self.operands.write

    @property
    def _dtype(self) -> torch.dtype:
        return self.operands.dtype

    @property
    def _changes(self) -> dict[Node, bool]:
        return self.operands.changes

    # --- one step ---

    def _stepped(self, bias: Node | None, step: Step) -> Node | None:
        """``bias`` after ``step``; None while there is nothing to add to the scores."""
        if isinstance(step, Addend):
            return self._added(bias, step)
        if isinstance(step, Fill):
            return self._filled(bias, step)
        if bias is None:
            return None
        if value_of(bias).dtype != self._dtype and isinstance(step.by, Node) and value_of(step.by).requires_grad:
            why = f"a factor that learns would get a gradient from a bias that is rounded to {self._dtype}"
            raise NotAttentionError(f"{why}; cast the bias in the model for a fused kernel, if that is exact enough")
        return self._scaled(bias, step)

    def _scaled(self, x: Node, factor: Factor) -> Node:
        by = factor.by
        if is_tensor(by) and value_of(by).dim():
            by = self.operands.beside_scores(by, factor.dimensions)
        return self._write.call(operator.truediv if factor.divides else operator.mul, x, by)

    def _added(self, bias: Node | None, step: Addend) -> Node:
        new = self.operands.beside_scores(self._fitted(step.tensor), step.dimensions)
        if bias is None:
            return self._write.call(operator.neg, new) if step.negative else new
        return self._write.call(operator.sub if step.negative else operator.add, bias, new)

    def _filled(self, bias: Node | None, step: Fill) -> Node:
        if value_of(step.where).dtype != torch.bool:
            why = "its scores are overwritten where a tensor that is not bool says so"
            raise NotAttentionError(f"{why}; cast it to bool for a fused kernel")
        where = self.operands.beside_scores(step.where, step.dimensions)
        hidden = self._write.call(operator.invert, where) if step.inverted else where
        if bias is None:
            bias = self._write.call(torch.zeros_like, hidden, dtype=self._dtype)
        number = number_to_fill_with(step, self.operands.found.scores.steps, self._dtype)
        return self._write.method("masked_fill", bias, hidden, number)

    # --- in the dtype of the attention ---

    def _fitted(self, bias: Node) -> Node:
        """``bias`` in the dtype of the attention, where that changes nothing that it says."""
        dtype = value_of(bias).dtype
        if not dtype.is_floating_point:
            raise NotAttentionError(
                "what is added to its scores is no floating-point tensor; cast it for a fused kernel"
            )
        if self._dtype == torch.float16 and may_hide(bias, self._changes):
            why = "adding a mask in float16 does not swallow the scores that it hides"
            raise NotAttentionError(f"{why}; use bfloat16 for a fused kernel")
        if dtype == self._dtype:
            return bias
        if dtype.itemsize > self._dtype.itemsize:
            if not is_zero_or_hidden(bias, self._changes):
                self._check_rounding(bias)
                return bias  # it is rounded once all of it is known (_narrowed)
            bias = self._write.method("clamp", bias, min=torch.finfo(self._dtype).min)
        return self._write.method("to", bias, self._dtype)

    def _check_rounding(self, wide: Node) -> None:
        """Raise if ``wide``, a bias, says more than scores and gradients of this dtype do."""
        why, dtype = "", value_of(wide).dtype
        if value_of(self.operands.found.scores.nodes[0]).dtype != self._dtype:
            why = f"a bias in {dtype} would be rounded to {self._dtype}, which its scores are not"
        elif value_of(wide).requires_grad:
            why = f"a bias in {dtype} that learns would get a gradient that is rounded to {self._dtype}"
        if why:
            raise NotAttentionError(f"{why}; cast it in the model for a fused kernel, if that is exact enough")

    def _narrowed(self, bias: Node) -> Node:
        """``bias``, which is wider than the attention, in its dtype: what counts in a row is around zero by then."""
        peak = self._write.method("detach", self._write.method("amax", bias, -1, True))  # softmax does not see it
        shifted = self._write.call(operator.sub, bias, peak)
        shifted = self._write.method("clamp", shifted, min=torch.finfo(self._dtype).min)
        # Fused kernels read no mask whose keys do not lie side by side.
        return self._write.method("to", shifted, self._dtype, memory_format=torch.contiguous_format)

    # --- in rows that are hidden entirely ---

    def _guarded(self, query: Node, bias: Node, hiding: Node) -> tuple[Node, Node]:
        """Both for rows that ``hiding``, which is part of ``bias``, hides entirely: the mask is shifted up to zero, and
        where the model forgets the scores, so does the query."""
        found = self.operands.found
        limit = forgets_its_scores(found.scores.steps, found.softmax, self._changes)
        peak = self._write.method("detach", self._write.method("amax", hiding, -1, True))  # softmax does not see it
        rows = self._write.call(operator.le, peak, HIDES_A_ROW)
        shifted = self._write.call(operator.sub, bias, peak)
        guarded = self._write.call(torch.where, rows, shifted, bias)
        forgotten = rows if limit == HIDES_A_ROW else self._write.call(operator.le, peak, limit)
        query = self._write.method("masked_fill", query, forgotten, 0.0)
        query.meta[GUARDS] = guarded.meta[GUARDS] = True
        return query, guarded
