"""Write ``x == y`` in one way, as a call of ``operator.eq``, and ``torch.ops.aten.linear`` as ``F.linear``.

Dynamo of PyTorch 2.11 captures some operators of Python as calls of the method that a tensor has for them,
``x.__eq__(y)``, where later versions call the function. Other passes know functions: a mask that compares positions so
would be taken for one whose meaning nobody knows, and keep the fast attention kernels out.

A program of ``torch.export`` calls ATen's operators, and so do some models. Those that other passes look for become the
functions of the same name, without which a whole model would stay in high precision and no report would tell.

The operand of ``torch.mean(input=x, dim=-1)`` is given by its place, where all passes look for it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("invert", "getitem", "setitem", *_BINARY)},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in _BINARY},
}
_REFLECTED = {f"__r{name}__": getattr(operator, f"__{name}__") for name in _BINARY}
_ATEN: dict[str, Callable[..., Any]] = {
    name: getattr(place, name)
    for place, names in (
        (torch, "matmul mm bmm addmm baddbmm addbmm inner einsum _grouped_mm embedding softmax log_softmax logsumexp"),
        (F, "linear bilinear conv1d conv2d conv3d layer_norm rms_norm scaled_dot_product_attention"),
    )
    for name in names.split()
}


def _function_of(node: Node) -> Callable[..., Any] | None:
    """The function that stands for the operator of ATen's that ``node`` calls, if it takes what that is given."""
    if not isinstance(node.target, (OpOverload, OpOverloadPacket)) or "out" in node.kwargs:
        return None
    overload = node.target if isinstance(node.target, OpOverload) else getattr(node.target, node.target.overloads()[0])
    namespace, _, name = overload._schema.name.partition("::")
    if namespace != "aten" or (name == "einsum" and len(node.args) < 2):
        return None
    return _ATEN.get(name)


def _call(node: Node, function: Callable[..., Any]) -> None:
    """Make ``node`` call ``function``, whose arguments are the operator's but for what they are called."""
    arguments: list[Any] = list(node.args)
    named = {"input" if name == "self" else name: given for name, given in node.kwargs.items()}
    if function is torch.einsum:
        arguments, named = [arguments[0], *arguments[1]], {}  # without the order in which to multiply
    if function is F.layer_norm:
        arguments, _ = arguments[:5], named.pop("cudnn_enable", None)
    node.target, node.args, node.kwargs = function, tuple(arguments), named


@functools.cache
def _takes_input_first(function: Any) -> bool:
    """Is the first parameter of a function the one that is called ``input``?"""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "input"
    except (TypeError, ValueError):  # one in C++: its operator has a schema
        operator = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
        overloads = [getattr(operator, name) for name in operator.overloads()] if operator is not None else []
        firsts = {overload._schema.arguments[0].name for overload in overloads if overload._schema.arguments}
        return not firsts.isdisjoint({"self", "input"})


def _place_input(node: Node) -> None:
    """Give the operand of ``torch.mean(input=x, …)`` by its position, where all passes look for it."""
    named = dict(node.kwargs)
    if node.op == "call_function" and not node.args and "input" in named and _takes_input_first(node.target):
        node.args, node.kwargs = (named.pop("input"),), named


def plain_operators(graph: Graph) -> int:
    """Replace methods and ATen operators that stand for functions by these; returns how many."""
    replaced = 0
    for node in graph.nodes:
        if function := _function_of(node):
            _call(node, function)
            replaced += 1
        _place_input(node)
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
