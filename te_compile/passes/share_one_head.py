"""Tell attention that all queries share one head of keys and values, where a model leaves that to broadcasting.

Multi-query models, Falcon among them, have keys and values of one head and hand them to attention as they are. They
broadcast, but PyTorch's fused kernels take as many heads of keys as of queries or want to be told that heads are
shared. Told nothing, attention runs on the kernel that stores all scores, in float32. ``enable_gqa=True`` means the
same here and is understood by the kernels that copies of heads are undone for (undo_repeated_heads.py), with their
limits. Where these forbid it the call stays; ``meta[SHARED]`` or ``meta[BROADCAST]`` has what became of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.passes.attention_calls import attention_calls
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.side_effects import may_change
from te_compile.passes.undo_repeated_heads import why_not_shared

SHARED = "te_shared_head"
"""Meta key of an attention that has been told that its one head of keys is for all heads of queries."""

BROADCAST = "te_broadcast_head"
"""Meta key of an attention: why it has not been told."""


def _broadcasts_one_head(attention: Node) -> bool:
    """Do keys and values have one head, and queries more, with nothing said of it?"""
    operands: list[Any] = [argument(attention, place, name) for place, name in enumerate(("query", "key", "value"))]
    if argument(attention, 7, "enable_gqa", False) is not False or not all(map(is_tensor, operands)):
        return False
    query, key, value = (value_of(operand).shape for operand in operands)
    if not len(query) == len(key) == len(value) == 4 or key[1] != 1 or value[1] != 1:
        return False
    is_more = isinstance(query[1], int) and query[1] > 1
    return is_more and same_sizes((query[0], query[0]), (key[0], value[0]))


def share_one_head(graph: Graph) -> int:
    """Have attentions that broadcast a head of keys and values share it; returns how many do now."""
    count, changes = 0, dict[Node, bool]()
    for attention in attention_calls(graph):
        if not _broadcasts_one_head(attention):
            continue
        why = why_not_shared(attention)
        if not why and torch.is_grad_enabled() and may_change(attention, changes):
            why = "its result is changed in place, and fused kernels read it for gradients; write to a copy"
        if why:
            attention.meta[BROADCAST] = why
            continue
        attention.kwargs = {**attention.kwargs, "enable_gqa": True}
        attention.meta[SHARED] = True
        count += 1
    return count
