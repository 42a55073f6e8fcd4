"""A graph as short text: what tests compare and dumps show.

One line per operation, ``name = op(arguments)``, without types and parameters, so that a difference between two texts
is one that a person would point at. Dumps want the types as well, and get them as comments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg


def op_name(node: Node) -> str:
    """``te.norm`` for operators, ``linear`` for functions, ``.view`` for methods."""
    target = node.target
    if isinstance(target, OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}"
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    return f".{target}" if isinstance(target, str) else getattr(target, "__name__", str(target))


class _Bare(str):
    """Text that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _argument(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(map_arg(value, lambda node: _Bare(node.name)))


def op_text(node: Node) -> str:
    """``y = te.norm(x, weight, None, 1e-06, 'rms')``."""
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{node.name} = {op_name(node)}({', '.join(arguments)})"


def value_text(value: Any) -> str:
    """``bfloat16[2, 32]`` for a tensor, a tuple of them for several results, nothing for anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    return ""


def ops_text(graph: Graph) -> str:
    """Every operation of ``graph`` in order, a line each, then what it returns."""
    lines = [op_text(node) for node in graph.nodes if node.op in ("call_function", "call_method")]
    return "\n".join([*lines, f"return {_argument(graph.output_node().args[0])}"])


def graph_text(graph: Graph) -> str:
    """The whole graph, inputs first, each value with its dtype and shape."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
            continue
        value = value_text(node.meta.get("val", node.meta.get("example_value")))
        is_call = node.op in ("call_function", "call_method")
        text = op_text(node) if is_call else f"{node.name} = {node.op} {node.target}"
        lines.append(f"{text}  # {value}" if value else text)
    return "\n".join(lines)
