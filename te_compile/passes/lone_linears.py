"""A linear without a bias whose result a single node reads, so that it may be computed where that node stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from te_compile.passes.captured_nodes import argument, value_of, wrapped_kind
from te_compile.passes.side_effects import undisturbed
from te_compile.passes.writing import Writer

LINEARS: tuple[Callable[..., Tensor], ...] = (F.linear, torch._C._nn.linear)


def operands(linear: Node) -> tuple[Node, Node]:
    """What it multiplies: x and the weight."""
    return argument(linear, 0, "input"), argument(linear, 1, "weight")


def is_lone(linear: Node, reader: Node, *beside: Node) -> bool:
    """Does ``reader`` alone read ``linear``, which multiplies by a matrix and has no bias, and would it be the same at
    the reader's place, computed from what it reads and what stands ``beside``?"""
    if linear.target not in LINEARS or argument(linear, 2, "bias") is not None or set(linear.users) != {reader}:
        return False
    x, weight = operands(linear)
    if any(map(wrapped_kind, (x, weight, linear, reader, *beside))) or value_of(weight).dim() != 2:
        return False  # by a vector it is a product for each row
    return undisturbed(linear, reader, (linear, reader), (x, weight, *beside))


def put_at_reader(write: Writer, linear: Node, x: Node, bias: Node | None = None) -> None:
    """Put the linear of ``x`` and ``bias`` in the place of the reader, where ``write`` writes."""
    write.put_in_place(write.product(F.linear, x, operands(linear)[1], *([] if bias is None else [bias])))
    linear.graph.erase_node(linear)
