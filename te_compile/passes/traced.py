"""Functions of tensors, traced to plain operators, in the place of a node of the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from te_compile.ops.without_autocast import without_autocast
from te_compile.passes.arguments import result
from te_compile.passes.captured_nodes import size_hint
from te_compile.passes.new_nodes import place_of


def traced(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    """``function`` of ``tensors`` as a graph of the operators into which Inductor decomposes it."""

    def varying(*given: Tensor) -> Any:  # of a fixed number make_fx counts also those that have a default
        return function(*given)

    # Compilation may happen under the user's autocast; which dtypes ours have is ours to say. And not every operator in
    # C++ takes symbolic sizes.
    with torch.no_grad(), without_autocast(tensors[0].device.type), enable_python_dispatcher():
        opened = make_fx(varying, decomposition_table=select_decomp_table())(*tensors)
    opened.graph.eliminate_dead_code()  # for one, what reads a gradient that an operator does not return has no value
    assert isinstance(opened, GraphModule)
    return opened


def put_in_place(node: Node, opened: GraphModule, inputs: Sequence[Node]) -> list[Node]:
    """Put the nodes of ``opened`` where ``node`` stands, and as it does, for whoever reads that; returns those that
    somebody reads.

    opened: of ``inputs``; its results are those of ``node``, a tensor or several, None where that has none.
    """
    graph = node.graph
    copies: dict[Node, Node] = dict(zip(opened.graph.find_nodes(op="placeholder"), inputs, strict=True))
    new: list[Node] = []
    with graph.inserting_before(node):
        for each in opened.graph.nodes:
            if each.op == "call_function":
                copies[each] = graph.node_copy(each, copies.__getitem__)
                copies[each].meta = {**place_of(node), "val": each.meta["val"]}
                new.append(copies[each])
    outputs: Any = opened.graph.output_node().args[0]
    if isinstance(outputs, Node):
        node.replace_all_uses_with(copies[outputs])
    else:
        _replace_results(node, [copies.get(output) for output in outputs])
    graph.erase_node(node)
    for each in reversed(new):
        if not each.users:
            graph.erase_node(each)
    return [each for each in new if each.users]


def _replace_results(node: Node, outputs: Sequence[Node | None]) -> None:
    """Have the readers of the ``outputs`` that ``node`` has read these, and nobody read ``node``."""
    for index, output in enumerate(outputs):
        for item in result(node, index):
            if output is not None:
                item.replace_all_uses_with(output)
            node.graph.erase_node(item)


def no_guards(node: Node) -> AbstractContextManager[Any]:
    """In here a question about the symbolic sizes of ``node`` binds nobody. Tracing asks some in order to note how a
    result lies in memory: of a part of a tensor, say, whether it is the whole. For functions that copy whatever they
    have in another order, and so compute the same whatever the answer."""
    mode = detect_fake_mode(node.meta["val"])
    return nullcontext() if mode is None or mode.shape_env is None else mode.shape_env.suppress_guards()


def laid_out_like(value: Tensor, like: Tensor) -> Tensor:
    """A copy of ``value`` with its dimensions in the order in memory that those of ``like`` have, one behind the other:
    views of the one are views of the other."""
    order = sorted(range(like.dim()), key=lambda dimension: size_hint(like.stride(dimension)), reverse=True)
    back = [order.index(dimension) for dimension in range(like.dim())]
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
