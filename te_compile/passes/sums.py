"""Sums of two gradients that the kernel which computes one of them could add on the way.

A tensor that is read twice has two gradients, and autograd adds them. Between the one and the sum stand only views, for
operators work on matrices.
"""

from __future__ import annotations

from torch.fx import Node

from te_compile.passes.arguments import arguments_of
from te_compile.passes.pointwise_nodes import VIEWS, aten, tensor_arguments, value_of
from te_compile.passes.sizes import all_same


def way_to_a_sum(gradient: Node) -> tuple[list[Node], Node] | None:
    """``gradient`` and the views of it up to the one that a sum reads, and that sum; None if anything else reads one of
    them."""
    way = [gradient]
    for node in way:
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if reader is not None and reader.target in VIEWS and tensor_arguments(reader) == [node]:
            way.append(reader)
        elif reader is not None and reader.target is aten.add.Tensor:
            return way, reader
    return None


def added_to(gradient: Node, total: Node) -> Node | None:
    """What ``total`` adds to ``gradient``; None if it is more than a sum of two tensors alike."""
    arguments = arguments_of(total)
    others = [each for each in (arguments["self"], arguments["other"]) if each is not gradient]
    if arguments["alpha"] != 1 or len(others) != 1:
        return None
    values = [value_of(each) for each in (gradient, others[0], total)]
    first = values[0]
    alike = first is not None and all(
        value is not None
        and (value.dtype, value.device, value.dim()) == (first.dtype, first.device, first.dim())
        and all_same(value.shape, first.shape)
        for value in values
    )
    return others[0] if alike and isinstance(others[0], Node) else None
