"""Read and change the arguments of operator nodes by their schema's names, never by position."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

_WRAPPERS = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)


def operator_of(node: Node) -> OpOverload | None:
    """The operator that a node calls, also where functionalization wrapped a mutating one; None for anything else."""
    target = node.args[0] if node.target in _WRAPPERS else node.target
    return target if isinstance(target, OpOverload) else None


def is_te(node: Node, name: str) -> bool:
    """Is ``node`` a call of ``te::name``?"""
    op = operator_of(node)
    return op is not None and op.name() in (f"te::{name}", f"te::{name}.default")


def arguments_of(node: Node) -> dict[str, Any]:
    """Schema name → argument, defaults included. For a wrapped mutating operator: what the wrapper passes by name."""
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    bound = {argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()}
    if node.target not in _WRAPPERS:
        bound.update(zip((argument.name for argument in op._schema.arguments), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def ordered_arguments(node: Node, **changes: Any) -> tuple[Any, ...]:
    """All arguments in the schema's order, with changes by name: what to call the operator again with."""
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    bound = {**arguments_of(node), **changes}
    return tuple(bound[argument.name] for argument in op._schema.arguments)


def set_arguments(node: Node, **changes: Any) -> None:
    """Change arguments by name; those given by position stay positional."""
    op = operator_of(node)
    assert op is not None, f"{node} calls no operator"
    names = [argument.name for argument in op._schema.arguments]
    args, kwargs = list(node.args), dict(node.kwargs)
    for name, value in changes.items():
        if name not in names:
            raise ValueError(f"{op.name()} has no argument {name!r}; it has {', '.join(names)}")
        position = names.index(name)
        if node.target not in _WRAPPERS and position < len(args):
            args[position] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs


def values_of(arguments: Any) -> Any:
    """``arguments`` with every node replaced by its fake value."""
    return pytree.tree_map(lambda a: a.meta.get("val") if isinstance(a, Node) else a, arguments)


def refresh_value(node: Node) -> None:
    """Recompute ``meta["val"]`` after a change of arguments, in the fake mode that the graph's values live in."""
    args, kwargs = values_of((node.args, node.kwargs))
    fakes = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch._subclasses.FakeTensor)]
    assert fakes and callable(node.target), f"{node} has no fake tensor among its arguments"
    with fakes[0].fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)


def result(node: Node, index: int) -> list[Node]:
    """The ``getitem(node, index)`` nodes."""
    return [user for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.args[1] == index]
