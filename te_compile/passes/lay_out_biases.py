"""Attention with a bias: laid out as fused kernels read it and, where the bias learns, on the one that lets it.

A bias of relative positions, as T5 and its kin have it, is looked up by position and head, so that its elements lie
``heads`` apart. PyTorch's fused kernels read none whose keys do not lie side by side; attention then runs on the kernel
that stores all scores, in float32, products included. So the bias is copied first, once for all rows of a batch that
share it.

Of the fused kernels the memory-efficient one alone has a gradient for a bias. PyTorch does not ask for that: it takes
the first that can read one, on Hopper cuDNN's. A bias that learns therefore goes to the memory-efficient one by name.
README has what that gives to T5-large.

In 16 bits, on a GPU; an order of kernels that the user has set stands, and so does the draw of a dropout where eager
mode's draws are asked for (``fallback_random``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from te_compile.options import Options
from te_compile.passes.attention_kernels import is_plain, ordinary_attentions
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.efficient_attention import (
    ALIGNED_KEYS,
    HALVES,
    Runs,
    bias_learns,
    call_efficiently,
    may_be_called,
    operands_of,
    runs_efficiently,
    size_in,
)
from te_compile.passes.plan import Plan
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.writing import Writer


def lay_out_biases(regions: list[Region], plan: Plan, options: Options, reads: Runs = runs_efficiently) -> int:
    """Lay out biases for fused kernels and choose one for those that learn; returns for how many attentions.

    ``plan`` must know them (find_attentions). reads: can a fused kernel read a bias of this call?
    """
    changed, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        node: Any = plan.attentions[index].node
        if not _has_a_mask(node) or not reads(node):
            continue
        if torch.is_grad_enabled() and may_change(node, changes):
            continue  # a fused kernel's gradients read the result as it was
        if argument(node, 4, "dropout_p", 0.0) != 0 and wants_eager_draws(options):
            continue
        learns = bias_learns(value_of(argument(node, 3, "attn_mask")))
        if learns and _has_aligned_rows(node) and may_be_called(node):
            plan.attentions[index] = call_efficiently(plan.attentions[index], "efficient")
            changed += 1
        elif not learns:
            changed += _laid_out(node)
    return changed


def _has_a_mask(node: Node) -> bool:
    """Is it a call of SDPA with a mask, in 16 bits, whose arguments a direct call of a kernel could have?"""
    if not is_plain(node, masked=True) or any(map(wrapped_kind, operands_of(node))):
        return False
    return value_of(node).dtype in HALVES and argument(node, 5, "is_causal", False) is False


def _has_aligned_rows(node: Node) -> bool:
    """Inductor knows no layout for other rows of a bias whose gradient the backward pass writes."""
    keys = value_of(argument(node, 1, "key")).shape[2]
    return isinstance(keys, int) and keys % ALIGNED_KEYS == 0


def _laid_out(node: Node) -> bool:
    """Have the keys of a mask that learns nothing lie side by side; returns whether they did not."""
    mask = argument(node, 3, "attn_mask")
    value, write = value_of(mask), Writer(node)
    if value.dim() == 0 or not isinstance(value.stride(-1), int) or value.stride(-1) == 1:
        return False  # a symbolic stride is no layout that a bias is known to have
    shared = [isinstance(stride, int) and stride == 0 for stride in value.stride()[:-1]]
    if any(shared):
        first = (*(slice(None, 1) if all_alike else slice(None) for all_alike in shared), slice(None))
        own = write.method("contiguous", write.call(operator.getitem, mask, first))
        copied = write.method("expand", own, *(size_in(write, mask, place) for place in range(value.dim())))
    else:
        copied = write.method("contiguous", mask)
    if len(node.args) > 3:
        node.update_arg(3, copied)
    else:
        node.update_kwarg("attn_mask", copied)
    return True
