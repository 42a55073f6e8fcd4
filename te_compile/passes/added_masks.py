"""What a mask shows that is added to scores: one of zeros and minus infinities says no more than booleans do.

``nn.MultiheadAttention`` makes such a mask of every mask that it is given, and so does code of which SDPA's booleans
are not the habit:

    torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, -inf)[:, None, None]     ->  ~hidden[:, None, None]
    torch.where(seen, 0.0, -inf) + torch.full((S, S), -inf).triu(1)                       ->  seen & ones.tril(0)

A number that is only small is none of these: where a row hides all of its keys it leaves them as they are to each
other.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from te_compile.passes.captured_nodes import argument, is_tensor, value_of
from te_compile.passes.drop_noop_casts import is_cast
from te_compile.passes.mask_numbers import FILLS, SAME_VALUES, SUMS, number_in
from te_compile.passes.side_effects import may_change, writers_of
from te_compile.passes.writing import Writer
from te_compile.passes.written_tensors import writes

_ZEROS = {torch.zeros, torch.zeros_like, "new_zeros"}


@dataclass(frozen=True)
class Shown:
    """A tensor of booleans that is not in the graph: a function, or a method by its name, of nodes, of others like this
    and of constants."""

    target: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two that have the same elements."""
        return self.target, _key((*self.arguments, self.named))

    def written(self, write: Writer) -> Node:
        """Its node."""
        arguments = [each.written(write) if isinstance(each, Shown) else each for each in self.arguments]
        add = write.method if isinstance(self.target, str) else write.call
        return add(self.target, *arguments, **dict(self.named))


def shown_by(mask: Any, changes: dict[Node, bool]) -> Shown | Node | None:
    """Which keys a mask shows that is added to scores, None if that is not known of it.

    changes: what ``may_change`` remembers. Nothing that the result is made of is written to.
    """
    if not is_tensor(mask) or may_change(mask, changes):
        return None
    value = value_of(mask)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.requires_grad:
        return None
    for of in (_filled, _chosen, _summed, _of_one_number, _moved):
        if (found := of(mask, changes)) is not None:
            return found
    return None


def _key(part: Any) -> Any:
    if isinstance(part, Shown):
        return part.key
    if isinstance(part, slice):  # has no hash before Python 3.12
        return slice, _key((part.start, part.stop, part.step))
    return tuple(map(_key, part)) if isinstance(part, (list, tuple)) else part


def _booleans(node: Any, changes: dict[Node, bool], reader: Node) -> Node | None:
    """``node``, if it is a tensor of booleans that nobody writes to; ``reader`` may write to something else."""
    if not is_tensor(node) or value_of(node).dtype != torch.bool:
        return None
    return node if not may_change(node, changes) or set(writers_of(node)) == {reader} else None


def _not(shown: Any) -> Shown:
    return Shown("logical_not", (shown,))


def _like(node: Node, shown: Any, model: Any) -> Any:
    """``shown``, which is made of booleans as large as ``model``'s, as large as ``node``."""
    sizes, others = value_of(node).shape, value_of(model).shape
    as_large = len(sizes) == len(others) and all(map(statically_known_true, map(operator.eq, sizes, others)))
    return shown if as_large else Shown("expand_as", (shown, node))


def _filled(node: Node, changes: dict[Node, bool]) -> Any:
    """Of zeros, or of such a mask, that are overwritten where something is hidden."""
    if node.target not in FILLS or len(node.args) != 3 or node.kwargs or number_in(node.args[2], changes) != -math.inf:
        return None
    base, hidden = node.args[0], _booleans(node.args[1], changes, node)
    if hidden is None or not isinstance(base, Node):
        return None
    shown = _like(node, _not(hidden), hidden)
    if writes(node):  # into memory of its own
        return shown if base.target in _ZEROS and set(writers_of(base)) == {node} else None
    if number_in(base, changes) == 0:
        return shown
    before = shown_by(base, changes)
    return None if before is None else Shown(operator.and_, (before, shown))


def _chosen(node: Node, changes: dict[Node, bool]) -> Any:
    """Of zero where a condition holds, or where it does not."""
    if node.target is not torch.where or len(node.args) != 3:
        return None
    condition, numbers = _booleans(node.args[0], changes, node), [number_in(each, changes) for each in node.args[1:]]
    if condition is None or sorted(map(str, numbers)) != ["-inf", "0.0"]:
        return None
    return _like(node, condition if numbers[0] == 0 else _not(condition), condition)


def _summed(node: Node, changes: dict[Node, bool]) -> Any:
    if node.target not in SUMS or len(node.args) != 2 or node.kwargs or writes(node):
        return None
    parts = [shown_by(each, changes) for each in node.args]
    return None if None in parts else Shown(operator.and_, tuple(parts))


def _of_one_number(node: Node, changes: dict[Node, bool]) -> Any:
    """Of zeros, or of minus infinities above a diagonal."""
    if number_in(node, changes) == 0:
        return Shown(torch.ones_like, (node,), (("dtype", torch.bool),))
    if node.target not in (torch.triu, "triu") or number_in(node.args[0], changes) != -math.inf:
        return None
    diagonal = argument(node, 1, "diagonal", 0)
    if not isinstance(diagonal, int):
        return None
    return Shown("tril", (Shown(torch.ones_like, (node.args[0],), (("dtype", torch.bool),)), diagonal - 1))


def _moved(node: Node, changes: dict[Node, bool]) -> Any:
    """Of such a mask in another floating dtype, or with its elements in other places."""
    if not node.args or not (is_cast(node) or node.target in SAME_VALUES):
        return None
    shown = shown_by(node.args[0], changes)
    if shown is None or value_of(node.args[0]).device != value_of(node).device:
        return None
    if is_cast(node):
        return shown
    tensors: list[Node] = []
    map_arg((node.args[1:], node.kwargs), lambda each: tensors.append(each) if is_tensor(each) else None)
    if tensors and node.target != "expand_as":
        return None
    return Shown(node.target, (shown, *node.args[1:]), tuple(node.kwargs.items()))
