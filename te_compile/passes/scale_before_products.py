"""Scale what a linear reads in place of its result, where the result is larger and the numbers stay the same.

    F.linear(x[T, K], weight[V, K]) * 2ⁿ        becomes        F.linear(x * 2ⁿ, weight)

Cohere and Granite scale their logits, by 1/16, 1/8 or another power of two. That is a pass over [tokens, vocabulary],
and another over its gradient, and the loss reads no product, so that lower_losses leaves it to Inductor. A power of two
changes no digit of a number, so the logits are the same wherever it is multiplied, and so are the gradients. Float16
has too few powers of two for that, and stays.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import is_tensor, size_hint, value_of
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.lone_linears import is_lone, operands, put_at_reader
from te_compile.passes.mask_numbers import PRODUCTS, QUOTIENTS
from te_compile.passes.writing import Writer
from te_compile.passes.written_tensors import writes

_EXACT = (torch.bfloat16, torch.float32)
_MOST = 64.0
"""A factor of this, or its inverse, still leaves all but the smallest and the largest numbers what they are."""


def scale_before_products(graph: Graph) -> int:
    """Move powers of two from results of linears to what these read, where that is smaller; returns how many."""
    transformed, count = transforms_around(graph), 0
    for node in graph.nodes:
        linear = None if node in transformed else _scaled_linear(node)
        if linear is not None:
            _move(node, linear)
            count += 1
    return count


def _factor(node: Node) -> float | None:
    """The power of two that ``node`` multiplies a tensor by; None if it does something else."""
    if node.target not in PRODUCTS | QUOTIENTS or len(node.args) != 2 or node.kwargs or writes(node):
        return None
    tensor, number = node.args if is_tensor(node.args[0]) else node.args[::-1]
    if not is_tensor(tensor) or isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if node.target in QUOTIENTS and number is not node.args[1]:
        return None
    is_power = number > 0 and math.frexp(number)[0] == 0.5 and 1 / _MOST <= number <= _MOST
    return (1 / number if node.target in QUOTIENTS else float(number)) if is_power else None


def _scaled_linear(node: Node) -> Node | None:
    """The linear whose result ``node`` scales, if what it reads can be scaled as well."""
    linear: Any = None if _factor(node) is None else next(each for each in node.args if is_tensor(each))
    if linear is None or not is_lone(linear, node):
        return None
    x, weight = operands(linear)
    values = [value_of(each) for each in (x, weight, linear, node)]
    is_exact = all(each.dtype in _EXACT for each in values) and values[2].dtype == values[3].dtype
    results, features = map(size_hint, values[1].shape)
    return linear if is_exact and results > features else None


def _move(scaling: Node, linear: Node) -> None:
    write = Writer(scaling, line=linear)
    put_at_reader(write, linear, write.call(operator.mul, operands(linear)[0], _factor(scaling)))
