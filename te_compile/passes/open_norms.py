"""Open every norm that no quantize took, so that Inductor fuses it as it would have without us.

``te::norm_forward`` is opaque: left in the graph, it would be a kernel of its own between pointwise neighbours. What
replaces it is its reference, traced to the operators into which Inductor decomposes a LayerNorm itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops.norm import norm_reference
from te_compile.passes.arguments import arguments_of, is_te, result, values_of

_TENSORS = ("x", "weight", "bias")


def _trace(tensors: list[FakeTensor | None], eps: float, kind: str) -> GraphModule:
    """``norm_reference`` as a graph whose inputs are those of ``tensors`` that are not None."""

    def reference(*given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        remaining = iter(given)
        x, weight, bias = (None if tensor is None else next(remaining) for tensor in tensors)
        assert x is not None
        return norm_reference(x, weight, bias, eps, kind)

    given = [tensor for tensor in tensors if tensor is not None]
    # Compilation may happen under the user's autocast; fp32 statistics are ours to keep.
    with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
        return make_fx(reference, decomposition_table=select_decomp_table())(*given)


def _signature(tensors: list[FakeTensor | None], eps: float, kind: str) -> Any:
    """Equal signatures trace to equal graphs. Symbolic sizes are told apart by their expressions."""
    layouts = (None if t is None else (t.dtype, t.device, str(t.shape), str(t.stride())) for t in tensors)
    return (*layouts, eps, kind)


def _inline(graph: Graph, norm: Node, opened: GraphModule) -> None:
    arguments = arguments_of(norm)
    inputs = iter([arguments[name] for name in _TENSORS if arguments[name] is not None])
    copies: dict[Node, Node] = {}
    new: list[Node] = []
    with graph.inserting_before(norm):
        for node in opened.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(inputs)
            elif node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {**norm.meta, "val": node.meta["val"]}
                new.append(copies[node])
    outputs: Any = opened.graph.output_node().args[0]
    for index, output in enumerate(outputs):
        for item in result(norm, index):
            item.replace_all_uses_with(copies[output])
            graph.erase_node(item)
    graph.erase_node(norm)
    for node in reversed(new):
        if not node.users:
            graph.erase_node(node)


def open_norms(graph: Graph) -> int:
    """Replace each ``te::norm_forward`` by the plain operators of its reference; returns how many."""
    norms = [node for node in graph.nodes if is_te(node, "norm_forward")]
    traced: dict[Any, GraphModule] = {}
    for norm in norms:
        arguments = arguments_of(norm)
        tensors = values_of([arguments[name] for name in _TENSORS])
        key = _signature(tensors, arguments["eps"], arguments["kind"])
        if key not in traced:
            traced[key] = _trace(tensors, arguments["eps"], arguments["kind"])
        _inline(graph, norm, traced[key])
    return len(norms)
