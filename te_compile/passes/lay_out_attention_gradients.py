"""Let the gradient that cuDNN's attention reads lie in memory as its result does, by a plan that knows it so.

PyTorch keeps a plan of cuDNN's by the shapes and strides of q, k and v, by dropout and masks. The plan for the backward
pass has the strides of the result's gradient built in as well, and they are not part of the key (run_cudnn_SDP_bprop
in ATen/native/cudnn/MHA.cpp). Where a second attention reads alike q, k and v, and its gradient lies otherwise, it gets
the plan of the first, which reads the gradient in the first one's order: the gradients of q, k and v are wrong, and
nobody says so. In eager mode that is rare. Here it was not: an nn.MultiheadAttention that was opened has q, k and v in
the order of its batch, and the gradient that its last projection makes may have the order of positions.

So the gradient gets the order of the result, which follows from q's, and with it from the key. That is a copy only
where the model, or another pass, has it otherwise. And the plan gets a key of its own, for whoever else attends in this
process, in eager mode for instance, may have had one made for another order: the probability of dropout is compared by
its bits, so that -0.0 is another key than 0.0, and means the same. With dropout there is no such key. Then the gradient
is left as the model has it where the result is contiguous, for models transpose that, and whatever plan there is was
made for it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from te_compile.ops.library import NAMESPACE
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import call_like, held
from te_compile.passes.pointwise_nodes import VIEWS
from te_compile.passes.sizes import lie_alike

aten = torch.ops.aten
BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
GRADIENT, RESULT, DROPOUT = 0, 4, 13  # of its arguments
_OWN_KEY = -0.0
# A reshape may be a copy, which Inductor makes.
_VIEWS = VIEWS - {aten.reshape.default} | {
    aten.permute.default, aten.transpose.int, aten.t.default, aten.alias.default, aten.detach.default,
}  # fmt: skip


def _is_settled(node: Node) -> bool:
    """Does it lie as its value says? Inductor lays out as it likes what its own kernels write."""
    while node.target in _VIEWS or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" or getattr(node.target, "namespace", None) == NAMESPACE


def _in_order_of(result: Tensor, gradient: Node, attention: Node) -> Node:
    """A copy of ``gradient`` [B, H, S, D] that lies as ``result`` does, which has no gaps."""
    order = sorted(range(result.dim()), key=lambda place: size_hint(result.stride(place)), reverse=True)
    back = [order.index(place) for place in range(result.dim())]
    permuted = call_like(aten.permute.default, (gradient, order), attention)
    copy = call_like(aten.clone.default, (permuted,), attention, memory_format=torch.contiguous_format)
    return call_like(aten.permute.default, (copy, back), attention)


def _held(gradient: Node, attention: Node) -> Node:
    """``gradient`` as Inductor must lay it out; itself where it has no numbers for strides."""
    strides = gradient.meta["val"].stride()
    return held(gradient, strides, attention) if all(isinstance(stride, int) for stride in strides) else gradient


def _laid_out(gradient: Node, result: Tensor, attention: Node) -> Node:
    """``gradient``, as ``result`` lies: itself where it does, and Inductor cannot change that."""
    with attention.graph.inserting_before(attention):
        if not lie_alike(gradient.meta["val"], result):
            gradient = _in_order_of(result, gradient, attention)
        return gradient if _is_settled(gradient) else _held(gradient, attention)


def _has_own_key(attention: Node) -> bool:
    """Lay out the gradient that ``attention`` reads, where that is safe; has its plan a key of its own then?"""
    arguments: list[Any] = list(attention.args)
    result, may_drop = arguments[RESULT].meta["val"], arguments[DROPOUT] != 0
    if may_drop and result.is_contiguous():
        return False
    arguments[GRADIENT] = _laid_out(arguments[GRADIENT], result, attention)
    if not may_drop:
        arguments[DROPOUT] = _OWN_KEY
    attention.args = tuple(arguments)
    return not may_drop


def lay_out_attention_gradients(graph: Graph) -> int:
    """Have backwards of cuDNN's attention read gradients that lie as results do; returns how many have own plans."""
    return sum(_has_own_key(node) for node in list(graph.find_nodes(op="call_function", target=BACKWARD)))
