"""The masks of torch.nn's attention modules, as attention takes them: one, to be added to the scores, that broadcasts.

A module is given one over queries and keys, [L, S] or [N · heads, L, S], and one over the keys of each sequence,
[N, S]; bool, where true hides, or floating.
"""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.captured_nodes import value_of
from te_compile.passes.writing import Writer


def is_mask(node: Any, dimensions: tuple[int, ...]) -> bool:
    """Is ``node`` a mask of one of these numbers of dimensions?"""
    value = value_of(node) if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        return False
    return value.dim() in dimensions and (value.dtype == torch.bool or value.is_floating_point())


def _added(write: Writer, mask: Node, dtype: torch.dtype) -> Node:
    """A mask as what is added to the scores: -inf where a bool mask is true."""
    if value_of(mask).dtype != torch.bool:
        return mask
    zeros = write.call(torch.zeros_like, mask, dtype=dtype)
    return write.method("masked_fill", zeros, mask, -math.inf)


def mask_of(write: Writer, a: SimpleNamespace, own_keys: int = 0) -> Node | None:
    """Both masks as one that broadcasts to [N, H, L, S + own_keys], of which the last are seen by all; None if there is
    nothing to add. a: the call's arguments by name."""
    dtype = value_of(a.query).dtype
    padding = mask = None
    if a.key_padding_mask is not None:
        padding = _added(write, a.key_padding_mask, dtype)
        for _ in range(2):
            padding = write.method("unsqueeze", padding, 1)
    if a.attn_mask is not None and not by_hint(a):
        mask = _added(write, a.attn_mask, dtype)
        if value_of(mask).dim() == 2:
            for _ in range(2):
                mask = write.method("unsqueeze", mask, 0)
        else:
            mask = write.method("unflatten", mask, 0, (-1, a.num_heads))
    given = [each for each in (mask, padding) if each is not None]
    if own_keys:
        given = [write.call(F.pad, each, (0, own_keys)) for each in given]
    return write.call(operator.add, *given) if len(given) == 2 else next(iter(given), None)


def by_hint(a: SimpleNamespace) -> bool:
    """Is the mask known to be causal, and left out for the hint that says so?"""
    return a.is_causal and a.key_padding_mask is None and not a.need_weights
