"""Keep a dropout that a model spells out off cuDNN, which would round its probability, where attention has a mask.

cuDNN's attention knows probabilities in sixteenths: a dropout of 0.1 would be one of 0.125 or of 0.0625
(pytorch#174245). From PyTorch 2.12 on SDPA asks it for no others; 2.11 with a newer cuDNN does. Without a mask
``choose_attention_kernels`` takes another kernel, and kernels of ours run masks of booleans. What is left here has a
bias: it goes to the memory-efficient kernel by name and, where that cannot be called, to products of matrices.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.nn.attention import SDPBackend

from te_compile.passes.attention_kernels import is_plain, is_rounded, order_of_kernels, ordinary_attentions
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.efficient_attention import (
    HALVES,
    Runs,
    call_efficiently,
    cast_for_attention,
    may_be_called,
    operands_of,
    runs_efficiently,
)
from te_compile.passes.plan import Plan
from te_compile.passes.recognise_attention import RECOGNISED
from te_compile.passes.regions import Region
from te_compile.passes.side_effects import may_change
from te_compile.passes.writing import Writer

PRODUCTS = torch._scaled_dot_product_attention_math


def runs_on_cudnn(node: Node) -> bool:
    """Would SDPA take cuDNN's kernel for this call?"""
    query, key, value, mask = map(value_of, operands_of(node))
    if query.device.type != "cuda" or not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    order = order_of_kernels()
    if order.index(SDPBackend.EFFICIENT_ATTENTION.value) < order.index(SDPBackend.CUDNN_ATTENTION.value):
        return False
    query, key, value = (each.to(value_of(node).dtype) for each in (query, key, value))  # an autocast may be at work
    dropout, shares_heads = argument(node, 4, "dropout_p", 0.0), argument(node, 7, "enable_gqa", False)
    asked = torch.backends.cuda.SDPAParams(query, key, value, mask, dropout, False, shares_heads)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


def exact_dropouts(
    regions: list[Region],
    plan: Plan,
    rounds: Runs = runs_on_cudnn,
    efficient: Runs = runs_efficiently,
) -> int:
    """Call a kernel that draws as the model asks, where cuDNN's would round; returns for how many attentions.

    All other passes must have chosen kernels. rounds: does cuDNN's run this call? efficient: can the other?
    """
    changed, changes = 0, dict[Node, bool]()
    for index in ordinary_attentions(regions, plan):
        attention = plan.attentions[index]
        node: Any = attention.node
        if RECOGNISED not in node.meta or not is_plain(node, masked=True) or any(map(wrapped_kind, operands_of(node))):
            continue
        if not is_rounded(node) or not rounds(node):
            continue
        if _may_run_efficiently(node, changes) and efficient(node):
            plan.attentions[index] = call_efficiently(attention, "exact")
        else:
            plan.attentions[index] = replace(attention, node=_as_products(node), kernel="exact")
        changed += 1
    return changed


def _may_run_efficiently(node: Node, changes: dict[Node, bool]) -> bool:
    """Is a direct call of the memory-efficient kernel the same as SDPA's, and does nothing change its result?"""
    if value_of(node).dtype not in HALVES or not may_be_called(node):
        return False
    return not (torch.is_grad_enabled() and may_change(node, changes))  # its gradients read the result as it was


def _as_products(node: Node) -> Node:
    """Put what SDPA computes without a fused kernel in the place of the call; returns its outputs."""
    write = Writer(node)
    operands = [
        None if each is None else cast_for_attention(write, each, value_of(node).dtype) for each in operands_of(node)
    ]
    outputs = write.call(
        PRODUCTS,
        *operands,
        argument(node, 4, "dropout_p", 0.0),
        argument(node, 5, "is_causal", False),
        scale=argument(node, 6, "scale"),
        enable_gqa=argument(node, 7, "enable_gqa", False),
    )
    write.put_in_place(write.call(operator.getitem, outputs, 0))
    return outputs
