"""Open every norm that no kernel runs, forward or backward, so that Inductor fuses it as it would have without us.

``te::norm_forward`` and ``te::norm_backward`` are opaque. A quantize takes the first along (fuse_norm_quantize.py), and
a kernel may run the second; what is left would be a wall between pointwise neighbours. It is replaced by its reference,
traced to the operators into which Inductor decomposes a LayerNorm and its backward itself.

A norm stays if the registry has something better for it than the reference. That is asked here, before the producers
look for pointwise nodes, and once more at the end, where the answer is written down (choose_implementations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops import registry
from te_compile.ops.norm import norm_reference
from te_compile.ops.norm_backward import norm_backward_reference
from te_compile.ops.without_autocast import without_autocast
from te_compile.passes.arguments import arguments_of, is_te, result, values_of
from te_compile.passes.choose_implementations import best_implementation

_REFERENCES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "norm_forward": norm_reference,
    "norm_backward": norm_backward_reference,
}
# Metadata of a node that speaks of its value or its implementation, not of where it stands.
_OF_THE_NODE = {"val", "tensor_meta", "eager_input_vals", "te_declined"}


def _name_of(node: Node) -> str | None:
    """Which of ``_REFERENCES`` a node calls, None if none."""
    return next((name for name in _REFERENCES if is_te(node, name)), None)


def _split(node: Node) -> tuple[dict[str, Node], dict[str, Any]]:
    """The arguments of a norm that are nodes, and those of its reference that are not, by name."""
    arguments = arguments_of(node)
    del arguments["implementation"]
    tensors = {name: argument for name, argument in arguments.items() if isinstance(argument, Node)}
    return tensors, {name: argument for name, argument in arguments.items() if name not in tensors}


def _trace(name: str, tensors: dict[str, Tensor], others: dict[str, Any]) -> GraphModule:
    """The reference of ``name`` as a graph whose inputs are ``tensors``, in their order."""

    def reference(*given: Tensor) -> tuple[Tensor, ...]:
        return _REFERENCES[name](**dict(zip(tensors, given, strict=True)), **others)

    given = list(tensors.values())
    # Compilation may happen under the user's autocast; fp32 statistics are ours to keep.
    with torch.no_grad(), without_autocast(given[0].device.type):
        return make_fx(reference, decomposition_table=select_decomp_table())(*given)


def _signature(name: str, tensors: dict[str, Tensor], others: dict[str, Any]) -> Any:
    """Equal signatures trace to equal graphs. Symbolic sizes are told apart by their expressions, one tensor given
    twice from two tensors by where each came first."""
    given = list(tensors.values())
    first = [next(i for i, other in enumerate(given) if other is tensor) for tensor in given]
    layouts = ((t.dtype, t.device, str(t.shape), str(t.stride())) for t in given)
    return (name, *tensors, *layouts, *first, *others.items())


def _inline(graph: Graph, norm: Node, opened: GraphModule, inputs: list[Node]) -> None:
    copies: dict[Node, Node] = dict(zip(opened.graph.find_nodes(op="placeholder"), inputs, strict=True))
    where = {key: value for key, value in norm.meta.items() if key not in _OF_THE_NODE}
    new: list[Node] = []
    with graph.inserting_before(norm):
        for node in opened.graph.nodes:
            if node.op != "call_function":
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {**where, "val": node.meta["val"]}
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
    """Replace each norm that no kernel runs by the plain operators of its reference; returns how many."""
    traced: dict[Any, GraphModule] = {}
    count = 0
    for node in list(graph.nodes):
        name = _name_of(node)
        if name is None or best_implementation(node)[0] != registry.REFERENCE:
            continue
        nodes, others = _split(node)
        tensors = values_of(nodes)
        key = _signature(name, tensors, others)
        if key not in traced:
            traced[key] = _trace(name, tensors, others)
        _inline(graph, node, traced[key], list(nodes.values()))
        count += 1
    return count
