"""Follow the result of a linear to who reads it: through views, casts and whatever else leaves its values as they are.

What a linear is for shows in its readers, behind such steps: a loss makes it a head, a ``topk`` a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from te_compile.passes.captured_nodes import name_called
from te_compile.passes.written_tensors import written_by

SAME_VALUES = {
    "view", "reshape", "float", "to", "type", "contiguous", "flatten", "transpose", "squeeze", "unsqueeze", "permute",
    "getitem", "bfloat16", "half", "double", "movedim", "unflatten", "t", "T", "mT", "detach", "clone", "stack",
    "swapaxes", "swapdims", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "index_select", "gather",
    "take_along_dim", "masked_select", "cat", "concat", "concatenate", "reshape_as", "view_as", "type_as", "ravel",
}  # fmt: skip
ARITHMETIC = {
    "add", "sub", "mul", "div", "truediv", "neg", "clamp", "tanh", "masked_fill", "where", "iadd", "isub", "imul",
    "itruediv",
}  # fmt: skip


def reached(node: Node, through: Callable[[Node], bool], limit: int = 64) -> Iterator[Node]:
    """Every user of ``node``, and of the values for which ``through`` holds on the way."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < limit:
        for user in waiting.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if through(user):
                    waiting.append(user)


def all_reached(node: Node, through: Callable[[Node], bool], limit: int = 64) -> list[Node] | None:
    """What ``reached`` gives where that is all that becomes of ``node``; None where it leaves the graph, is written to
    what was there before, or goes on for too long."""
    readers = list(reached(node, through, limit))
    known = {node, *readers}
    if len(known) >= limit or any(each.op == "output" for each in readers):
        return None
    return readers if all(written in known for each in readers for written in written_by(each)) else None


def plain_name(node: Node) -> str:
    """What ``node`` calls, by one name for it in place and not."""
    return name_called(node).removesuffix("_")


def keeps_values(node: Node) -> bool:
    """Does ``node`` give what it reads, or a part of it, in whatever shape, order or dtype?"""
    return plain_name(node) in SAME_VALUES
