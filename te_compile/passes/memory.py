"""Tell the partitioner what must be saved between forward and backward, and what may change in between.

Facts that it cannot know. A recomputed scale would be the *updated* one: with activation checkpointing, gradients
would be wrong by several per cent, silently. And a backward state is meant to change between two backward passes that
share it (two forwards, then two backwards), which autograd's version check would refuse. And a ticket for a gradient
made anew would have another number.
"""

from __future__ import annotations

from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from te_compile.passes.arguments import is_te


def tag_memory(graph: Graph) -> int:
    """Mark snapshots and tickets as saved and updated states as free to change; returns the number of nodes marked."""
    marked = 0
    for node in graph.nodes:
        if is_te(node, "snapshot") or is_te(node, "gradient_ticket"):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
        elif is_te(node, "update_scales_"):
            for state in node.all_input_nodes:
                if state.op == "placeholder":
                    state.meta["saved_tensor_with_no_vc_check"] = True
                    marked += 1
    return marked
