"""Widen heads of attention to a multiple of eight features, which PyTorch's fused kernels ask for.

The features that are added are zeros, of which neither scores nor the other features of the result know; they are cut
off again. Without a mask SDPA does so itself, but for its flash kernel alone, where cuDNN's may be faster. With one it
computes heads of other widths in float32 and stores all scores: with 52 features and a mask that takes five times as
long as with 56 (``python -m benchmarks.odd_attention``).

On a GPU, in 16 bits; an order of kernels that the user has set stands, and so does the draw of a dropout where eager
mode's draws are asked for (``fallback_random``).
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

from te_compile.options import Options
from te_compile.passes.attention_calls import HEAD_STEP, WIDEST_HEAD
from te_compile.passes.attention_kernels import is_plain, ordinary_attentions
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.dropout_attentions import wants_eager_draws
from te_compile.passes.efficient_attention import HALVES, cast_for_attention, operands_of
from te_compile.passes.plan import Attention, Plan
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.writing import Writer


def has_fused_kernels(node: Node) -> bool:
    """Is attention's result on a GPU with kernels that want heads of a multiple of eight features?"""
    return value_of(node).device.type == "cuda" and torch.version.hip is None


def widen_heads(
    regions: list[Region], plan: Plan, options: Options, fuses: Callable[[Node], bool] = has_fused_kernels
) -> int:
    """Widen the heads of attention where they are odd; returns of how many.

    ``plan`` must know them (find_attentions). fuses: are there kernels on the device that ask for it?
    """
    widened, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        node: Any = plan.attentions[index].node
        if not _is_odd(node) or not fuses(node):
            continue
        if torch.is_grad_enabled() and may_change(node, changes):
            continue  # a fused kernel's gradients read the result as it was
        if argument(node, 4, "dropout_p", 0.0) != 0 and wants_eager_draws(options):
            continue
        plan.attentions[index] = _widened(plan.attentions[index])
        widened += 1
    return widened


def _is_odd(node: Node) -> bool:
    """Is it a call of SDPA in 16 bits whose heads have a number of features that fused kernels do not take?"""
    operands = operands_of(node)
    if any(map(wrapped_kind, operands)) or not is_plain(node, masked=operands[3] is not None):
        return False
    widths = [value_of(each).shape[-1] for each in operands[:3]]
    if value_of(node).dtype not in HALVES or not all(isinstance(width, int) for width in widths):
        return False
    return any(width % HEAD_STEP for width in widths) and all(0 < width <= WIDEST_HEAD for width in widths)


def _widened(attention: Attention) -> Attention:
    """The attention with wider heads, cut to their width again, in the place of its own."""
    node: Node = attention.node
    write, dtype, width = Writer(node), value_of(node).dtype, value_of(node).shape[-1]
    query, key, value, mask = operands_of(node)
    scale = argument(node, 6, "scale")
    given: dict[str, Any] = {
        "attn_mask": mask if mask is None or _is_of(mask, torch.bool) else cast_for_attention(write, mask, dtype),
        "dropout_p": argument(node, 4, "dropout_p", 0.0),
        "is_causal": argument(node, 5, "is_causal", False),
        "scale": value_of(query).shape[-1] ** -0.5 if scale is None else scale,
        "enable_gqa": argument(node, 7, "enable_gqa", False),
    }
    heads = (_filled(write, cast_for_attention(write, each, dtype)) for each in (query, key, value))
    new = write.call(F.scaled_dot_product_attention, *heads, **given)
    cut = new if value_of(new).shape[-1] == width else write.call(operator.getitem, new, (..., slice(None, width)))
    result = write.in_order_of(cut, node) if cut is not new else write.laid_out_like(cut, node)
    for each in write.written:
        each.meta.update({name: kept for name, kept in node.meta.items() if name not in each.meta})
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return replace(attention, node=new)


def _is_of(x: Node, dtype: torch.dtype) -> bool:
    value: Tensor = value_of(x)
    return value.dtype == dtype


def _filled(write: Writer, x: Node) -> Node:
    """Queries, keys or values with zeros behind the features of each head."""
    lacking = -value_of(x).shape[-1] % HEAD_STEP
    return write.call(F.pad, x, (0, lacking)) if lacking else x
