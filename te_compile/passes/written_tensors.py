"""What a node of Dynamo's graph writes to: the tensors that it changes in place.

Most say so: by a trailing ``_``, by an operator such as ``+=``, by ``inplace`` or ``out``, in the schema of an operator
or in the body of a higher-order one. Some do not. Embeddings with ``max_norm`` shrink rows of their table, norms in
training renew their running statistics, fake quantization its range.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import argument, name_called, storage_of

_IN_PLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.setitem, operator.delitem,
}  # fmt: skip
_TABLES = (F.embedding, F.embedding_bag)
_STATISTICS = ("running_mean", "running_var")
_RENEWED_IF = ("training", "train", "use_input_stats")  # else norms only read their statistics


def written_by(node: Node) -> list[Node]:
    """The tensors that ``node`` changes in place, each once."""
    return list(dict.fromkeys(_written_by(node))) if node.op in ("call_function", "call_method") else []


def _written_by(node: Node) -> Iterator[Node]:
    if isinstance(node.target, OpOverload):
        yield from _declared_written(node, node.target)
        yield from _written_unsaid(node)
        return
    if isinstance(node.target, OpOverloadPacket):  # which of them it is, nobody has said yet
        for name in node.target.overloads():
            yield from _declared_written(node, getattr(node.target, name))
        yield from _written_unsaid(node)
        return
    if isinstance(node.target, HigherOrderOperator):
        yield from _written_inside(node)
        return
    name, target = name_called(node), node.target
    # operator.and_ and its like end so because their names are Python's.
    ends_in_place = name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", "") != "_operator"
    if ends_in_place or target in _IN_PLACE_OPERATORS or node.kwargs.get("inplace"):
        yield from _nodes_in(node.args[:1] or node.kwargs.get("input"))
    yield from _nodes_in(node.kwargs.get("out"))
    yield from _written_unsaid(node)


def _declared_written(node: Node, operator: OpOverload) -> Iterator[Node]:
    """The operands that ``operator`` declares that it writes to."""
    for index, declared in enumerate(operator._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield from _nodes_in(argument(node, index, declared.name))


def _written_inside(node: Node) -> Iterator[Node]:
    """The operands of a higher-order op whose body writes to what it is handed, or to a view of that; all of them where
    that is a Triton kernel of the user's."""
    if node.target is triton_kernel_wrapper_mutation:
        yield from _nodes_in(node.kwargs["kwargs"])
    owner = node.graph.owning_module
    for body_at, body in enumerate(node.args):
        module = getattr(owner, str(body.target), None) if isinstance(body, Node) and body.op == "get_attr" else None
        if not isinstance(module, GraphModule):
            continue
        memories = {storage_of(each) for inner in module.graph.nodes for each in written_by(inner)} - {None}
        handed = _nodes_in([*node.args[body_at + 1 :], *node.kwargs.values()])
        yield from (each for each in handed if storage_of(each) in memories)


def writes(node: Node) -> bool:
    """Does ``node`` change a tensor in place, as far as its name and its arguments tell?"""
    return bool(written_by(node))


class _Parameter(NamedTuple):
    """Where a function takes an argument, what it is if it is not given, and whether a schema says it is written to."""

    place: int
    default: Any
    is_written: bool = False


@functools.cache
def _parameters_of(name: str, function: Callable[..., Any] | None) -> dict[str, _Parameter]:
    """What a function of PyTorch's takes, by name; of one in C++ as the ATen operator of the same ``name`` does."""
    if inspect.isfunction(function):
        given = inspect.signature(function).parameters.values()
        return {each.name: _Parameter(place, each.default) for place, each in enumerate(given)}
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    found: dict[str, _Parameter] = {}
    for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
        if "out" not in overload:
            for place, each in enumerate(getattr(packet, overload)._schema.arguments):
                is_one = not each.kwarg_only and "List" not in str(each.type)
                writes_it = is_one and each.alias_info is not None and each.alias_info.is_write
                found.setdefault(each.name, _Parameter(place, each.default_value, writes_it))
    return found


def _written_unsaid(node: Node) -> Iterator[Node]:
    """What a function changes whose name does not tell, and which got no keyword that does."""
    function = node.target if callable(node.target) else None
    parameters = _parameters_of(name_called(node), function)

    def given(name: str) -> Any:
        return argument(node, parameters[name].place, name, parameters[name].default)

    if node.target in _TABLES and given("max_norm") is not None:
        yield from _nodes_in(given("weight"))
    if "inplace" in parameters and "inplace" not in node.kwargs and given("inplace") is True:
        yield from _nodes_in(node.args[:1])
    flags = [given(name) for name in _RENEWED_IF if name in parameters]
    renewed = _STATISTICS if all(flag is not False for flag in flags) else ()
    for name, parameter in parameters.items():
        if parameter.is_written or name in renewed:
            yield from _nodes_in(given(name))


def _nodes_in(argument: Any) -> list[Node]:
    return [leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Node)]
