"""Does it show in which order a tensor's elements lie in memory? Not where what reads it puts them in order anyway.

Dynamo's graph was traced with one kernel of an attention. Another's result may lie otherwise, as [batch, position,
head, feature] where the first one's lay as [batch, head, position, feature], and a ``view`` that follows would not work
on it. But most models permute the result and reshape it to rows, and then a copy beforehand would be one more pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils import _pytree as pytree

from te_compile.passes.captured_nodes import called, value_of
from te_compile.passes.side_effects import may_change

_PERMUTE = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis"}
_PUT_IN_ORDER = {"reshape", "flatten", "contiguous"}


def order_shows(node: Node, value: Tensor) -> bool:
    """Might users of ``node`` differ if its elements lay as those of ``value``, which is of the same shape?

    Of sizes that change nothing is asked, for each answer would become a guard.
    """
    if not all(isinstance(size, int) for size in value.shape) or may_change(node):
        return True
    return any(_shows_it(user, node, value) for user in node.users)


def _shows_it(user: Node, node: Node, value: Tensor) -> bool:
    name = called(user)
    constants = pytree.tree_leaves((user.args[1:], user.kwargs))
    if name not in _PERMUTE | _PUT_IN_ORDER or not user.args or user.args[0] is not node:
        return True
    if not all(type(constant) is int for constant in constants):
        return True
    made = _done(user, value)
    if name in _PERMUTE:
        return any(_shows_it(each, user, made) for each in user.users)
    return not (made.is_contiguous() and value_of(user).is_contiguous())


def _done(user: Node, value: Any) -> Tensor:
    target: Any = getattr(Tensor, str(user.target)) if user.op == "call_method" else user.target
    with value.fake_mode, enable_python_dispatcher():
        made: Tensor = target(value, *user.args[1:], **user.kwargs)
    return made
