"""Keep the names of linears beside the nodes of products, not on them.

A product has a label, "blocks.3.fc1 wgrad", by which reports and errors speak of it. It is an argument like any other:
graphs of equal layers that differ by it alone are different graphs, and Inductor compiles each. Layers do come one by
one where a model's graph is cut, as DistributedDataParallel has it cut at its buckets. So what is compiled is left with
"wgrad", and one code serves all; the name stays in the node's metadata, where reports find it.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of, operator_of, set_arguments

_NAME = "te_label"


def set_names_aside(graph: Graph) -> int:
    """Shorten the label of each product to what it computes; returns how many were shortened."""
    shortened = 0
    for node in graph.nodes:
        label = label_of(node) if node.op == "call_function" else ""
        if label:
            node.meta[_NAME] = label
            set_arguments(node, label=label.rpartition(" ")[2])
            shortened += 1
    return shortened


def label_of(node: Node) -> str:
    """The whole label of a product, of a graph at any stage; "" for nodes that have none."""
    op = operator_of(node)
    if op is None or op.namespace != "te" or not any(argument.name == "label" for argument in op._schema.arguments):
        return ""
    label: str = node.meta.get(_NAME) or arguments_of(node)["label"]
    return label
