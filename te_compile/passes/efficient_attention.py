"""Call PyTorch's memory-efficient attention by name, where SDPA would take another kernel, or none that can run.

The kernel reads heads of 16 bits that are a multiple of eight features wide, and a bias whose rows start at multiples
of eight elements: one of other lengths is copied into rows that do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.plan import Attention
from te_compile.passes.writing import Writer

EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default

HALVES = (torch.bfloat16, torch.float16)
ALIGNED_KEYS = 8  # rows of a bias start at multiples of so many elements

Runs = Callable[[Node], bool]
"""Can the kernel run a call of SDPA on the device where it stands?"""

_OPERANDS = (*enumerate(("query", "key", "value", "attn_mask")),)


def operands_of(node: Node) -> list[Any]:
    """Queries, keys, values and the mask, None for none, of a call of SDPA."""
    return [argument(node, place, name) for place, name in _OPERANDS]


def runs_efficiently(node: Node) -> bool:
    """Is attention's result on a device whose memory-efficient kernel takes heads like these?"""
    query, key, value, _ = map(value_of, operands_of(node))
    if query.device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    dtype = value_of(node).dtype
    asked = torch.backends.cuda.SDPAParams(query.to(dtype), key.to(dtype), value.to(dtype), None, 0.0, False, False)
    return torch.backends.cuda.can_use_efficient_attention(asked)


def may_be_called(node: Node) -> bool:
    """Is a direct call of the kernel the same as SDPA's, which would broadcast operands and share heads?"""
    query, key, value, mask = map(value_of, operands_of(node))
    alike = same_sizes(query.shape[:2], key.shape[:2]) and same_sizes(key.shape[:3], value.shape[:3])
    return (
        alike
        and argument(node, 7, "enable_gqa", False) is False
        and isinstance(key.shape[2], int)
        and (mask is None or 1 <= mask.dim() <= 4)
        and not torch.are_deterministic_algorithms_enabled()  # its sums of gradients are not
    )


def bias_learns(mask: Tensor | None) -> bool:
    """Does a gradient go to what is added to scores?"""
    return mask is not None and torch.is_grad_enabled() and mask.requires_grad


def size_in(write: Writer, x: Node, place: int) -> Any:
    """How long ``x`` is there: a number, or a node where that is a symbol."""
    size = value_of(x).shape[place]
    return size if isinstance(size, int) else write.method("size", x, place)


def call_efficiently(attention: Attention, reason: str) -> Attention:
    """The attention with a direct call of the kernel in the place of its own, which may be. ``reason``: how the plan
    names the choice (``AttentionRecord.kernel``)."""
    node = attention.node
    write, dtype = Writer(node), value_of(node).dtype
    query, key, value, mask = operands_of(node)
    query, key, value = (
        cast_for_attention(write, each, dtype) for each in (query, key, value)
    )  # an autocast may be at work
    if mask is not None:
        mask = _bias(write, cast_for_attention(write, mask, dtype), query, value_of(key).shape[2])
    dropout, causal = float(argument(node, 4, "dropout_p", 0.0)), argument(node, 5, "is_causal", False)
    saves = torch.is_grad_enabled()
    outputs = write.call(
        EFFICIENT_ATTENTION, query, key, value, mask, saves, dropout, causal, scale=argument(node, 6, "scale")
    )
    write.put_in_place(write.call(operator.getitem, outputs, 0))
    return replace(attention, node=outputs, kernel=reason)


def cast_for_attention(write: Writer, x: Node, dtype: torch.dtype) -> Node:
    """``x`` in ``dtype``; a mask of booleans as what is added to scores instead: nothing, or what hides them."""
    value: Tensor = value_of(x)
    if value.dtype == torch.bool:
        shown = write.call(torch.zeros_like, x, dtype=dtype)
        return write.method("masked_fill", shown, write.call(operator.invert, x), -math.inf)
    return x if value.dtype == dtype else write.method("to", x, dtype)


def _bias(write: Writer, mask: Node, query: Node, keys: int) -> Node:
    """``mask`` as [B, H, S, keys] with its keys side by side; what all of a batch share is written once."""
    value = value_of(mask)
    if value.shape[-1] != keys:  # one for all keys
        mask = write.method("expand", mask, *(size_in(write, mask, place) for place in range(value.dim() - 1)), keys)
    if keys % ALIGNED_KEYS:
        rows = write.call(F.pad, mask, (0, -keys % ALIGNED_KEYS))
        mask = write.call(operator.getitem, rows, (..., slice(None, keys)))
    elif not value_of(mask).is_contiguous():
        mask = write.method("contiguous", mask)
    return write.method("expand", mask, *(size_in(write, query, place) for place in range(3)), keys)
