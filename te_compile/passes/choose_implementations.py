"""Write on every te:: node which code will run it."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.ops import registry
from te_compile.passes.arguments import arguments_of, operator_of, set_arguments, values_of


def best_implementation(node: Node) -> tuple[str, list[str]]:
    """What would run a te:: node that has a choice, and why better ones cannot."""
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    target = registry.Target.of(tensors[0].device)
    return registry.choose(op._schema.name.removeprefix("te::"), target, values_of(arguments_of(node)))


def choose_implementations(graph: Graph) -> int:
    """Set ``implementation`` on each node to the best that fits its device, dtypes and shapes; returns how many."""
    chosen = 0
    for node in graph.nodes:
        op = operator_of(node) if node.op == "call_function" else None
        if op is None or op.namespace != "te" or "implementation" not in {a.name for a in op._schema.arguments}:
            continue
        name, declined = best_implementation(node)
        set_arguments(node, implementation=name)
        if node.target is op:
            # Inductor gives an operator its inputs in the layout recorded here; fusions have changed what they are.
            node.meta["eager_input_vals"] = values_of((node.args, node.kwargs))
        node.meta["te_declined"] = declined
        chosen += 1
    return chosen
