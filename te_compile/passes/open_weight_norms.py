"""Open the backward of every weight norm, w = g · v / |v|, so that Inductor computes it as what it is, two sums.

    dg = Σ dw · v / |v|           dv = (g / |v|) · (dw - v · Σ dw · v / |v|²)           sums over all but one dimension

Inductor takes the forward apart and leaves the backward to PyTorch's own kernel. Of the 128 taps by which wav2vec 2.0
tells positions apart, a norm for each along the last dimension of a weight [1024, 64, 128], that takes 0.8 ms on an
H200; and a norm in float16, as the forward makes it, it refuses.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph

from te_compile.passes.arguments import arguments_of
from te_compile.passes.traced import put_in_place, traced

_BACKWARD = torch.ops.aten._weight_norm_interface_backward.default


def weight_norm_backward(dw: Tensor, v: Tensor, g: Tensor, norms: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The gradients of v and g, in the dtypes of these, computed in float32.

    dw, v: one shape; g, norms: of that shape along the dimension ``kept``, 1 along all others.
    """
    summed = [dimension for dimension in range(v.dim()) if dimension != kept]
    wide, size, gradient = v.float(), norms.float(), dw.float()
    along = (gradient * wide).sum(summed, keepdim=True) / size
    of_v = (g.float() / size) * (gradient - wide * (along / size))
    return of_v.to(v.dtype), along.to(g.dtype)


def open_weight_norms(graph: Graph) -> int:
    """Replace each backward of a weight norm by plain operators; returns how many."""
    nodes = graph.find_nodes(op="call_function", target=_BACKWARD)
    for node in nodes:
        given = arguments_of(node)
        inputs = [given[name] for name in ("grad_w", "saved_v", "saved_g", "saved_norms")]
        opened = traced(partial(weight_norm_backward, kept=given["dim"]), [each.meta["val"] for each in inputs])
        put_in_place(node, opened, inputs)
    return len(nodes)
