"""Write ``x == y`` in one way: as a call of ``operator.eq``.

Dynamo of PyTorch 2.11 captures some operators of Python as calls of the method that a tensor has for them,
``x.__eq__(y)``, where later versions call the function. Other passes know functions: a mask that compares positions so
would be taken for one whose meaning nobody knows, and keep the fast attention kernels out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("invert", "getitem", "setitem", *_BINARY)},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in _BINARY},
}
_REFLECTED = {f"__r{name}__": getattr(operator, f"__{name}__") for name in _BINARY}


def plain_operators(graph: Graph) -> int:
    """Replace methods that stand for operators by the operators' functions; returns how many."""
    replaced = 0
    for node in graph.nodes:
        if node.op != "call_method" or node.kwargs:
            continue
        function = _FUNCTIONS.get(node.target)
        if function is None and node.target in _REFLECTED and len(node.args) == 2:
            function = _REFLECTED[node.target]
            node.args = (node.args[1], node.args[0])
        if function is not None:
            node.op, node.target = "call_function", function
            replaced += 1
    return replaced
