"""What stands inside a function transform of torch.func: vmap, grad, vjp, jvp and what is made of them.

Dynamo writes ``torch.vmap(f)(x)`` flat: a call that enters a level, the nodes of f, a call that leaves it. In between
tensors are wrapped, and each operator needs a rule for being batched, or differentiated once more. te_fp8's operators
have none, nor have the attention kernels of PyTorch for some transforms, so whatever stands there stays as it is.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from te_compile.passes.captured_nodes import name_called

_ENTERS, _LEAVES = "_increment_nesting", "_decrement_nesting"


def transforms_around(graph: Graph) -> dict[Node, str]:
    """For each node inside a transform, why it is left alone; the innermost transform is named."""
    around: dict[Node, str] = {}
    entered: list[str] = []
    for node in graph.nodes:
        name = name_called(node)
        if entered:
            transform = f"a function transform of torch.func ({entered[-1]})"
            around[node] = f"inside {transform}, which FP8 operators do not know; move it out of there for FP8"
        if name.endswith(_ENTERS):
            entered.append(name.removesuffix(_ENTERS).strip("_"))
        elif name.endswith(_LEAVES) and entered:
            entered.pop()
    return around
