"""What a node of Dynamo's graph is: its example value, its arguments, the view it takes, what it writes to.

Dynamo's graph calls torch functions, tensor methods and Python operators, in whatever spelling the model used. Here is
what passes ask about such a node, so that none of them has to know all spellings.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_UNKNOWN_SIZE = 4096  # what a size that no example shows is taken for, in reports and in the cost model
_IN_PLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.setitem, operator.delitem,
}  # fmt: skip


def value_of(node: Any) -> Any:
    """The example value that Dynamo recorded, a fake tensor for tensors."""
    return None if node is None else node.meta.get("example_value")


def is_tensor(node: Any) -> TypeGuard[Node]:
    """Is ``node`` a node that holds one tensor?"""
    return isinstance(node, Node) and isinstance(value_of(node), Tensor)


def wrapped_kind(node: Any) -> str:
    """The class of a tensor that holds others, as a DTensor does, by its name; "" for a plain one.

    Such a class says itself what each operator means for it, and knows none of ours.
    """
    value = value_of(node) if isinstance(node, Node) else None
    return type(value).__name__ if is_traceable_wrapper_subclass(value) else ""


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def size_hint(size: Any) -> int:
    """A size as a number: a symbolic one as the example that compilation started from."""
    hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else _UNKNOWN_SIZE  # that of a jagged tensor is a symbol as well


def rows_of(x: Tensor) -> int:
    """The number of vectors along the last dimension, as a hint."""
    return math.prod(map(size_hint, x.shape[:-1]))


def called(node: Node) -> str:
    """``transpose`` for ``w.transpose(0, 1)`` and ``torch.transpose(w, 0, 1)``, ``T`` for ``w.T``; "" for no call."""
    if node.target is getattr:
        return str(node.args[1])
    if node.op == "call_method":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if isinstance(name, str) else ""


def storage_of(node: Node) -> int | None:
    """Equal for nodes that share their memory, as views of one tensor do; None for what is no tensor."""
    value = value_of(node)
    return _memory_of(value) if isinstance(value, Tensor) else None


def _memory_of(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor of another kind, which has no memory of its own
        return None


def memories_of(node: Node) -> set[int]:
    """What each of the tensors that ``node`` holds, one or several, has for its memory."""
    tensors = [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
    return {memory for tensor in tensors if (memory := _memory_of(tensor)) is not None}


def written_by(node: Node) -> Iterator[Node]:
    """The tensors that ``node`` changes in place."""
    if node.op not in ("call_function", "call_method"):
        return
    if isinstance(node.target, OpOverload):
        yield from _declared_written(node, node.target)
        return
    if isinstance(node.target, OpOverloadPacket):  # which of them it is, nobody has said yet
        for name in node.target.overloads():
            yield from _declared_written(node, getattr(node.target, name))
        return
    if isinstance(node.target, HigherOrderOperator):
        yield from _written_inside(node)
        return
    name, target = called(node), node.target
    # operator.and_ and its like end so because their names are Python's.
    ends_in_place = name.endswith("_") and not name.endswith("__") and getattr(target, "__module__", "") != "_operator"
    is_asked = node.kwargs.get("inplace") or _asks_by_position(node)
    if ends_in_place or target in _IN_PLACE_OPERATORS or is_asked:
        yield from _nodes_in(node.args[:1] or node.kwargs.get("input"))
    yield from _nodes_in(node.kwargs.get("out"))


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


@functools.cache
def _place_of_inplace(function: Any) -> int | None:
    """Where a function takes ``inplace``, if it does."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # one in C++, which is called by another name where it writes
        return None
    return names.index("inplace") if "inplace" in names else None


def _asks_by_position(node: Node) -> bool:
    """Is ``inplace`` given, and by its position, as in ``F.relu(x, True)``?"""
    if node.op != "call_function" or len(node.args) < 2:
        return False
    place = _place_of_inplace(node.target)
    return place is not None and len(node.args) > place and bool(node.args[place])


def writes(node: Node) -> bool:
    """Does ``node`` change a tensor in place, as far as its name and its arguments tell?"""
    return next(written_by(node), None) is not None


def _nodes_in(argument: Any) -> list[Node]:
    return [leaf for leaf in pytree.tree_leaves(argument) if isinstance(leaf, Node)]


def guards_of(placeholder: Node) -> Any:
    """Whose it is, in Dynamo's words (a ``GuardSource``): a module's or somebody else's; None if nobody noted it."""
    source = getattr(placeholder, "_dynamo_source", None)
    guards = getattr(source, "guard_source", None)
    return guards() if callable(guards) else guards
