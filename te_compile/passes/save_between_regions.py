"""Save what one checkpointed region hands to the next, also where it is handed over under another shape.

The input of each region is what checkpointing keeps, and all else in it is computed again from that. Between regions
that follow each other it is a result of the first, recomputed like the rest; so the partitioner marks it as saved where
a later region reads it. But it takes no view's word for that: views cost nothing to make again, and it makes them
again, along with what they show. A block whose last node is a view then has its input from the block before, that from
the one before it, and the backward pass begins with all of the forward pass, with all that checkpointing was to drop
alive at once. A linear's result is such a view, and with it a residual stream that the product adds to.

So the mark goes to what the view shows.
"""

from __future__ import annotations

from torch._functorch.partitioners import must_recompute
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from te_compile.passes.views import is_view


def save_between_regions(graph: Graph) -> int:
    """Mark what is read by a later region through views as saved; returns how many nodes were marked."""
    views = [node for node in graph.nodes if is_view(node) and _is_handed_over(node)]
    marked = {source for view in views if _is_recomputed(source := _source_of(view))}
    for node in marked:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return len(marked)


def _is_recomputed(node: Node) -> bool:
    return must_recompute(node) and "ac_graph_id" in node.meta


def _is_handed_over(node: Node) -> bool:
    """Is ``node`` of a region, and read by a later one? They are numbered as they are run."""
    if not _is_recomputed(node):
        return False
    return any(_is_recomputed(user) and user.meta["ac_graph_id"] > node.meta["ac_graph_id"] for user in node.users)


def _source_of(view: Node) -> Node:
    """What ``view`` shows, whatever other views are between."""
    while is_view(view):
        view = view.all_input_nodes[0]
    return view
