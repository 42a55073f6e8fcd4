"""What a node of Dynamo's graph does besides computing its value: write into a tensor, or switch gradients or autocast.

A pass that gathers several nodes into one, or reads a tensor later than the model did, must know what lies between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, memories_of, name_called
from te_compile.passes.written_tensors import written_by

_BORDERS = {
    torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast,
}  # fmt: skip
_ALIASES = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "transpose", "swapaxes",
    "permute", "contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "getitem", "narrow",
    "select", "chunk", "split", "unbind", "detach", "t", "view_as", "dropout", "movedim", "diagonal", "unfold",
}  # fmt: skip


def _may_be_view(node: Node, source: Node) -> bool:
    """May ``node`` share the memory of ``source``, one of its operands? It does where Dynamo's example does, for there
    are more views than names; and where it may under other sizes, as the name of a view of its first operand says."""
    if not memories_of(source).isdisjoint(memories_of(node)):
        return True
    return (node.target is getattr or name_called(node) in _ALIASES) and argument(node, 0, "input") is source


def is_border(node: Node) -> bool:
    """Does ``node`` switch gradients or autocast on or off?"""
    return node.target in _BORDERS


def may_change(node: Node, known: dict[Node, bool] | None = None) -> bool:
    """Does anything write into ``node``, or into what may be a view of it?

    known: what was found out before, and from now on this. All layers read one mask, each a slice of its own, and the
    answer takes a look at all of them; a pass that asks in every layer remembers it for as long as it runs.
    """
    known = {} if known is None else known
    if node not in known:
        known[node] = _is_written_to(node)
    return known[node]


def _is_written_to(node: Node) -> bool:
    return next(writers_of(node), None) is not None


def writers_of(node: Node) -> Iterator[Node]:
    """What writes into ``node``, or into what may be a view of it."""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            if any(current is written for written in written_by(user)):
                yield user
            if user not in seen and _may_be_view(user, current):
                seen.add(user)
                waiting.append(user)


def _shares_memory_of(node: Node) -> Node | None:
    """What ``node`` is a view of or writes into; None if it has memory of its own."""
    if node.op not in ("call_function", "call_method"):
        return None
    own = memories_of(node)
    for written in written_by(node):
        if not own or not own.isdisjoint(memories_of(written)):  # else a result beside what it writes to
            return written
    return next((source for source in node.all_input_nodes if _may_be_view(node, source)), None)


def memory_of(node: Node) -> Node:
    """The node whose memory ``node`` may share: what it is a view of, or writes into, however often."""
    while (source := _shares_memory_of(node)) is not None:
        node = source
    return node


def _share_memory(node: Node, other: Node) -> bool:
    return memory_of(node) is memory_of(other) or not memories_of(node).isdisjoint(memories_of(other))


def changes_after(read: Node, last: Node, known: dict[Node, bool]) -> bool:
    """Does anything that follows ``last`` write into the memory of ``read``?

    Then ``last`` must not begin to read it: what it keeps for its gradients would be changed before they are computed.
    Only what reads that memory is looked at: this is asked in every layer, and a walk to the end of the graph for each
    would take time with the square of their number. known: what ``may_change`` remembers.
    """
    memory = memory_of(read)
    sharing = [memory] if may_change(memory, known) else []
    for node in sharing:
        for user in node.users:
            if last < user and any(node is written for written in written_by(user)):
                return True
            if _may_be_view(user, node) or any(node is written for written in written_by(user)):
                sharing.append(user)
    return False


def depends_on(node: Node, source: Node) -> bool:
    """Is ``node`` computed from ``source``, or is it that?"""
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        if current is source:
            return True
        new = [each for each in current.all_input_nodes if each not in seen and not each < source]
        seen.update(new)
        waiting.extend(new)
    return False


def undisturbed(first: Node, last: Node, own: Collection[Node], reads: Collection[Node]) -> bool:
    """Can what ``first`` begins be computed at ``last`` instead, from the tensors ``reads``?

    Not if gradients or autocast are switched between them, nor if a tensor that is read is changed in place there,
    other than by what made it. ``own`` are the nodes that will be no more.
    """
    node = first.next
    while node is not last:
        if node.op == "root" or is_border(node):
            return False
        written = [] if node in own else written_by(node)
        if any(_share_memory(read, each) and not depends_on(read, node) for each in written for read in reads):
            return False
        node = node.next
    return True
