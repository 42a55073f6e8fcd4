"""The graphs of a captured model: the root and every higher-order-op body inside it.

Activation checkpointing hands each layer over as ``tag_activation_checkpoint(wrap_body_N, …)``, and everything worth
rewriting lives in that body, whose placeholders are the layer's weights and inputs. A :class:`Region` is one such
graph; it can tell which root node a placeholder stands for, bring a root node in as a new operand, and send a value out
as a new result, so passes need not care how deep they are.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import is_tensor, value_of
from te_compile.passes.function_transforms import transforms_around
from te_compile.passes.sizes import all_same

ENTERED = ("tag_activation_checkpoint",)
"""Higher-order ops whose body is traced in place, once, with the call's own operands: safe to rewrite inside."""


@dataclass
class Region:
    """``module.graph``, and for a body the ``call`` node in the ``parent`` region that runs it.

    A body may hold many layers, and each linear in it asks for several operands, so nothing here walks over them all.
    """

    module: GraphModule
    parent: Region | None = None
    call: Node | None = None
    _positions: dict[Node, int] = field(default_factory=dict)  # of placeholders
    _inside: dict[Node, Node] = field(default_factory=dict)  # by a node of the root the placeholder for it

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
            operand = region.operand_of(node)
            if not isinstance(operand, Node):
                return None
            node, region = operand, region.parent
        return node

    def operand_of(self, placeholder: Node) -> Any:
        """What a body's call hands in for ``placeholder``."""
        assert self.call is not None, "the root is called by nobody in the graph"
        if placeholder not in self._positions:
            self._positions = {node: position for position, node in enumerate(self.placeholders)}
        return self.call.args[1 + self._positions[placeholder]]

    def bring_in(self, root_node: Node) -> Node:
        """A node of this region that holds the value of ``root_node``, which must come before the region's call."""
        if self.parent is None or self.call is None:
            return root_node
        if not self._inside:
            for node in reversed(self.placeholders):  # the first of several stays
                outside = self.at_root(node)
                if outside is not None:
                    self._inside[outside] = node
        known = self._inside.get(root_node)
        if known is not None and self.at_root(known) is root_node:
            return known
        operand, last = self.parent.bring_in(root_node), next(reversed(self._positions))
        with self.graph.inserting_after(last):
            brought = self.graph.placeholder(root_node.name)
        _call_given(brought)
        self._inside[root_node], self._positions[brought] = brought, len(self._positions)
        self.call.insert_arg(len(self.call.args), operand)
        return brought

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


def _call_given(placeholder: Node) -> None:
    """Give an operand of a body a name in its signature that is no method's and no other value's.

    Dynamo calls it after what is handed in: what ``mask.to(dtype)`` made is ``to`` inside, the target that a call of
    that method has.
    """
    placeholder.target = placeholder.graph._graph_namespace.create_name(f"given_{placeholder.name}", None)


_OF_THE_USER = "autograd_function_apply"
"""torch.autograd.Function: first a body for forward, then one for its gradients, which has no linears of the model."""


class Left(NamedTuple):
    """A body that is left alone, the higher-order op that runs it, and what the root hands in for its placeholders, as
    far as that is known."""

    operator: str
    body: GraphModule
    handed: dict[Node, Node]


def _handed(region: Region, call: Node, name: str, body: GraphModule) -> dict[Node, Node]:
    """The root's nodes that the placeholders of a body stand for: the last of what the operator is given, or all of it
    for a user's forward. Where an operator hands in something else, as one that maps slices does, nothing is known."""
    placeholders = body.graph.find_nodes(op="placeholder")
    given = call.args[2:] if name == _OF_THE_USER else pytree.tree_leaves(call.args)
    if len(given) < len(placeholders):
        return {}
    pairs = zip(placeholders, given[len(given) - len(placeholders) :], strict=True)
    known = {inner: region.at_root(outer) for inner, outer in pairs if isinstance(outer, Node)}
    return {inner: outer for inner, outer in known.items() if outer is not None and _look_alike(inner, outer)}


def _look_alike(inner: Node, outer: Node) -> bool:
    """Are both tensors of one shape?"""
    if not (is_tensor(inner) and is_tensor(outer)):
        return False
    shapes = value_of(inner).shape, value_of(outer).shape
    return len(shapes[0]) == len(shapes[1]) and all_same(*shapes)


def _bodies(region: Region) -> Iterator[tuple[Node, str, GraphModule]]:
    for node in region.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            for argument in node.args[:1] if node.target.name() == _OF_THE_USER else node.args:
                if isinstance(argument, Node) and argument.op == "get_attr":
                    body = getattr(region.module, str(argument.target), None)
                    if isinstance(body, GraphModule):
                        yield node, node.target.name(), body


def regions_of(module: GraphModule) -> tuple[list[Region], list[Left]]:
    """All regions that passes may rewrite, the root first; and the bodies that must be left alone."""
    entered: list[Region] = [Region(module)]
    left: list[Left] = []
    for region in entered:
        found, transformed = list(_bodies(region)), transforms_around(region.graph)
        calls = Counter(id(body) for _, _, body in found)
        for call, name, body in found:
            if name in ENTERED and calls[id(body)] == 1 and call not in transformed:
                entered.append(Region(body, region, call))
                for placeholder in entered[-1].placeholders:
                    _call_given(placeholder)
            else:
                left.append(Left(name, body, _handed(region, call, name, body)))
    for each in left:  # what is inside of those is left with them
        left += [Left(name, inner, {}) for _, name, inner in _bodies(Region(each.body))]
    return entered, left
