"""Attention as a model spells it out: scores, softmax, and the way of the weights to their product with the values.

    scores = q @ k.mT * scale (+ bias or mask)            or bmm, baddbmm, einsum, the scale on q, a division, in place
    weights = dropout(softmax(scores, float32).to(…))     or softmax(cat([scores, sinks]))[..., :-1]
    result = weights @ v

It is looked for around each softmax: backwards to the product of queries and keys (``attention_scores``), and forwards
to the product with the values. Nothing else may read what lies between, and nothing may be written to meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.attention_scores import (
    Addend,
    Factor,
    Fill,
    NotAttentionError,
    Scores,
    Sinks,
    UnusualScoresError,
    drops_sinks,
    same_sizes,
    scores_behind,
    why_not_alone,
)
from te_compile.passes.captured_nodes import argument, called, is_tensor, name_called, settled_number, value_of
from te_compile.passes.contractions import Contraction, Operand, contractions_of, order_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.result_readers import all_reached, keeps_values, reached
from te_compile.passes.scales_of_sinks import scaled_by_sinks
from te_compile.passes.side_effects import changes_after, undisturbed

_RESHAPES = ("view", "reshape", "unflatten", "flatten")


@dataclass
class _Output:
    """The product of the weights with the values, ``node`` as the contraction ``product``; ``nodes``: the softmax, it
    and those between, which drop weights with probability ``dropout``."""

    node: Node
    product: Contraction
    dropout: float
    nodes: list[Node]


@dataclass
class SoftmaxAttention:
    """One attention that a model spells out. ``product``: ``output`` as weights times values; ``nodes``: all from the
    scores to it."""

    softmax: Node
    scores: Scores
    output: Node
    product: Contraction
    dropout: float
    nodes: list[Node] = field(default_factory=list)

    @property
    def reads(self) -> tuple[Node, ...]:
        """What it is computed from: queries, keys, values, and what meets the scores."""
        return (self.scores.product.left.node, self.scores.product.right.node, self.product.right.node, *self._beside())

    def _beside(self) -> Iterator[Node]:
        steps = self.scores.steps
        yield from (step.tensor for step in steps if isinstance(step, Addend))
        yield from (step.where for step in steps if isinstance(step, Fill))
        yield from (step.by for step in steps if isinstance(step, Factor) and isinstance(step.by, Node))
        if self.scores.sinks is not None:
            yield self.scores.sinks.tensor


def attention_around(softmax: Node, changes: dict[Node, bool]) -> SoftmaxAttention | None:
    """The attention around ``softmax``, None if nothing about it looks like one; raises NotAttentionError where it is
    an unusual one. ``changes``: what ``may_change`` remembers."""
    found = _both_ways_from(softmax)
    if found is not None:
        _check_arithmetic(found)
        _check_writes(found, changes)
    return found


def is_softmax(node: Node) -> bool:
    """Is ``node`` a softmax over the last dimension of a tensor, in a floating-point dtype?"""
    if called(node) != "softmax" or not is_tensor(node) or not is_tensor(node.args[0] if node.args else None):
        return False
    dtype = argument(node, 3, "dtype") if node.target is F.softmax else argument(node, 2, "dtype")
    wide = dtype is None or dtype.is_floating_point
    return wide and argument(node, 1, "dim") in (-1, value_of(node).dim() - 1)


def keeps_rows(node: Node, source: Node) -> bool:
    """Does ``node`` do nothing to ``source`` but view batch and heads in one dimension or in two?"""
    known = node.op == "call_method" and node.target in _RESHAPES and source in node.args[:1]
    return known and same_sizes(value_of(node).shape[-2:], value_of(source).shape[-2:])


# --- the walk ------------------------------------------------------------------------------------------------------


def _both_ways_from(softmax: Node) -> SoftmaxAttention | None:
    """Scores and product around ``softmax``; None if neither is there, raises if one is missing or read elsewhere."""
    problems, is_unusual = [], False
    scores = output = None
    try:
        scores = scores_behind(softmax.args[0])
        if isinstance(softmax.args[0], Node) and len(softmax.args[0].users) > 1:
            problems.append(why_not_alone(softmax.args[0]))
    except NotAttentionError as error:
        problems.append(str(error))
        is_unusual = isinstance(error, UnusualScoresError)
    try:
        output = _output_of(softmax, None if scores is None else scores.sinks)
        if scores is not None and scores.sinks is None and not scores.is_shifted:
            output, scores.sinks = _scaled(softmax, output)
            problems = [] if scores.sinks is not None else problems
    except NotAttentionError as error:
        if _only_picks(softmax):
            return None
        problems.append(str(error))
    if scores is None and output is None and not is_unusual:
        return None
    if scores is None or output is None or problems:
        raise NotAttentionError(problems[0])
    nodes = [*scores.nodes, *output.nodes]
    return SoftmaxAttention(softmax, scores, output.node, output.product, output.dropout, nodes)


def _output_of(softmax: Node, sinks: Sinks | None) -> _Output:
    """The product of the weights ``softmax`` with the values; ``sinks``: those put beside the scores.

    It may have the values on the left, as ``v.mT @ weights.mT``: the weights are then ``turned`` on the way.
    """
    weights, turned, dropout, nodes = softmax, False, 0.0, [softmax]
    while True:
        if len(weights.users) != 1:
            raise NotAttentionError(_why_read_elsewhere(weights))
        user = next(iter(weights.users))
        if user.op == "output":
            why = "its weights leave the graph before they meet any values"
            raise NotAttentionError(f"{why}; use them with the values before it ends or breaks for a fused one")
        if sinks is not None and not turned and drops_sinks(user, weights, sinks):
            sinks, weights = None, user
            nodes.append(user)
            continue
        for product in _with_weights_first(user, weights, turned):
            if product.addend is None:
                if sinks is not None:
                    raise NotAttentionError(
                        "its sinks have values of their own; nothing to do: no fused kernel has them"
                    )
                return _Output(user, product, dropout, [*nodes, user])
        if _turns(user):
            weights, turned = user, not turned
            nodes.append(user)
            continue
        p = _dropout_of(user)
        if p and dropout:
            raise NotAttentionError("its weights are dropped twice; use one dropout for a fused kernel")
        is_harmless = called(user) == "contiguous" or (is_cast(user) and value_of(user).is_floating_point())
        if p is None and not is_harmless and not (is_tensor(user) and keeps_rows(user, weights)):
            why = f"its weights go through {name_called(user)} before they meet the values"
            raise NotAttentionError(f"{why}; nothing to do: no fused kernel computes that")
        dropout = p or dropout
        weights = user
        nodes.append(user)


def _why_read_elsewhere(weights: Node) -> str:
    """What else is done to ``weights``: a model returns them, or combines parts of them, say, before the values."""
    if any(user.op == "output" for user in reached(weights, keeps_values)):
        return "its weights are read elsewhere too; set output_attentions=False, need_weights=False for a fused one"
    return "its weights are read in several places; use them in one product with the values alone for a fused kernel"


def _only_picks(softmax: Node) -> bool:
    """Do the weights ``softmax`` end in comparisons and places alone, as where they pick the blocks that another
    attention looks at? They meet no values then."""
    return all_reached(softmax, _holds_numbers) is not None


def _holds_numbers(node: Node) -> bool:
    """May ``node`` be, or hold, numbers that are neither sizes, places nor what a comparison gives?"""
    value = value_of(node)
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, (int, torch.SymInt))


def _with_weights_first(node: Node, weights: Node, turned: bool) -> Iterator[Contraction]:
    """Every way to read ``node`` as weights times values; ``turned``: are queries and keys of ``weights`` exchanged?"""
    for product in contractions_of(node):
        for each in (product, product.turned()):
            left = each.left.swapped() if turned else each.left
            if left.node is weights and left.is_plain:
                yield each


def _turns(node: Node) -> bool:
    """Does ``node`` exchange the last two dimensions, and nothing else?"""
    order = order_of(node)
    return order is not None and Operand(node, order).swapped().is_plain


def _dropout_of(node: Node) -> float | None:
    """The probability with which ``node`` drops elements, None if that is not what it does."""
    if node.target is not F.dropout and node.target is not torch.dropout:
        return None
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", node.kwargs.get("train", True))
    if training is False:
        return 0.0
    p = settled_number(p)
    return None if p is None or training is not True else p


def _scaled(softmax: Node, output: _Output) -> tuple[_Output, Sinks | None]:
    """``output`` with what scales it by sinks, and these; as it is where nothing does."""
    in_order = output.product.result == tuple(range(len(output.product.result)))
    scaled = scaled_by_sinks(softmax, output.node) if in_order else None
    if scaled is None:
        return output, None
    return replace(output, node=scaled.result, nodes=[*output.nodes, *scaled.nodes]), scaled.sinks


# --- what fused kernels do not compute -----------------------------------------------------------------------------


def _check_arithmetic(found: SoftmaxAttention) -> None:
    """Raise where the weights or the result are other numbers than those of a fused kernel."""
    if found.scores.sinks is not None and found.dropout:
        raise NotAttentionError("its weights beside sinks are dropped; set attention_dropout=0 for a fused kernel")
    if found.product.alpha != 1.0:
        raise NotAttentionError("its result is scaled; scale the values instead for a fused kernel")
    wide, narrow = (value_of(each).dtype for each in (found.softmax.args[0], found.softmax))
    # What hides a key may be infinite in a dtype that reaches less far, and a hidden row no number.
    if wide.is_floating_point and torch.finfo(narrow).max < torch.finfo(wide).max:
        raise NotAttentionError(f"its softmax narrows {wide} to {narrow}; let it keep that for a fused kernel")


def _check_writes(found: SoftmaxAttention, changes: dict[Node, bool]) -> None:
    """Raise where something is written to that would be read earlier, or kept for the gradients."""
    reads = found.reads
    if not undisturbed(found.scores.nodes[0], found.output, found.nodes, reads):
        why = "something is changed in place, or gradients or autocast are switched, inside it"
        raise NotAttentionError(f"{why}; move that out of it for a fused kernel")
    # Products of batches keep copies of some operands for their gradients; attention keeps the operands themselves.
    if any(changes_after(tensor, found.output, changes) for tensor in reads):
        raise NotAttentionError("what it reads is changed in place behind it; write to a copy for a fused kernel")
    if changes_after(found.output, found.output, changes):  # attention keeps its result, a product does not
        raise NotAttentionError("its result is changed in place; write to a copy for a fused kernel")
