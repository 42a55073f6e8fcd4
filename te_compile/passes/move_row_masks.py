"""Take a mask that hides whole rows of scores from attention, and hide those rows of its result.

A mask that says the same of all keys of a query, because it was expanded along them, leaves each query all keys or
none: libraries build such masks of positions, and encoders hand them to each layer, true everywhere, where nobody
passed one. In a graph that builds it, it folds away (fold_masks.py). In one that is given it, as behind a graph break,
nobody knows what it holds, but its stride of 0 is known. No fused kernel of PyTorch's reads a mask of that stride, so
attention runs on the kernel that stores all scores, in float32.

Attention defines the result of a query without keys to be 0, and its gradients with it. So the mask moves behind
attention, which then has none: where(rows, attention, 0).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.attention_calls import attention_calls
from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.fold_masks import FOLDED, MASK_STAYS
from te_compile.passes.side_effects import changes_after
from te_compile.passes.writing import Writer

_FIRST_KEY = (..., slice(None, 1, None))


def _hides_rows(mask: Tensor, result: Tensor) -> bool:
    """Is ``mask``, of booleans, the same for all keys, and has it a row for rows of ``result`` [..., S, D] alone?"""
    if mask.dtype != torch.bool or not 2 <= mask.dim() <= result.dim():
        return False
    keys, stride = mask.shape[-1], mask.stride(-1)
    if not (isinstance(stride, int) and stride == 0) and not (isinstance(keys, int) and keys == 1):
        return False
    rows, wanted = mask.shape[:-1], result.shape[-mask.dim() : -1]
    given = [want if isinstance(size, int) and size == 1 else size for size, want in zip(rows, wanted, strict=True)]
    return same_sizes(given, wanted)


def _move(attention: Node, changes: dict[Node, bool]) -> bool:
    mask: Any = argument(attention, 3, "attn_mask")
    if not is_tensor(mask) or argument(attention, 5, "is_causal", False) is not False:
        return False
    result = value_of(attention)
    if not isinstance(result, Tensor) or not _hides_rows(value_of(mask), result):
        return False
    if changes_after(mask, attention, changes):  # the gradients will read it, and attention's would not
        return False
    rows = Writer(attention).call(operator.getitem, mask, _FIRST_KEY)
    if len(attention.args) > 3:
        attention.update_arg(3, None)
    else:
        attention.update_kwarg("attn_mask", None)
    shown = Writer(attention.next, attention).call(torch.where, rows, attention, 0.0)
    attention.replace_all_uses_with(shown, delete_user_cb=lambda user: user is not shown)
    attention.meta.pop(MASK_STAYS, None)
    attention.meta[FOLDED] = "rows"
    return True


def move_row_masks(graph: Graph) -> int:
    """Have masks that hide whole rows do so behind attention; returns how many moved."""
    changes = dict[Node, bool]()
    return sum(_move(attention, changes) for attention in attention_calls(graph))
