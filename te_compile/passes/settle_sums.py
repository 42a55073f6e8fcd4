"""Have a sum over rows lie in memory of its own, where a ``cat`` would have it written into its part.

From 2.10 on Inductor computes two reductions of one tensor, along rows and along columns, in one kernel, and adds up
what its blocks found of the columns behind it. That last sum is given the name of the result, whose memory it was to
fill: where the result is a part of a ``cat``, which Inductor has its operands write into, nothing is ever written there
(pytorch#193061; 2.14.0 still does it). The gradients of scales and shifts that a model takes from one table by
``chunk``, as diffusion transformers do, are such parts, and whatever was in memory is what the table gets.

A result whose layout is settled before is copied into its part. It is as long as a row, and the copy takes no time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.passes.arguments import arguments_of
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import held

aten = torch.ops.aten

ON = {"cuda"}
"""The types of device for which Inductor writes such kernels."""
_REDUCTIONS = {aten.sum.dim_IntList, aten.prod.dim_int}


def settle_sums(graph: Graph) -> int:
    """Settle the layout of the operands of each ``cat`` that are such sums; returns of how many."""
    settled: dict[Node, Node] = {}
    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        for x in cat.all_input_nodes:
            if x in settled or _is_over_rows(x):
                settled[x] = settled.get(x) or _settled(x)
                cat.replace_input_with(x, settled[x])
    return len(settled)


def _is_over_rows(x: Node) -> bool:
    """Is it a reduction along dimensions that all lie before those that are left, as far as there is more than one?"""
    if x.target not in _REDUCTIONS:
        return False
    arguments = arguments_of(x)
    source: Tensor = arguments["self"].meta["val"]
    if source.device.type not in ON:
        return False
    given = arguments["dim"]
    along = {dim % source.dim() for dim in ([given] if isinstance(given, int) else given or range(source.dim()))}
    goes = [place in along for place, size in enumerate(source.shape) if not statically_known_true(size == 1)]
    return len(set(goes)) == 2 and goes == sorted(goes, reverse=True)


def _settled(x: Node) -> Node:
    """``x``, in the layout that it has, for good."""
    value: Tensor = x.meta["val"]
    strides = [size_hint(stride) for stride in value.stride()]  # their order is what counts
    with x.graph.inserting_after(x):
        return held(x, strides, x)
