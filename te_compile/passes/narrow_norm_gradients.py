"""Let a norm's backward read a gradient as it was made, and not a copy in float32.

Under autocast norms run in float32 and products in 16 bits, so a product's gradient is widened before it goes back
through the norm. The kernel widens what it reads anyway: the copy would be written and read, 8 bytes an element, for
nothing. A widening from 16 bits to 32 is exact, so no bit changes. Between the two stand only views.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from te_compile.passes.arguments import arguments_of, is_te, set_arguments
from te_compile.passes.new_nodes import reshaped, same_phase
from te_compile.passes.pointwise_nodes import CASTS, VIEWS, tensor_arguments, value_of

_NARROW = (torch.bfloat16, torch.float16)


def _of_16_bits(gradient: Node) -> Node | None:
    """What ``gradient``, of float32, is a widened view of, if it is one."""
    node = gradient
    while node.target in VIEWS or node.target in CASTS:
        sources = tensor_arguments(node)
        if len(sources) != 1:
            return None
        source, value = sources[0], value_of(sources[0])
        if node.target in CASTS:
            # Copies may lie elsewhere, or in another order.
            is_plain = set(node.kwargs) <= {"dtype"} and value is not None and value.dtype in _NARROW
            return source if is_plain else None
        node = source
    return None


def _narrow(norm: Node) -> bool:
    gradient = arguments_of(norm)["dy"]
    value = value_of(gradient)
    if value is None or value.dtype != torch.float32:
        return False
    source = _of_16_bits(gradient)
    if source is None or not same_phase(source, norm):
        return False
    with norm.graph.inserting_before(norm):
        set_arguments(norm, dy=reshaped(source, [-1, value.shape[1]], norm))
    return True


def narrow_norm_gradients(graph: Graph) -> int:
    """Have each ``te::norm_backward`` read its dy before it was widened; returns how many do now."""
    return sum(_narrow(node) for node in list(graph.nodes) if is_te(node, "norm_backward"))
