"""Which nodes only show what another one made."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node


def is_view(node: Node) -> bool:
    """Does ``node`` only show elements of its first operand, in any shape? A reshape counts as a view."""
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable or not node.all_input_nodes:
        return False
    returned = node.target._schema.returns
    is_reshape = node.target is torch.ops.aten.reshape.default
    return is_reshape or (len(returned) == 1 and returned[0].alias_info is not None)
