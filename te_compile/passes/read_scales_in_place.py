"""Let the operators of a forward read their scales where the states have them, and not from a copy of all.

The snapshot is there for what runs after the update: a backward, and whatever it computes again (ops/scaling.py). In
the joint graph nobody can tell which of the scales that concerns. After the partitioner it shows: a scale that leaves
the graph, or is wanted once its state was updated, is one of the copy's; for all others the state still holds the very
number. The copy then waits until just before the update, and a forward that trains nothing needs none. That takes a
launch, and the look-up of every state's address, out of the way of a step's first product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from te_compile.ops.library import NAMESPACE
from te_compile.ops.scaling import SCALE
from te_compile.passes.arguments import is_te, operator_of
from te_compile.passes.new_nodes import call_like

aten = torch.ops.aten


def read_scales_in_place(graph: Graph) -> int:
    """Redirect what can be, in the graph of one direction; returns the number of reads redirected."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    redirected = 0
    for snapshot in [node for node in graph.nodes if is_te(node, "snapshot")]:
        states: Any = snapshot.args[0]
        if not all(isinstance(state, Node) and state.op == "placeholder" for state in states):
            continue
        updated = {state: _first_update(state, place) for state in states}
        rows = [(state, row) for state in states for row in range(state.meta["val"].shape[0])]
        for scale in list(snapshot.users):
            if scale.target is aten.select.int and scale.args[1] == 0:
                state, row = rows[scale.args[2]]
                redirected += _redirect(scale, state, row, updated[state], place)
        _postpone(snapshot, min(updated.values(), key=lambda node: place[node]), place)
    return redirected


def _first_update(state: Node, place: dict[Node, int]) -> Node:
    """The first node that may write to ``state``, or the graph's output."""
    writers = [user for user in state.users if user in place and not is_te(user, "snapshot")]
    return min([*writers, state.graph.output_node()], key=lambda node: place[node])


def _redirect(scale: Node, state: Node, row: int, update: Node, place: dict[Node, int]) -> int:
    """Give the operators that read ``scale`` before ``update`` the state's own number; how many did?"""
    readers = [user for user in scale.users if _only_reads(user) and place[user] < place[update]]
    if not readers:
        return 0
    with scale.graph.inserting_before(min(readers, key=lambda node: place[node])):
        own = call_like(aten.select.int, (call_like(aten.select.int, (state, 0, row), scale), 0, SCALE), scale)
    for reader in readers:
        reader.replace_input_with(scale, own)
    return len(readers)


def _only_reads(node: Node) -> bool:
    """Is ``node`` an operator of ours whose results are its own?"""
    operator = operator_of(node)
    return operator is not None and operator.namespace == NAMESPACE and not operator._schema.is_mutable


def _postpone(snapshot: Node, update: Node, place: dict[Node, int]) -> None:
    """Copy, if anyone still wants that, right before it is too late or the first of them comes."""
    for scale in list(snapshot.users):
        if not scale.users and scale.op != "output":  # which has no users, and may return the copy as a whole
            snapshot.graph.erase_node(scale)
    if not snapshot.users:
        snapshot.graph.erase_node(snapshot)
    elif all(scale.target is aten.select.int for scale in snapshot.users):
        wanted = [user for scale in snapshot.users for user in scale.users]
        latest = min([update, *wanted], key=lambda node: place[node])
        for node in (snapshot, *snapshot.users):
            latest.prepend(node)
