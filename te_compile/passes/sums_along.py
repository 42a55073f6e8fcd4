"""Which tensors, through pointwise nodes, come from sums along a dimension, or go into some."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from te_compile.passes.pointwise_nodes import is_pointwise
from te_compile.passes.remake_transposed import is_in_backward

aten = torch.ops.aten
SUMS = {aten.var_mean.correction, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default}
_SHOWN = {operator.getitem, aten.as_strided.default, aten.permute.default, aten.squeeze.dims}
"""What a sum's result, or a tensor before one, may go through beside pointwise nodes."""
MOST_NODES = 256


def comes_from_sums(node: Node, length: int) -> bool:
    """Is ``node`` computed, by way of pointwise nodes, from sums over ``length`` numbers or a multiple of that?"""
    return _meets_sums(node, length, lambda each: each.all_input_nodes)


def goes_into_sums(node: Node, length: int) -> bool:
    """Does somebody of the forward pass compute such sums from ``node``?"""
    return _meets_sums(node, length, lambda each: [user for user in each.users if not is_in_backward(user)])


def _meets_sums(start: Node, length: int, step: Callable[[Node], Iterable[Node]]) -> bool:
    seen, waiting = {start}, [start]
    while waiting and len(seen) <= MOST_NODES:
        for near in step(waiting.pop()):
            if near in seen:
                continue
            seen.add(near)
            if near.target in SUMS:
                if _summed(near) % length == 0:
                    return True
            elif is_pointwise(near) or near.target in _SHOWN:
                waiting.append(near)
    return False


def _summed(node: Node) -> int:
    """How many numbers each result of a sum is of; 1 where that is not known."""
    given, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
    result = value[0] if isinstance(value, tuple | list) else value
    sizes = (given.numel(), result.numel())
    if not all(isinstance(size, int) for size in sizes) or not sizes[1]:
        return 1
    return int(sizes[0] // sizes[1])
