"""``te::gather_backward``: the gradient of what each row of many matrices was gathered from, by indices that all share.

    y[b, i, j] = x[b, i, index[i, j]]                      gather, forward
    dx[b, i, r] = sum over j with index[i, j] = r of dy[b, i, j]

Disentangled attention gathers the scores of relative positions so, with the same indices in each head of each sequence.
In general a gradient of a gather is written by atomic additions. Where many matrices share the indices it is a product
of dy with what is 1 where an index is r, and each program of a kernel makes as much of that as it multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define

NARROW = (torch.bfloat16, torch.float16)
"""The dtypes of dy that a kernel multiplies."""


@registry.register("gather_backward", registry.REFERENCE)
def gather_backward_reference(dy: Tensor, index: Tensor, columns: int) -> Tensor:
    """See the module. dy: [B, I, J], any strides; index: [I, J] int32 or int64, each from 0 to ``columns`` - 1.

    Returns dx: [B, I, ``columns``], contiguous, of the dtype of dy; sums are taken in fp32.
    """
    zeros = torch.zeros(*dy.shape[:2], columns, dtype=torch.float32, device=dy.device)
    return zeros.scatter_add(2, index.long().expand(dy.shape), dy.float()).to(dy.dtype)


def _gather_backward(dy: Tensor, index: Tensor, columns: int, implementation: str = registry.REFERENCE) -> Tensor:
    return registry.function_of("gather_backward", implementation)(dy, index, columns)


def _gather_backward_fake(dy: Tensor, index: Tensor, columns: int, implementation: str = registry.REFERENCE) -> Tensor:
    return dy.new_empty((*dy.shape[:2], columns))


GATHER_BACKWARD = define(
    'gather_backward(Tensor dy, Tensor index, SymInt columns, str implementation="reference") -> Tensor',
    _gather_backward,
    _gather_backward_fake,
)
