"""Let checkpointed regions run attention a second time without a word about random numbers, where it draws none.

See ops/recomputed_attention.py for what is wrong with PyTorch's own operators there.
"""

from __future__ import annotations

from torch._functorch.partitioners import must_recompute
from torch.fx import Graph, Node

from te_compile.ops.recomputed_attention import RECOMPUTED
from te_compile.passes.arguments import arguments_of, values_of


def recomputed_attentions(graph: Graph) -> int:
    """Call an operator of ours for each attention that the backward pass computes again; returns for how many."""
    changed = 0
    for node in graph.nodes:
        if node.target in RECOMPUTED and must_recompute(node):
            without, with_dropout = RECOMPUTED[node.target]
            node.target = without if _drops_nothing(node) else with_dropout
            # Inductor gives an operator its inputs in the layout recorded here; fusions have changed what they are.
            node.meta["eager_input_vals"] = values_of((node.args, node.kwargs))
            changed += 1
    return changed


def _drops_nothing(node: Node) -> bool:
    return bool(arguments_of(node)["dropout_p"] == 0)
