"""Fill the keys of attention under a mask up to whole tiles, with keys that the mask hides."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.captured_nodes import argument, value_of
from te_compile.passes.efficient_attention import operands_of, size_in
from te_compile.passes.plan import Attention
from te_compile.passes.writing import Writer


def in_whole_tiles(attention: Attention, tile: int, reason: str) -> Attention:
    """The attention, of a mask, with a call in the place of its own that has a multiple of ``tile`` keys, whatever
    their number is. ``reason``: how the plan names the choice (``AttentionRecord.kernel``)."""
    node = attention.node
    write = Writer(node)
    query, key, value, mask = operands_of(node)
    keys = size_in(write, key, 2)
    lacking = -keys % tile if isinstance(keys, int) else write.call(operator.mod, write.call(operator.neg, keys), tile)
    filled = [write.call(F.pad, each, (0, 0, 0, lacking)) for each in (key, value)]
    given: dict[str, Any] = {
        "attn_mask": _hiding(write, mask, keys, value_of(key).shape[2], lacking),
        "dropout_p": argument(node, 4, "dropout_p", 0.0),
        "scale": argument(node, 6, "scale"),
        "enable_gqa": argument(node, 7, "enable_gqa", False),
    }
    call = write.call(F.scaled_dot_product_attention, query, *filled, **given)
    write.put_in_place(call)
    return replace(attention, node=call, kernel=reason)


def _hiding(write: Writer, mask: Node, keys: Any, length: Any, lacking: Any) -> Node:
    """``mask`` for keys that are filled up; ``length`` is their number before that by example."""
    mask = _without_repeats(write, mask)
    seen = value_of(mask)
    if not statically_known_true(seen.shape[-1] == length):  # one for all keys
        sizes = [size_in(write, mask, place) for place in range(seen.dim() - 1)]
        mask = write.method("expand", mask, *sizes, keys)
    return write.call(F.pad, mask, (0, lacking), value=False if seen.dtype == torch.bool else -math.inf)


def _without_repeats(write: Writer, mask: Node) -> Node:
    """One of each row, head and sequence that ``mask`` repeats without memory: a copy would have them all."""
    repeats = [statically_known_true(stride == 0) for stride in value_of(mask).stride()[:-1]]
    ones = tuple(slice(0, 1) if each else slice(None) for each in repeats)
    return write.call(operator.getitem, mask, ones) if any(repeats) else mask
