"""The graphs of a captured model: the root and every higher-order-op body inside it.

Activation checkpointing hands each layer over as ``tag_activation_checkpoint(wrap_body_N, …)``, and everything worth
rewriting lives in that body, whose placeholders are the layer's weights and inputs. A :class:`Region` is one such
graph; it can tell which root node a placeholder stands for, bring a root node in as a new operand, and send a value out
as a new result, so passes need not care how deep they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node

from te_compile.passes.function_transforms import transforms_around

ENTERED = ("tag_activation_checkpoint",)
"""Higher-order ops whose body is traced in place, once, with the call's own operands: safe to rewrite inside."""


@dataclass
class Region:
    """``module.graph``, and for a body the ``call`` node in the ``parent`` region that runs it."""

    module: GraphModule
    parent: Region | None = None
    call: Node | None = None
    brought: dict[Node, Node] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The region's own graph."""
        return self.module.graph

    @property
    def placeholders(self) -> list[Node]:
        """The region's inputs, in order."""
        return self.graph.find_nodes(op="placeholder")

    def at_root(self, node: Node) -> Node | None:
        """The root's node whose value ``node`` is, if only placeholders lie between; None for a computed value."""
        region: Region = self
        while region.parent is not None and region.call is not None:
            if node.op != "placeholder":
                return None
            operand = region.call.args[1 + region.placeholders.index(node)]
            if not isinstance(operand, Node):
                return None
            node, region = operand, region.parent
        return node

    def bring_in(self, root_node: Node) -> Node:
        """A node of this region that holds the value of ``root_node``, which must come before the region's call."""
        if self.parent is None or self.call is None:
            return root_node
        if root_node not in self.brought:
            known = [node for node in self.placeholders if self.at_root(node) is root_node]
            if known:
                return known[0]
            operand = self.parent.bring_in(root_node)
            with self.graph.inserting_after(self.placeholders[-1]):
                brought = self.graph.placeholder(root_node.name)
            # The body may have another value of this name; what counts in its signature is the target.
            brought.target = brought.name
            self.brought[root_node] = brought
            self.call.args = (*self.call.args, operand)
        return self.brought[root_node]

    def send_out(self, node: Node) -> Node:
        """A node of the root that holds the value of this region's ``node``."""
        if self.parent is None or self.call is None:
            return node
        output = self.graph.output_node()
        results = output.args[0]
        assert isinstance(results, (tuple, list)), "a higher-order-op body returns a tuple"
        output.args = ((*results, node),)
        with self.parent.graph.inserting_after(self.call):
            result = self.parent.graph.call_function(operator.getitem, (self.call, len(results)))
        return self.parent.send_out(result)


def _bodies(region: Region) -> Iterator[tuple[Node, str, GraphModule]]:
    for node in region.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            for argument in node.args:
                if isinstance(argument, Node) and argument.op == "get_attr":
                    body = getattr(region.module, str(argument.target), None)
                    if isinstance(body, GraphModule):
                        yield node, node.target.name(), body


def regions_of(module: GraphModule) -> tuple[list[Region], list[tuple[str, GraphModule]]]:
    """All regions that passes may rewrite, the root first; and (op, body) of those that must be left alone."""
    entered: list[Region] = [Region(module)]
    left: list[tuple[str, GraphModule]] = []
    for region in entered:
        found, transformed = list(_bodies(region)), transforms_around(region.graph)
        for call, name, body in found:
            shared = sum(other is body for _, _, other in found) > 1
            if name in ENTERED and not shared and call not in transformed:
                entered.append(Region(body, region, call))
            else:
                left.append((name, body))
    for _, body in left:  # what is inside of those is left with them
        left += [(name, inner) for _, name, inner in _bodies(Region(body))]
    return entered, left
