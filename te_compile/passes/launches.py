"""How many kernels are launched for what a captured graph computes, by estimate.

Pointwise operators join their neighbours and views are none. What is left are products, whatever runs along rows or
looks elements up by place, and what is computed between two products. Routing tokens to experts, or scores that know
positions, are many such for each linear. Each is counted once, though sorting takes several: where the host's share is
in doubt, the device's stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import called, value_of

_PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "grouped_mm",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention",
}  # fmt: skip
_ALONG_ROWS = {
    "norm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "log_softmax", "logsumexp",
    "cross_entropy", "sum", "mean", "prod", "var", "std", "amax", "amin", "argmax", "argmin", "cumsum", "sort",
    "argsort", "topk", "histc", "bincount",
}  # fmt: skip
_BY_PLACE = {
    "embedding", "gather", "take_along_dim", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add",
    "index_copy", "index_put",
}  # fmt: skip
_KERNELS = _PRODUCTS | _ALONG_ROWS | _BY_PLACE
_ACTIVATIONS = {"gelu", "silu", "relu", "leaky_relu", "tanh", "sigmoid", "mish", "hardswish", "softplus", "elu"}


@dataclass(frozen=True)
class Launches:
    """How many kernels run forward: those that have a gradient, and those that have none."""

    with_gradient: int
    without: int


def launches_of(graphs: Iterable[Graph]) -> Launches:
    """Those of Dynamo's ``graphs``."""
    found = [_has_gradient(node) for graph in graphs for node in graph.nodes if _is_launched(node)]
    return Launches(sum(found), len(found) - sum(found))


def _is_launched(node: Node) -> bool:
    """Does a kernel of its own begin or end with the call?"""
    name = called(node)
    if name.endswith("_"):  # in place
        return name.removesuffix("_") in _KERNELS
    return bool(node.users) and name in _KERNELS | _ACTIVATIONS


def _has_gradient(node: Node) -> bool:
    return any(isinstance(each, Tensor) and each.requires_grad for each in pytree.tree_leaves(value_of(node)))
