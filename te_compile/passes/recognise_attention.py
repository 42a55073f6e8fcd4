"""Turn attention that a model spells out into ``F.scaled_dot_product_attention``.

    scores = q @ k.mT * scale (+ bias or mask)            or bmm, baddbmm, einsum, the scale on q, a division, in place
    weights = dropout(softmax(scores, float32).to(…))     or softmax(cat([scores, sinks]))[..., :-1]
    result = weights @ v

In high precision this reads and writes [B, H, S, S] half a dozen times and is the slowest part of a model whose linears
run in FP8; the fused kernels never store it. The rewrite is for attention that is *exactly* this one. Scores that go
through a tanh, weights that somebody else reads, a factor for each head after softmax: all of it stays, with the reason
as ``meta[STAYS]`` on the softmax.

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

Sinks (ops/sink_attention.py) are what queries look at where no key is for them; with them ``te::sink_attention`` takes
the place. A row that a mask hides entirely has weights of zero then, and needs no care.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops.sink_attention import SINK_ATTENTION
from te_compile.passes.attention_scores import (
    SCORES_ARE_READ,
    Addend,
    Factor,
    Fill,
    NotAttentionError,
    Scores,
    Sinks,
    Step,
    UnusualScoresError,
    drops_sinks,
    same_sizes,
    scores_behind,
)
from te_compile.passes.captured_nodes import argument, called, is_tensor, name_called, value_of, wrapped_kind
from te_compile.passes.contractions import Contraction, Operand, contractions_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.fold_masks import GUARDS, hides_no_row
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.hidden_rows import check_sinks_beside, forgets_its_scores, hides, number_to_fill_with
from te_compile.passes.mask_numbers import HIDES_A_ROW, is_zero_or_hidden, may_hide, number_in
from te_compile.passes.scales_of_sinks import scaled_by_sinks
from te_compile.passes.side_effects import changes_after, undisturbed
from te_compile.passes.writing import Writer, refusals_are_expected
from te_compile.passes.written_tensors import writes

RECOGNISED = "te_recognised_attention"
"""Meta key of an attention that a model had spelled out."""

STAYS = "te_attention_stays"
"""Meta key of a softmax: why the attention around it was left as the model wrote it."""

_RESHAPES = ("view", "reshape", "unflatten", "flatten")
_ANY_LAYOUT = ("contiguous", "reshape", "flatten", "linear", "matmul", "clone")  # what takes any strides


@dataclass
class _Found:
    """Attention as the model wrote it: scores, softmax, and the way of the weights to their product with the values."""

    softmax: Node
    scores: Scores
    output: Node
    product: Contraction
    dropout: float
    nodes: list[Node] = field(default_factory=list)


def _is_softmax(node: Node) -> bool:
    if called(node) != "softmax" or not is_tensor(node) or not is_tensor(node.args[0] if node.args else None):
        return False
    dtype = argument(node, 3, "dtype") if node.target is F.softmax else argument(node, 2, "dtype")
    wide = dtype is None or dtype.is_floating_point
    return wide and argument(node, 1, "dim") in (-1, value_of(node).dim() - 1)


def _dropout_of(node: Node) -> float | None:
    """The probability with which ``node`` drops elements, None if that is not what it does."""
    if node.target is not F.dropout and node.target is not torch.dropout:
        return None
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", node.kwargs.get("train", True))
    if not isinstance(p, (int, float)) or not isinstance(training, bool):
        return None
    return float(p) if training else 0.0


def _keeps_rows(node: Node, source: Node) -> bool:
    """Does ``node`` do nothing to ``source`` but view batch and heads in one dimension or in two?"""
    known = node.op == "call_method" and node.target in _RESHAPES and source in node.args[:1]
    return known and same_sizes(value_of(node).shape[-2:], value_of(source).shape[-2:])


def _output_of(softmax: Node, sinks: Sinks | None) -> tuple[Node, Contraction, float, list[Node]]:
    """(the product of the weights with the values, as a contraction, dropout, the nodes between)."""
    weights, dropout, nodes = softmax, 0.0, [softmax]
    while True:
        if len(weights.users) != 1:
            raise NotAttentionError(
                "its weights are read elsewhere too; set output_attentions=False, need_weights=False for a fused one"
            )
        user = next(iter(weights.users))
        if sinks is not None and drops_sinks(user, weights, sinks):
            sinks, weights = None, user
            nodes.append(user)
            continue
        for product in contractions_of(user):
            if product.left.node is weights and product.left.is_plain and product.addend is None:
                if sinks is not None:
                    raise NotAttentionError(
                        "its sinks have values of their own; nothing to do: no fused kernel has them"
                    )
                return user, product, dropout, [*nodes, user]
        p = _dropout_of(user)
        if p and dropout:
            raise NotAttentionError("its weights are dropped twice; use one dropout for a fused kernel")
        is_harmless = is_cast(user) and value_of(user).is_floating_point()
        if p is None and not is_harmless and not (is_tensor(user) and _keeps_rows(user, weights)):
            why = f"its weights go through {name_called(user)} before they meet the values"
            raise NotAttentionError(f"{why}; nothing to do: no fused kernel computes that")
        dropout = p or dropout
        weights = user
        nodes.append(user)


def _scaled(
    softmax: Node, output: tuple[Node, Contraction, float, list[Node]]
) -> tuple[tuple[Node, Contraction, float, list[Node]], Sinks | None]:
    """``output`` (of ``_output_of``) with what scales it by sinks, and these; as it is where nothing does."""
    node, product, dropout, nodes = output
    in_order = product.result == tuple(range(len(product.result)))
    scaled = scaled_by_sinks(softmax, node) if in_order else None
    if scaled is None:
        return output, None
    return (scaled.result, product, dropout, [*nodes, *scaled.nodes]), scaled.sinks


def _found(softmax: Node, changes: dict[Node, bool]) -> _Found | None:
    """The attention around ``softmax``, None if nothing about it looks like one; raises where it is an unusual one."""
    problems, is_unusual = [], False
    scores = output = None
    try:
        scores = scores_behind(softmax.args[0])
        if isinstance(softmax.args[0], Node) and len(softmax.args[0].users) > 1:
            problems.append(SCORES_ARE_READ)
    except NotAttentionError as error:
        problems.append(str(error))
        is_unusual = isinstance(error, UnusualScoresError)
    try:
        output = _output_of(softmax, None if scores is None else scores.sinks)
        if scores is not None and scores.sinks is None and not scores.is_shifted:
            output, scores.sinks = _scaled(softmax, output)
            problems = [] if scores.sinks is not None else problems
    except NotAttentionError as error:
        problems.append(str(error))
    if scores is None and output is None and not is_unusual:
        return None
    if scores is None or output is None or problems:
        raise NotAttentionError(problems[0])
    node, product, dropout, after = output
    found = _Found(softmax, scores, node, product, dropout, [*scores.nodes, *after])
    if scores.sinks is not None and dropout:
        raise NotAttentionError("its weights beside sinks are dropped; set attention_dropout=0 for a fused kernel")
    if product.alpha != 1.0:
        raise NotAttentionError("its result is scaled; scale the values instead for a fused kernel")
    wide, narrow = (value_of(each).dtype for each in (softmax.args[0], softmax))
    # What hides a key may be infinite in a dtype that reaches less far, and a hidden row no number.
    if wide.is_floating_point and torch.finfo(narrow).max < torch.finfo(wide).max:
        raise NotAttentionError(f"its softmax narrows {wide} to {narrow}; let it keep that for a fused kernel")
    beside = [step.tensor for step in scores.steps if isinstance(step, Addend)]
    beside += [step.where for step in scores.steps if isinstance(step, Fill)]
    beside += [step.by for step in scores.steps if isinstance(step, Factor) and isinstance(step.by, Node)]
    beside += [scores.sinks.tensor] if scores.sinks is not None else []
    reads = (scores.product.left.node, scores.product.right.node, product.right.node, *beside)
    if not undisturbed(scores.nodes[0], node, found.nodes, reads):
        why = "something is changed in place, or gradients or autocast are switched, inside it"
        raise NotAttentionError(f"{why}; move that out of it for a fused kernel")
    # Products of batches keep copies of some operands for their gradients; attention keeps the operands themselves.
    if any(changes_after(tensor, node, changes) for tensor in reads):
        raise NotAttentionError("what it reads is changed in place behind it; write to a copy for a fused kernel")
    if changes_after(node, node, changes):  # attention keeps its result for its gradients, a product does not
        raise NotAttentionError("its result is changed in place; write to a copy for a fused kernel")
    return found


@dataclass
class _Rewriter:
    """Writes one attention anew. ``batch``: batch and heads, None where the model has them in one dimension alone;
    ``changes``: what ``may_change`` remembers."""

    found: _Found
    write: Writer
    dtype: torch.dtype
    batch: tuple[Any, Any] | None
    changes: dict[Node, bool]

    # --- operands, all [B, H, …, …] ---

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
            if is_scaled and node.target in (operator.mul, torch.mul, "mul") and self._same_shape(node):
                factor *= number or 1.0
            elif is_scaled and node.target in (operator.truediv, torch.div, "div") and self._same_shape(node):
                factor /= number or 1.0
            elif not (is_cast(node) and value_of(node.args[0]).dtype == self.dtype):
                return operand, factor
            source = node.args[0]
            assert isinstance(source, Node)
            operand = Operand(source, operand.order)

    def _same_shape(self, node: Node) -> bool:
        return same_sizes(value_of(node).shape, value_of(node.args[0]).shape)

    def _sizes(self) -> list[int]:
        """The batch as arguments of a view: at most one size may be symbolic."""
        assert self.batch is not None
        sizes = [size if isinstance(size, int) else -1 for size in self.batch]
        if sizes.count(-1) > 1:
            raise NotAttentionError(
                "batch and heads are both of symbolic size; compile with dynamic=False for a fused kernel"
            )
        return sizes

    def _split(self, x: Node) -> Node:
        """``x`` [B·H, …, …] with heads of their own: what it is a view of, if that has them."""
        if self.batch is None:
            return self.write.method("unsqueeze", x, 1)
        if x.op == "call_method" and x.target in ("view", "reshape", "flatten") and is_tensor(x.args[0]):
            source = x.args[0]
            assert isinstance(source, Node)
            if same_sizes(value_of(source).shape, (*self.batch, *value_of(x).shape[-2:])) and self._readable(x):
                return source
        return self.write.method("unflatten", x, 0, self._sizes())

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

    def _beside_scores(self, x: Node, dimensions: int) -> Node:
        """A mask, bias or factor as it broadcasts to scores [B, H, Q, K]; it met scores of ``dimensions``."""
        value = value_of(x)
        if dimensions == 3 and value.dim() == 3 and not statically_known_true(value.shape[0] == 1):
            return self._split(x)
        if dimensions not in (3, 4):
            raise NotAttentionError(f"its scores have {dimensions} dimensions; give them 4 for a fused kernel")
        for _ in range(4 - value.dim()):
            x = self.write.method("unsqueeze", x, 0)
        return x

    # --- the steps from product to softmax, told to queries and to a bias ---

    def _fitted(self, bias: Node) -> Node:
        """``bias`` in the dtype of the attention, where that changes nothing that it says."""
        dtype = value_of(bias).dtype
        if not dtype.is_floating_point:
            raise NotAttentionError(
                "what is added to its scores is no floating-point tensor; cast it for a fused kernel"
            )
        if self.dtype == torch.float16 and may_hide(bias, self.changes):
            why = "adding a mask in float16 does not swallow the scores that it hides"
            raise NotAttentionError(f"{why}; use bfloat16 for a fused kernel")
        if dtype == self.dtype:
            return bias
        if dtype.itemsize > self.dtype.itemsize:
            if not is_zero_or_hidden(bias, self.changes):
                self._check_rounding(bias)
                return bias  # it is rounded once all of it is known (_narrowed)
            bias = self.write.method("clamp", bias, min=torch.finfo(self.dtype).min)
        return self.write.method("to", bias, self.dtype)

    def _check_rounding(self, wide: Node) -> None:
        """Raise if ``wide``, a bias, says more than scores and gradients of this dtype do."""
        why, dtype = "", value_of(wide).dtype
        if value_of(self.found.scores.nodes[0]).dtype != self.dtype:
            why = f"a bias in {dtype} would be rounded to {self.dtype}, which its scores are not"
        elif value_of(wide).requires_grad:
            why = f"a bias in {dtype} that learns would get a gradient that is rounded to {self.dtype}"
        if why:
            raise NotAttentionError(f"{why}; cast it in the model for a fused kernel, if that is exact enough")

    def _narrowed(self, bias: Node) -> Node:
        """``bias``, which is wider than the attention, in its dtype: what counts in a row is around zero by then."""
        peak = self.write.method("detach", self.write.method("amax", bias, -1, True))  # softmax does not see it
        shifted = self.write.call(operator.sub, bias, peak)
        shifted = self.write.method("clamp", shifted, min=torch.finfo(self.dtype).min)
        # Fused kernels read no mask whose keys do not lie side by side.
        return self.write.method("to", shifted, self.dtype, memory_format=torch.contiguous_format)

    def _scaled(self, x: Node, factor: Factor) -> Node:
        by = factor.by
        if isinstance(by, Node) and value_of(by).dim():
            by = self._beside_scores(by, factor.dimensions)
        return self.write.call(operator.truediv if factor.divides else operator.mul, x, by)

    def _added(self, bias: Node | None, step: Addend) -> Node:
        new = self._beside_scores(self._fitted(step.tensor), step.dimensions)
        if bias is None:
            return self.write.call(operator.neg, new) if step.negative else new
        return self.write.call(operator.sub if step.negative else operator.add, bias, new)

    def _filled(self, bias: Node | None, step: Fill) -> Node:
        if value_of(step.where).dtype != torch.bool:
            why = "its scores are overwritten where a tensor that is not bool says so"
            raise NotAttentionError(f"{why}; cast it to bool for a fused kernel")
        where = self._beside_scores(step.where, step.dimensions)
        hidden = self.write.call(operator.invert, where) if step.inverted else where
        if bias is None:
            bias = self.write.call(torch.zeros_like, hidden, dtype=self.dtype)
        number = number_to_fill_with(step, self.found.scores.steps, self.dtype)
        return self.write.method("masked_fill", bias, hidden, number)

    def attention(self) -> Node:
        """The new attention, [B, H, Q, V]."""
        product = self.found.scores.product
        left, scale = self._stripped(product.left)
        right, factor = self._stripped(product.right.swapped())
        scale *= factor * product.alpha
        query, key = self._operand(left), self._operand(right)
        value = self._operand(self.found.product.right.before_transpositions(self._readable))
        bias = hiding = None
        for step in self.found.scores.steps:
            if isinstance(step, Factor):
                if isinstance(step.by, Node):
                    query = self._scaled(query, step)
                else:
                    scale = scale / step.by if step.divides else scale * step.by
            is_same, is_hiding = hiding is bias, isinstance(step, Factor) or hides(step, self.changes)
            bias = self._stepped(bias, step)
            if is_same and is_hiding:
                hiding = bias
            elif is_hiding:
                hiding = self._stepped(hiding, step)
        if scale <= 0:
            why = f"its scores are multiplied by {scale:g}, and fused kernels look for the largest before they scale"
            raise NotAttentionError(f"{why}; negate the queries instead for a fused kernel")
        sinks = self.found.scores.sinks
        if bias is not None and hiding is not None and not hides_no_row(hiding, self.changes):
            if sinks is None:
                query, bias = self._guarded(query, bias, hiding)
            else:
                check_sinks_beside(self.found.scores.steps)
        if bias is not None and value_of(bias).dtype != self.dtype:
            if sinks is not None:
                why = f"a bias in {value_of(bias).dtype} would be rounded to {self.dtype}, beside sinks that are not"
                raise NotAttentionError(f"{why}; cast it in the model for a fused kernel, if that is exact enough")
            bias = self._narrowed(bias)
        if bias is not None and not statically_known_true(value_of(bias).shape[-1] == value_of(key).shape[-2]):
            advice = "leave it out for a fused kernel: softmax cancels it"
            if sinks is not None:  # which it is not added to
                advice = "expand it to the keys for a fused kernel beside sinks"
            raise NotAttentionError(f"its bias is the same for every key; {advice}")
        if sinks is not None:
            return self._beside_sinks(query, key, value, bias, scale, sinks)
        dropout = self.found.dropout
        return self.write.call(
            F.scaled_dot_product_attention, query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
        )

    def _beside_sinks(self, query: Node, key: Node, value: Node, bias: Node | None, scale: float, sinks: Sinks) -> Node:
        """The call of our operator, to which no autocast casts operands."""
        if self.dtype == torch.float64:
            why = "its weights beside sinks are float64, and fused kernels compute them in float32"
            raise NotAttentionError(f"{why}; nothing to do: it stays right")
        cast = [
            each if value_of(each).dtype == self.dtype else self.write.method("to", each, self.dtype)
            for each in (query, key, value)
        ]
        tensor = sinks.tensor if sinks.is_column else self.write.method("unsqueeze", sinks.tensor, -1)
        column = self._beside_scores(tensor, sinks.dimensions)
        is_wide = value_of(self.found.scores.nodes[0]).dtype == torch.float32
        return self.write.call(SINK_ATTENTION, *cast, attn_mask=bias, scale=scale, sinks=column, wide=is_wide)

    def _stepped(self, bias: Node | None, step: Step) -> Node | None:
        """``bias`` after ``step``; None while there is nothing to add to the scores."""
        if isinstance(step, Addend):
            return self._added(bias, step)
        if isinstance(step, Fill):
            return self._filled(bias, step)
        if bias is None:
            return None
        if value_of(bias).dtype != self.dtype and isinstance(step.by, Node) and value_of(step.by).requires_grad:
            why = f"a factor that learns would get a gradient from a bias that is rounded to {self.dtype}"
            raise NotAttentionError(f"{why}; cast the bias in the model for a fused kernel, if that is exact enough")
        return self._scaled(bias, step)

    def _guarded(self, query: Node, bias: Node, hiding: Node) -> tuple[Node, Node]:
        """Both for rows that ``hiding``, which is part of ``bias``, hides entirely: the mask is shifted up to zero, and
        where the model forgets the scores, so does the query."""
        limit = forgets_its_scores(self.found.scores.steps, self.found.softmax, self.changes)
        peak = self.write.method("detach", self.write.method("amax", hiding, -1, True))  # softmax does not see it
        rows = self.write.call(operator.le, peak, HIDES_A_ROW)
        shifted = self.write.call(operator.sub, bias, peak)
        guarded = self.write.call(torch.where, rows, shifted, bias)
        forgotten = rows if limit == HIDES_A_ROW else self.write.call(operator.le, peak, limit)
        query = self.write.method("masked_fill", query, forgotten, 0.0)
        query.meta[GUARDS] = guarded.meta[GUARDS] = True
        return query, guarded


def _batch(found: _Found) -> tuple[Any, Any] | None:
    """Batch and heads as two sizes, wherever the model has them apart."""
    candidates: list[Node] = [*found.nodes, *found.output.users]
    operands = (found.scores.product.left.node, found.scores.product.right.node, found.product.right.node)
    for operand in operands:
        if operand.op == "call_method" and operand.target in ("view", "reshape", "flatten"):
            source = operand.args[0]
            if is_tensor(source) and _keeps_rows(operand, source):
                candidates.append(source)
    for node in candidates:
        value = value_of(node)
        is_view = node not in found.output.users or _keeps_rows(node, found.output)
        if isinstance(value, Tensor) and value.dim() == 4 and is_view:
            return value.shape[0], value.shape[1]
    return None


def _takes_any_layout(node: Node) -> bool:
    """Is every use of ``node`` one that does not care about strides?"""
    return all(
        (called(user) in ("transpose", "permute", "swapaxes") and _takes_any_layout(user))
        or called(user) in _ANY_LAYOUT
        for user in node.users
    )


def _rewrite(found: _Found, changes: dict[Node, bool]) -> None:
    """Put the new attention where the model's result stood; raises, and changes nothing, where it would be another."""
    old, write = found.output, Writer(found.output)
    try:
        with refusals_are_expected():
            new = _Rewriter(found, write, value_of(old).dtype, _batch(found), changes).attention()
            joined = write.method("flatten", new, 0, 1) if value_of(old).dim() == 3 else new
            result = Operand(joined, found.product.result).written(write)
        # Autocast that begins inside the graph is not in force here; what it casts would come out in another dtype.
        if value_of(result).dtype != value_of(old).dtype or not same_sizes(value_of(result).shape, value_of(old).shape):
            raise NotAttentionError(
                "its operands are of several dtypes or shapes; cast them to one dtype for a fused kernel"
            )
    except NotAttentionError:
        write.take_back()
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        write.take_back()
        why = str(error).partition("\n")[0]
        raise NotAttentionError(f"PyTorch refuses it as a fused call ({why}); nothing to do: it stays right") from error
    new.meta[RECOGNISED] = True
    for user in list(old.users):
        in_order = found.product.result == tuple(range(len(found.product.result)))
        if in_order and _keeps_rows(user, old) and same_sizes(value_of(user).shape, value_of(new).shape):
            _replace(write, user, new)
            old.graph.erase_node(user)
    _replace(write, old, result)
    for node in [*reversed(write.written), *reversed(found.nodes)]:
        if not node.users:
            old.graph.erase_node(node)
    for operand in (found.scores.product.left, found.scores.product.right, found.product.right):
        _erase_unused(operand.node)


def _erase_unused(node: Node) -> None:
    """Erase ``node`` and what it alone was made from, as far as that is a view, a scale or a cast."""
    while node.op in ("call_function", "call_method") and not node.users and not writes(node):
        source = node.args[0]
        node.graph.erase_node(node)
        if not isinstance(source, Node):
            return
        node = source


def _replace(write: Writer, old: Node, new: Node) -> None:
    """``new`` for ``old``, in the order in memory that ``old`` had where that may show, as in a view of it."""
    if old.users:
        old.replace_all_uses_with(new if _takes_any_layout(old) else write.in_order_of(new, old))


def recognise_attention(graph: Graph) -> int:
    """Replace attention that is spelled out by ``F.scaled_dot_product_attention``; returns how many times."""
    count, changes = 0, dict[Node, bool]()
    left = transforms_around(graph)
    for softmax in list(graph.nodes):
        if not _is_softmax(softmax) or softmax in left or wrapped_kind(softmax):
            continue
        try:
            found = _found(softmax, changes)
            if found is not None:
                _rewrite(found, changes)
                count += 1
        except NotAttentionError as why:
            softmax.meta[STAYS] = str(why)
    return count
