"""Hand the amaxes of gradients to their update as they are, and not by way of one tensor of all.

They come back as the gradients of slots (te_compile.ops.gradient_slots), which autograd stacks, and the update takes
them apart again. In a deep model that is a tensor put together of hundreds of scalars, with a node and a copy for each,
to be read as the scalars that it was made of.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.passes.arguments import is_te
from te_compile.passes.pointwise_nodes import value_of

aten = torch.ops.aten


def _stacked(node: Any) -> list[Node] | None:
    """The scalars that ``node`` is the stack of, along dimension 0; None for anything else."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.clone.default:  # of one alone nothing is joined
        rows: Any = node.args[:1]
    elif node.target is aten.cat.default and node.args[1:] in ((), (0,)):
        rows = node.args[0]
    else:
        return None
    scalars = [row.args[0] for row in rows if row.target is aten.unsqueeze.default and row.args[1] == 0]
    whole = value_of(node)
    alike = whole is not None and all(
        (value := value_of(scalar)) is not None and value.dim() == 0 and value.dtype == whole.dtype
        for scalar in scalars
    )
    return scalars if alike and len(scalars) == len(rows) else None


def _is_for_an_update(item: Node) -> bool:
    """Is ``item`` an amax that an update takes, or of which one takes the larger of several?

    What the model itself returns must stay a tensor of its own.
    """
    return all(
        is_te(user, "update_scales_") or (user.target is aten.maximum.default and _is_for_an_update(user))
        for user in item.users
    )


def _erase_unread(nodes: list[Node]) -> None:
    for node in nodes:
        if not node.users:
            sources = node.all_input_nodes if node.target in (aten.cat.default, aten.clone.default) else []
            node.graph.erase_node(node)
            _erase_unread([each for each in sources if each.target is aten.unsqueeze.default])


def direct_amaxes(graph: Graph) -> int:
    """Replace each amax that was stacked and taken apart again by itself; returns how many."""
    count = 0
    for unbind in graph.find_nodes(op="call_function", target=aten.unbind.int):
        stack = unbind.args[0]
        scalars = _stacked(stack) if unbind.args[1:] in ((), (0,)) else None
        items = [user for user in unbind.users if user.target is operator.getitem]
        if scalars is None or len(items) != len(unbind.users) or not all(map(_is_for_an_update, items)):
            continue
        for item in items:
            index: Any = item.args[1]
            item.replace_all_uses_with(scalars[index])
            graph.erase_node(item)
        graph.erase_node(unbind)
        _erase_unread([stack])
        count += len(items)
    return count
