"""Give a linear the bias that is added to its result.

    F.linear(x, weight) + bias[N]        becomes        F.linear(x, weight, bias)

BART and its kin keep the bias of their head apart, as a buffer [1, V], ESM and LXMERT as a parameter. The logits are
then a sum, of which Inductor makes the loss, and the head's product writes them for the sum to be read once more. A
product adds its bias as it writes, in float32, so the result is rounded once in place of twice.

Only what is the same tensor otherwise: one number for each feature, in the dtype of the product and of the sum. An
autocast that adds a bias in float32 to a product in 16 bits makes another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import argument, is_tensor, value_of, wrapped_kind
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.mask_numbers import SUMS
from te_compile.passes.side_effects import undisturbed
from te_compile.passes.sizes import same
from te_compile.passes.writing import Writer
from te_compile.passes.written_tensors import writes

_LINEARS: tuple[Callable[..., Tensor], ...] = (F.linear, torch._C._nn.linear)


def join_biases(graph: Graph) -> int:
    """Make vectors that are added to results of linears without a bias their biases; returns how many."""
    transformed, count = transforms_around(graph), 0
    for node in graph.nodes:
        found = None if node in transformed else _with_its_bias(node)
        if found is not None:
            _join(node, *found)
            count += 1
    return count


def _with_its_bias(add: Node) -> tuple[Node, Node] | None:
    """The linear and the vector that ``add`` adds, if the linear alone can do it."""
    if add.target not in SUMS or len(add.args) != 2 or add.kwargs or not all(map(is_tensor, add.args)):
        return None
    sides: list[Any] = list(add.args)
    for linear, bias in (sides, sides[::-1]):
        if _is_without_bias(linear) and set(linear.users) == {add} and _is_a_bias(bias, linear, add):
            reads = [bias, *(argument(linear, at, name) for at, name in enumerate(("input", "weight")))]
            is_its_own = not writes(add) or linear is sides[0]
            return (linear, bias) if is_its_own and undisturbed(linear, add, (linear, add), reads) else None
    return None


def _is_without_bias(node: Node) -> bool:
    is_alone = node.target in _LINEARS and argument(node, 2, "bias") is None
    return is_alone and bool(
        value_of(argument(node, 1, "weight")).dim() == 2
    )  # by a vector it is a product for each row


def _is_a_bias(vector: Node, linear: Node, add: Node) -> bool:
    """Is ``vector`` one number for each feature of ``linear``, and does nothing but its value change by the sum?"""
    bias, product, total = map(value_of, (vector, linear, add))
    if any(map(wrapped_kind, (vector, linear, add))) or not 1 <= bias.dim() <= product.dim():
        return False
    is_row = same(bias.shape[-1], product.shape[-1]) and all(same(size, 1) for size in bias.shape[:-1])
    return is_row and bias.dtype == product.dtype == total.dtype and bias.device == product.device


def _join(add: Node, linear: Node, bias: Node) -> None:
    write = Writer(add, line=linear)
    vector = bias if value_of(bias).dim() == 1 else write.method("reshape", bias, -1)
    x, weight = argument(linear, 0, "input"), argument(linear, 1, "weight")
    write.put_in_place(write.product(F.linear, x, weight, vector))
    linear.graph.erase_node(linear)
