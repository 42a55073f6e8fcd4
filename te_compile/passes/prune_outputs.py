"""Ask each quantize only for the layouts that somebody reads.

Lowering asks for both, because only the joint graph shows what is read: no transposed copy in inference, none of x for
a frozen weight, no row-major copy of a gradient whose input wants none.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_compile.ops.fused_quantize_pair import RESULTS_OF_ONE
from te_compile.passes.arguments import arguments_of, is_te, operator_of, refresh_value, result, set_arguments

PRODUCERS = ("quantize", "fused_quantize", "fused_quantize_cat", "fused_quantize_pair", "norm_quantize")
"""The operators that write q and qt."""
_FLAT = {"rowwise": 0, "columnwise": 1}
"""An operator that returns one list puts q and qt first,"""
_OF_SECOND = {"second_rowwise": RESULTS_OF_ONE, "second_columnwise": RESULTS_OF_ONE + 1}
"""and those of a second value after all that belongs to the first."""


def layouts_of(node: Node) -> dict[str, int]:
    """By the flag that asks for a layout, where in the results of a producer it is found."""
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    names = [returned.name or "" for returned in op._schema.returns]
    if is_te(node, "fused_quantize_pair"):
        return _FLAT | _OF_SECOND
    return {"rowwise": names.index("q"), "columnwise": names.index("qt")} if "q" in names else _FLAT


def prune_outputs(graph: Graph) -> int:
    """Clear ``rowwise`` / ``columnwise`` where q / qt has no reader; returns how many layouts were dropped."""
    graph.eliminate_dead_code()
    dropped = 0
    for node in graph.nodes:
        if not any(is_te(node, name) for name in PRODUCERS):
            continue
        arguments = arguments_of(node)
        unread = {flag: False for flag, i in layouts_of(node).items() if arguments[flag] and not result(node, i)}
        if unread:
            set_arguments(node, **unread)
            refresh_value(node)
            dropped += len(unread)
    return dropped
