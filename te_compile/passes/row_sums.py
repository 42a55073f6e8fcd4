"""Sums over the rows of a matrix, the gradients of biases, which whoever computes the matrix could return beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from te_compile.passes.index_space import IndexSpace
from te_compile.passes.pointwise_nodes import aten, value_of


def is_row_sum(node: Node, space: IndexSpace) -> bool:
    """Is ``node`` the sum over exactly the dimensions that are z's rows?"""
    if node.target is not aten.sum.dim_IntList:
        return False
    summed, result = value_of(node.args[0]), value_of(node)
    if summed is None or result is None or result.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    cut = space.row_dimensions(summed.shape)
    given: Any = node.args[1]
    dimensions = sorted(d % summed.dim() for d in given or range(summed.dim()))
    return cut is not None and dimensions == list(range(cut)) and constant_shape(result) is not None


def constant_shape(value: Tensor) -> list[int] | None:
    """The shape as a view takes it, -1 for a symbolic size; None if there are two of those, or gaps in memory, or if
    nothing follows from the others, for one is 0."""
    shape = [size if isinstance(size, int) else -1 for size in value.shape]
    follows = shape.count(-1) == 0 or (shape.count(-1) == 1 and 0 not in shape)
    return shape if follows and value.is_contiguous() else None
