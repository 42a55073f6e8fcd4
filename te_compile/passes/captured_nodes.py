"""What a node of Dynamo's graph is: its example value, its arguments, the memory that it has.

Dynamo's graph calls torch functions, tensor methods and Python operators, in whatever spelling the model used. Here is
what passes ask about such a node, so that none of them has to know all spellings.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_C: Any = torch._C  # whose stubs leave some of these out
_HOMES = (torch, F, torch.Tensor, _C._nn, _C._linalg, _C._special, _C._fft, operator, builtins, math)
_NAMESPACES = {"aten", "prims", "prim", "te"}
_UNKNOWN_SIZE = 4096  # what a size that no example shows is taken for, in reports and in the cost model
_ATTRIBUTES = {"numpy_T": "T", "matrix_H": "H"}  # of tensors: from PyTorch 2.14 on Dynamo captures their operators


def value_of(node: Any) -> Any:
    """The example value that Dynamo recorded, a fake tensor for tensors."""
    return None if node is None else node.meta.get("example_value")


def settled_number(given: Any) -> float | None:
    """The number ``given``, or that of a node that holds one on which the graph is guarded already; None otherwise.

    Where all is dynamic a module's float is symbolic, until an operator asks what it is, as dropout does."""
    value = value_of(given) if isinstance(given, Node) else given
    if isinstance(value, torch.SymFloat):
        return value.node.maybe_as_float()
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


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
    """The number of vectors along the last dimension, as a hint; of a jagged tensor those of all its rows together."""
    shape = x._values.shape if x.is_nested and x.layout is torch.jagged else x.shape  # type: ignore[attr-defined]
    return math.prod(map(size_hint, shape[:-1]))


def called(node: Node) -> str:
    """``transpose`` for ``w.transpose(0, 1)`` and ``torch.transpose(w, 0, 1)``, ``T`` for ``w.T``; "" for no call, and
    for one of what is not PyTorch's and has the name of something that is, or is another thing of PyTorch's, as
    ``torch.masked.softmax``."""
    if node.op == "call_function" and node.target is not getattr and not _is_what_its_name_says(node.target):
        return ""
    return name_called(node)


def name_called(node: Node) -> str:
    """The same, whoever's it is: for those who must guess what it may do."""
    if node.target is getattr:
        return str(node.args[1])
    if node.op == "call_method":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        name = node.target._schema.name.rpartition("::")[2]
    else:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return _ATTRIBUTES.get(name, name) if isinstance(name, str) else ""


def is_of_a_library(function: Any) -> bool:
    """Is it an operator that somebody registered with PyTorch?"""
    if isinstance(function, OpOverload):
        return function.namespace not in _NAMESPACES
    return isinstance(function, OpOverloadPacket) and function._qualified_op_name.partition("::")[0] not in _NAMESPACES


@functools.cache
def _is_what_its_name_says(function: Any) -> bool:
    """Is it PyTorch's or Python's function of this name, the one that everybody means by it?"""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return not is_of_a_library(function)
    name = getattr(function, "__name__", "")
    return isinstance(name, str) and any(getattr(home, name, None) is function for home in _HOMES)


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


def guards_of(placeholder: Node) -> Any:
    """Whose it is, in Dynamo's words (a ``GuardSource``): a module's or somebody else's; None if nobody noted it."""
    source = getattr(placeholder, "_dynamo_source", None)
    guards = getattr(source, "guard_source", None)
    return guards() if callable(guards) else guards
