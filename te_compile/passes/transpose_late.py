"""Write one layout where memory is tightest, and the other one when that has passed.

The peak of a backward pass lies where an activation's gradient is quantised: the gradient of its result and what its
forward read are there in high precision, and q and qᵀ beside them. But dgrad reads q alone, and wgrad can wait. So
such a producer writes q, and qᵀ is made of q, by a copy of bytes, before the product that reads it: by then what the
producer read is gone. The bits are those that the producer would have written.

Producers of one matrix alone are left: what they read is as large as what they write, and writing both at once is less
work. So are those of matrices whose length is symbolic: how many zeros fill it up is not known to the graph.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.ops.pointwise import Spec
from te_compile.ops.quantize import padded
from te_compile.passes.arguments import arguments_of, is_te, result
from te_compile.passes.new_nodes import call_like
from te_compile.passes.prune_outputs import layouts_of
from te_compile.passes.remake_transposed import is_in_backward

aten = torch.ops.aten
FEWEST_MATRICES = 2
"""Read by a producer, in high precision, for its two layouts to be made one after the other."""


def transpose_late(graph: Graph) -> int:
    """Make each qᵀ of a large producer of gradients of its q, where it is read; returns how many."""
    count = 0
    for name in ("fused_quantize", "fused_quantize_cat", "fused_quantize_pair"):
        for node in [each for each in graph.nodes if is_te(each, name)]:
            if is_in_backward(node) and _matrices(node) >= FEWEST_MATRICES:
                layouts = layouts_of(node)
                count += _transpose(node, layouts["rowwise"], layouts["columnwise"])
                if "second_rowwise" in layouts:
                    count += _transpose(node, layouts["second_rowwise"], layouts["second_columnwise"])
    return count


def _matrices(producer: Node) -> int:
    return Spec.parse(arguments_of(producer)["spec"]).matrices


def _transpose(producer: Node, rowwise: int, columnwise: int) -> int:
    """Replace one qᵀ, if both layouts are read; returns whether it did."""
    codes, transposed = result(producer, rowwise), result(producer, columnwise)
    readers = [reader for qt in transposed for reader in qt.users]
    if not readers or not any(q.users for q in codes) or not isinstance(codes[0].meta["val"].shape[0], int):
        return 0
    with producer.graph.inserting_before(min(readers)):
        new = _transposed(codes[0], min(readers))
    for qt in transposed:
        qt.replace_all_uses_with(new)
        producer.graph.erase_node(qt)
    return 1


def _transposed(q: Node, like: Node) -> Node:
    """Of codes [M, K] the qᵀ [K, ceil16(M)] that te::quantize gives, as nodes that stand where ``like`` does.

    As bytes: a copy of numbers in FP8 would convert them, and need not keep the sign of a NaN.
    """
    value = q.meta["val"]
    more = padded(value.shape[0]) - value.shape[0]
    node = call_like(aten.view.dtype, (q, torch.uint8), like)
    if more:
        node = call_like(aten.constant_pad_nd.default, (node, [0, 0, 0, more], 0), like)
    node = call_like(aten.permute.default, (node, [1, 0]), like)
    node = call_like(aten.clone.default, (node,), like, memory_format=torch.contiguous_format)
    return call_like(aten.view.dtype, (node, value.dtype), like)
