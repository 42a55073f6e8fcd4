"""Which part of a bias learns, where a batch shares that part and not the whole.

T5 has a bias that all rows of a batch share. Once the padding of each is hidden in it, each row has one of its own:

    torch.where(seen, bias, lowest).contiguous()        bias + (1 - seen) * lowest

The gradient of the whole, as attention's kernels have it, is that of the part, row by row: what is hidden that deep has
none, and what is added has the gradient of the sum. So it can be added up as it lies, where autograd would lay it out
anew, ask once more what was hidden, and add up the rows last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.attention_scores import same_sizes
from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.mask_numbers import FILLS, SUMS, SWALLOWS, number_in
from te_compile.passes.side_effects import may_change
from te_compile.passes.written_tensors import writes

_SAME_PLACES = {"contiguous", "clone", "expand", "expand_as"}


def shared_part(mask: Node, changes: dict[Node, bool]) -> Node | None:
    """The part of ``mask``, [B, H, Sq, Sk], that learns, if it is [1, H, Sq, Sk] or [H, Sq, Sk] and its gradient is the
    sum of ``mask``'s over rows of the batch. None if there is no such part.

    changes: what ``may_change`` remembers. Nothing on the way to the part is written to.
    """
    whole, deepest = value_of(mask), SWALLOWS
    if whole.dim() != 4 or statically_known_true(whole.shape[0] == 1):
        return None
    node: Any = mask
    while is_tensor(node) and value_of(node).requires_grad and not may_change(node, changes):
        part = value_of(node)
        is_shared = part.dim() == 3 or (part.dim() == 4 and statically_known_true(part.shape[0] == 1))
        if is_shared and part.device == whole.device and same_sizes(part.shape[-3:], whole.shape[1:]):
            return node
        if node.target in SUMS:
            deepest = -math.inf  # nothing else stays hidden whatever is added
        node = _within(node, deepest, changes)
    return None


def _within(node: Node, deepest: float, changes: dict[Node, bool]) -> Any:
    """What ``node`` passes its gradient on to, whole but for what is hidden as deep as that; None if not known."""
    if node.target in _SAME_PLACES or is_cast(node):
        return node.args[0]
    if writes(node) or node.kwargs:
        return None
    if node.target is torch.where and len(node.args) == 3:
        return _the_other(node.args[1:], lambda each: _hides(each, deepest, changes))
    if node.target in FILLS and len(node.args) == 3:
        return node.args[0] if _hides(node.args[2], deepest, changes) else None
    if node.target in SUMS and len(node.args) == 2:
        return _the_other(node.args, lambda each: not is_tensor(each) or not value_of(each).requires_grad)
    return None


def _hides(number: Any, deepest: float, changes: dict[Node, bool]) -> bool:
    found = number_in(number, changes)
    return found is not None and found <= deepest


def _the_other(pair: Sequence[Any], is_one: Callable[[Any], bool]) -> Any:
    """That of a ``pair`` of which ``is_one`` does not hold, if it holds of one alone."""
    others = [each for each in pair if not is_one(each)]
    return others[0] if len(others) == 1 else None
