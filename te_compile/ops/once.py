"""``te::once``: its argument, computed before whoever reads it, and by nobody twice.

Inductor writes a pointwise value into the kernel of each reader, and computes it there for every element of the reader
that it is broadcast to. Where that is much work this operator stands between (passes/compute_once.py). It is none when
graphs run: Inductor's lowering makes a buffer of the argument (te_compile/fallbacks.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops.library import define


def _once(x: Tensor) -> Tensor:
    """See the module. x: any shape, dtype and strides. Returns its numbers, of the same shape and dtype."""
    return x.clone()


def _once_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


ONCE = define("once(Tensor x) -> Tensor", _once, _once_fake)
