"""Attention with a bias that is added to its scores, on kernels of ours, which have a gradient for it.

T5 and its kin look a bias up by distance and head, and learn it, as BEiT and Swin do by place. Of PyTorch's fused
kernels the memory-efficient one alone has a gradient for that, and it makes its products as Ampere does. Here the bias
goes to ``te::biased_attention``. On an H200 attention takes, in microseconds, bf16, forward and forward with backward,
bits of a dropout drawn before (``python -m benchmarks.biased_attention``):

    rows × heads × positions × features   dropout   memory-efficient   cuDNN, with none that learns   by these
    32 × 12 × 320 × 64, one for all rows  0.1       200,  677                                          68,  257
    64 × 12 × 200 × 64, one for all rows            150,  599          73,  283                        61,  268
    8 × 32 × 1024 × 64, one for all rows            805, 3009          328, 1107                      231, 1025
    64 × 12 × 320 × 64, one for each row  0.1       403, 1287                                         131,  431

So biases that learn nothing go there too: a mask of numbers of which ``masked_attentions`` knows no booleans, a bias by
distance in inference. Not one that is the same for all queries, of which cuDNN reads a row, and this would a matrix.

The bias is laid out once for all attentions that read it: keys side by side, in rows of a multiple of eight, once for
all rows of a batch that share it. Where they share what learns of it and no more, as under a mask of padding, the
gradient goes straight to that part (shared_biases.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops.biased_attention import ALIGNED, BIASED_ATTENTION
from te_compile.options import Options
from te_compile.passes.added_masks import shown_by
from te_compile.passes.attention_kernels import ordinary_attentions
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.bias_kernels import FEWEST_POSITIONS, is_run_by_kernels
from te_compile.passes.captured_nodes import argument, size_hint, value_of, wrapped_kind
from te_compile.passes.efficient_attention import bias_learns, cast_for_attention
from te_compile.passes.masked_attentions import may_drop, operands_before_copies
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.regions import Region
from te_compile.passes.shared_biases import shared_part
from te_compile.passes.side_effects import may_change
from te_compile.passes.window_attentions import may_be_an_operator, put_operator, read_as_rows
from te_compile.passes.writing import Writer

_Laid = dict[tuple[Any, ...], Node]

Runs = Callable[[Any, Any, Any, float], bool]
"""Is there a kernel for q, k and v, [B, S, H, D], and a dropout of this probability?"""


def biased_attentions(regions: list[Region], plan: Plan, options: Options, runs: Runs = is_run_by_kernels) -> int:
    """Give attention with a bias to kernels that have a gradient for it; returns how many.

    ``plan`` must know them (find_attentions). runs: is there a kernel?
    """
    changed, changes, laid = 0, dict[Node, bool](), _Laid()
    for index in ordinary_attentions(regions, plan):
        node: Any = plan.attentions[index].node
        if not _has_a_bias(node):
            continue
        operands = operands_before_copies(node, changes)
        if not may_be_an_operator(node, operands, changes) or not may_drop(node, options):
            continue
        mask = argument(node, 3, "attn_mask")
        if not bias_learns(value_of(mask)) and shown_by(mask, changes) is not None:
            continue  # masked_attentions has kernels that skip what it hides
        q, k, v = read_as_rows(node, operands)
        if runs(q, k, v, float(argument(node, 4, "dropout_p", 0.0))):
            plan.attentions[index] = _replaced(plan.attentions[index], operands, changes, laid)
            changed += 1
    return changed


def _has_a_bias(node: Node) -> bool:
    """Is it a call of SDPA of many positions, with a matrix of numbers beside its scores?"""
    mask = argument(node, 3, "attn_mask")
    added = value_of(mask)
    if not isinstance(added, Tensor) or wrapped_kind(mask) or not 2 <= added.dim() <= 4:
        return False
    if added.dtype == torch.bool or argument(node, 5, "is_causal", False) is not False:
        return False
    (batch, heads, queries, _), keys = value_of(node).shape, value_of(argument(node, 1, "key")).shape[2]
    if min(size_hint(queries), size_hint(keys)) < FEWEST_POSITIONS or added.device != value_of(node).device:
        return False
    is_a_matrix = same_sizes(added.shape[-2:], (queries, keys)) and added.stride(-2) != 0
    of_bias = (*(1,) * (4 - added.dim()), *added.shape[:-2])
    return is_a_matrix and all(
        statically_known_true(size == 1) or statically_known_true(size == of_all)
        for size, of_all in zip(of_bias, (batch, heads), strict=True)
    )


def _replaced(attention: Attention, operands: list[Node], changes: dict[Node, bool], laid: _Laid) -> Attention:
    """The attention with the operator in the place of its call. laid: biases that were met before."""
    node: Any = attention.node
    mask, dtype = argument(node, 3, "attn_mask"), value_of(node).dtype
    part = shared_part(mask, changes) if bias_learns(value_of(mask)) else None
    key = (node.graph, mask, dtype)
    bias = laid.get(key)
    if bias is None:
        write = Writer(node)
        bias = _laid_out(write, mask if part is None else write.method("detach", mask), dtype)
        if not may_change(mask, changes):
            laid[key] = bias
    learned = [] if part is None else [_of_all_rows(Writer(node), part)]
    undone = operands[1] is not argument(node, 1, "key")
    probability = float(argument(node, 4, "dropout_p", 0.0))
    call = put_operator(BIASED_ATTENTION, node, operands, [bias, probability], learned)
    return replace(attention, node=call, kernel="biased", **({"heads": "undone", "heads_reason": ""} if undone else {}))


def _of_all_rows(write: Writer, part: Node) -> Node:
    """``part`` as [1, H, Sq, Sk]."""
    return part if value_of(part).dim() == 4 else write.method("unsqueeze", part, 0)


def _laid_out(write: Writer, mask: Node, dtype: torch.dtype) -> Node:
    """``mask`` as the operator reads it: [B or 1, H or 1, Sq, R] of ``dtype``."""
    bias = cast_for_attention(write, mask, dtype)
    while value_of(bias).dim() < 4:
        bias = write.method("unsqueeze", bias, 0)
    value = value_of(bias)
    alike = [isinstance(value.stride(place), int) and value.stride(place) == 0 for place in (0, 1)]
    if any(each and value.shape[place] != 1 for place, each in enumerate(alike)):
        first = tuple(slice(None, 1) if each else slice(None) for each in alike)
        bias = write.call(operator.getitem, bias, first)
    keys = value.shape[3]
    if not isinstance(keys, int):
        return bias  # the operator pads it
    if keys % ALIGNED:
        return write.call(F.pad, bias, (0, -keys % ALIGNED))
    return bias if value_of(bias).is_contiguous() else write.method("contiguous", bias)
