"""Does it show in which order a tensor's elements lie in memory? Not where what reads it puts them in order anyway.

Dynamo's graph was traced with one kernel of an attention. Another's result may lie otherwise, as [batch, position,
head, feature] where the first one's lay as [batch, head, position, feature], and a ``view`` that follows would not work
on it, nor would one outside of the graph, of a result. But most models permute the result and reshape it to rows, or
add it to a residual, which says how the sum lies, and then a copy beforehand would be one more pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import called, value_of
from te_compile.passes.side_effects import may_change
from te_compile.passes.sizes import lie_alike
from te_compile.passes.written_tensors import writes

_PERMUTE = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}
_PUT_IN_ORDER = {"reshape", "flatten", "contiguous"}
_PLAIN = {
    "add", "sub", "mul", "truediv", "neg", "relu", "gelu", "silu", "sigmoid", "tanh", "float", "to", "type_as",
    "layer_norm", "rms_norm", "linear",
}  # fmt: skip
"""Whose values depend on no order, unlike those of dropout, and whose layout follows from those of their operands."""


def order_shows(node: Node, value: Tensor) -> bool:
    """Might users of ``node`` differ if its elements lay as those of ``value``, which is of the same shape?

    Of sizes that change nothing is asked, for each answer would become a guard.
    """
    otherwise, waiting = {node: value}, {node}
    while waiting:
        changed = min(waiting)  # whatever it is made from is known by now
        waiting.remove(changed)
        if not all(isinstance(size, int) for size in value_of(changed).shape):
            return True
        if lie_alike(otherwise[changed], value_of(changed)):
            continue
        if may_change(changed):
            return True
        for user in changed.users:
            made = _made_otherwise(user, otherwise)
            if made is None:
                return True
            otherwise[user] = made
            waiting.add(user)
    return False


def _made_otherwise(user: Node, otherwise: dict[Node, Tensor]) -> Tensor | None:
    """What ``user`` makes where some of what it reads lies otherwise; None if that may show in more than its layout."""
    name, read = called(user), map_arg((user.args, user.kwargs), lambda node: otherwise.get(node, value_of(node)))
    known = all(value_of(node) is not None for node in user.all_input_nodes)
    if not known or not isinstance(value_of(user), Tensor) or writes(user):
        return None
    if name in _PERMUTE | _PUT_IN_ORDER:
        constants = pytree.tree_leaves((user.args[1:], user.kwargs))
        if not user.args or not all(type(constant) is int for constant in constants):
            return None
    elif name not in _PLAIN:
        return None
    args, kwargs = read
    target: Any = getattr(Tensor, str(user.target)) if user.op == "call_method" else user.target
    fake: Any = value_of(user)
    with fake.fake_mode, enable_python_dispatcher():
        made = target(*args, **kwargs)
    return made if isinstance(made, Tensor) else None
