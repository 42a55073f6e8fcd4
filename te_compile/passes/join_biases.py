"""Give a linear the bias that is added to its result.

    F.linear(x, weight) + bias[N]        becomes        F.linear(x, weight, bias)

BART and its kin keep the bias of their head apart, as a buffer [1, V], ESM and LXMERT as a parameter. The logits are
then a sum, of which Inductor makes the loss, and the head's product writes them for the sum to be read once more. A
product adds its bias as it writes, in float32, so the result is rounded once in place of twice.

Only what is the same tensor otherwise: one number for each feature, in the dtype of the product and of the sum. An
autocast that adds a bias in float32 to a product in 16 bits makes another.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.lone_linears import is_lone, operands, put_at_reader
from te_compile.passes.mask_numbers import SUMS
from te_compile.passes.sizes import same
from te_compile.passes.writing import Writer
from te_compile.passes.written_tensors import writes


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
        is_its_own = linear is sides[0] or not writes(add)
        if is_its_own and is_lone(linear, add, bias) and _is_a_bias(*map(value_of, (bias, linear, add))):
            return linear, bias
    return None


def _is_a_bias(vector: Tensor, product: Tensor, total: Tensor) -> bool:
    """Is ``vector`` one number for each feature of ``product``, and ``total`` of the same dtype?"""
    if not 1 <= vector.dim() <= product.dim() or vector.device != product.device:
        return False
    is_row = same(vector.shape[-1], product.shape[-1]) and all(same(size, 1) for size in vector.shape[:-1])
    return is_row and vector.dtype == product.dtype == total.dtype


def _join(add: Node, linear: Node, bias: Node) -> None:
    write = Writer(add, line=linear)
    vector = bias if value_of(bias).dim() == 1 else write.method("reshape", bias, -1)
    put_at_reader(write, linear, operands(linear)[0], vector)
