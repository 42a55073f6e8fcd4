"""Numbers in a graph that scores are scaled with, overwritten with, or hidden by: what a mask is made of.

Where all elements of a tensor are one number, by the way it was made, it is that number to whoever reads the tensor:
rounded to its dtype, and only as long as nobody writes to it on the way. What else is made of which numbers tells
whether, added to scores, it could hide any.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.nn import Parameter

from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.side_effects import may_change, writers_of

HIDDEN = -9984.0
"""What is at most this is a score that hides: e^x of it is zero beside any score that is not. -1e4 in bfloat16."""

HIDES_A_ROW = HIDDEN / 2
"""A row of masks that is nowhere above this hides all its keys; the half, for scores stand beside masks."""

SWALLOWS = -1e30
"""A number that is at most this leaves nothing of a score that it is added to."""

PRODUCTS = {operator.mul, operator.imul, torch.mul, "mul", "mul_", "multiply"}
QUOTIENTS = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide"}
SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
DIFFERENCES = {operator.sub, operator.isub, torch.sub, "sub", "sub_"}
FILLS = {torch.masked_fill, "masked_fill", "masked_fill_"}
SAME_VALUES = {
    "view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute",
    "contiguous", "clone", "detach", "repeat", operator.getitem, torch.unsqueeze, torch.squeeze, torch.reshape,
}  # fmt: skip
_ENDS = {  # what these return hides nothing, whatever they are given
    F.linear, torch._C._nn.linear, torch.matmul, operator.matmul, torch.bmm, torch.baddbmm, torch.einsum,
    F.softmax, torch.softmax, F.layer_norm, "matmul", "bmm", "baddbmm", "softmax",
}  # fmt: skip
_FILLED: dict[Any, float | None] = {
    torch.zeros: 0.0, torch.zeros_like: 0.0, "new_zeros": 0.0, torch.ones: 1.0, torch.ones_like: 1.0, "new_ones": 1.0,
    torch.full: None, torch.full_like: None, "new_full": None, torch.tensor: None, torch.scalar_tensor: None,
}  # fmt: skip
_MADE_OF_NUMBERS = {*PRODUCTS, *QUOTIENTS, *SUMS, *DIFFERENCES, *FILLS, torch.where, "fill_", *_FILLED}


def most_that_swallows(dtype: torch.dtype) -> float:
    """The largest number of a mask of ``dtype`` that leaves nothing of a score: its smallest, where that is no -1e30.

    A mask may be scaled with the scores, so that its smallest number has become another.
    """
    return max(torch.finfo(dtype).min, SWALLOWS)


def number_in(node: Any, changes: dict[Node, bool] | None = None) -> float | None:
    """The one number that ``node`` is, or that all elements of the tensor ``node`` are; None if not known.

    changes: what ``may_change`` remembers, here and below.
    """
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    dtypes: list[torch.dtype] = []
    while is_tensor(node) and not may_change(node, changes):
        dtypes.append(value_of(node).dtype)
        if node.target in _FILLED:
            return _rounded(_filled_with(node), dtypes[::-1])
        if not (node.target in SAME_VALUES or is_cast(node)):
            return None
        node = node.args[0] if node.args else None
    return None


def _filled_with(node: Node) -> Any:
    known = _FILLED[node.target]
    if known is not None:
        return known
    if node.target is torch.tensor:
        return argument(node, 0, "data")
    if node.target is torch.scalar_tensor:
        return argument(node, 0, "s")
    return argument(node, 2 if node.target == "new_full" else 1, "fill_value")


def _rounded(value: Any, dtypes: Iterable[torch.dtype]) -> float | None:
    """What becomes of a number in tensors of these dtypes, one after the other."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    with unset_fake_temporarily():
        tensor = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        for dtype in dtypes:
            tensor = tensor.to(dtype)
        return float(tensor)


def _constants(node: Node) -> Iterator[Any]:
    """What ``node`` is given beside other nodes, also in lists."""
    waiting = [*node.args, *node.kwargs.values()]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (list, tuple)):
            waiting.extend(each)
        elif not isinstance(each, Node):
            yield each


def _ends(node: Node) -> bool:
    """Does ``node`` hide nothing, whatever it is made from? A given table may, one that was learned does not."""
    if node.target is F.embedding:
        table = argument(node, 1, "weight")
        return is_tensor(table) and isinstance(value_of(table), Parameter)
    return node.target in _ENDS


def _behind(tensor: Node, changes: dict[Node, bool]) -> Iterator[Node]:
    """``tensor`` and what it is made from, but for what hides nothing whatever it is made from."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        node = waiting.pop()
        if _ends(node):
            continue
        yield node
        is_written_to = node.op != "placeholder" and may_change(node, changes)
        made_of = [*node.all_input_nodes, *(writers_of(node) if is_written_to else ())]
        new = [each for each in made_of if each not in seen]
        seen.update(new)
        waiting.extend(new)


def numbers_behind(tensor: Node, changes: dict[Node, bool]) -> Iterator[float]:
    """The numbers that ``tensor`` is made from and that, added to scores, could hide them. Whole ones that are positive
    are sizes and positions, unless something is filled with them, multiplied by them or moved by them."""
    for node in _behind(tensor, changes):
        for each in _constants(node) if node.op != "placeholder" else ():
            if isinstance(each, bool) or not isinstance(each, (int, float)):
                continue
            if abs(each) >= -HIDDEN and (isinstance(each, float) or each < 0 or node.target in _MADE_OF_NUMBERS):
                yield float(each)


def may_hide(tensor: Node, changes: dict[Node, bool]) -> bool:
    """Can ``tensor``, added to scores, hide any? Not if it is made of parameters, products and small numbers alone."""
    for node in _behind(tensor, changes):
        value = value_of(node)
        is_given = node.op == "placeholder" and isinstance(value, Tensor)
        if is_given and value.is_floating_point() and not value.requires_grad:
            return True
    return any(True for _ in numbers_behind(tensor, changes))


def is_zero_or_hidden(tensor: Any, changes: dict[Node, bool]) -> bool:
    """Is every element of ``tensor`` zero or a number that hides, by the way it was made?"""
    while isinstance(tensor, Node) and tensor.target in SAME_VALUES and not may_change(tensor, changes):
        tensor = tensor.args[0]
    if not isinstance(tensor, Node) or may_change(tensor, changes):
        return False
    if tensor.target is torch.where and len(tensor.args) == 3:
        choices = [number_in(each, changes) for each in tensor.args[1:]]
    elif tensor.target in FILLS and len(tensor.args) == 3:
        choices = [number_in(tensor.args[0], changes), number_in(tensor.args[2], changes)]
    else:
        return False
    return all(choice is not None and (choice == 0 or choice <= HIDDEN) for choice in choices)
