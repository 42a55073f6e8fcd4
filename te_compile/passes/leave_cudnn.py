"""Would SDPA run a call on cuDNN's kernel, and what else computes the same: for passes that keep off it what it has
wrong."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.nn.attention import SDPBackend

from te_compile.passes.attention_kernels import can_run, is_plain, order_of_kernels
from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.efficient_attention import (
    HALVES,
    cast_for_attention,
    may_be_called,
    operands_of,
)
from te_compile.passes.plan import Attention
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
    causal = argument(node, 5, "is_causal", False)
    asked = torch.backends.cuda.SDPAParams(query, key, value, mask, dropout, causal, shares_heads)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


def has_plain_tensors(node: Node) -> bool:
    """Are arguments such that a direct call of another kernel means the same, and tensors of PyTorch's own kind?"""
    operands = operands_of(node)
    return not any(map(wrapped_kind, operands)) and is_plain(node, masked=operands[3] is not None)


def runs_on_flash(node: Node) -> bool:
    """Can PyTorch's flash kernel run a call without a mask?"""
    return can_run("flash", node)


def reads_result_as_it_was(node: Node, changes: dict[Node, bool]) -> bool:
    """Would gradients of a fused kernel miss what is written into the result after it? changes: see ``may_change``."""
    return torch.is_grad_enabled() and may_change(node, changes)


def may_run_efficiently(node: Node, changes: dict[Node, bool]) -> bool:
    """Is a direct call of the memory-efficient kernel the same as SDPA's, and does nothing change its result?"""
    if value_of(node).dtype not in HALVES or not may_be_called(node):
        return False
    return not reads_result_as_it_was(node, changes)


def as_products(attention: Attention, reason: str) -> Attention:
    """The attention with what SDPA computes without a fused kernel in the place of its call. ``reason``: how the plan
    names the choice."""
    node = attention.node
    write = Writer(node)
    operands: list[Any] = [
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
    return replace(attention, node=outputs, kernel=reason)
