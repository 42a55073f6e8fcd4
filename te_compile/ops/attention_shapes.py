"""What operators of attention on [B, S, H, D] give, as shapes and dtypes, and how PyTorch's kernels read operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attended(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Fake out, as ``q``: [B, S, H, D], contiguous, and logsumexp: fp32 [B, H, S]."""
    batch, queries, heads, _width = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, queries), dtype=torch.float32)


def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Fake dq, dk and dv, as ``q``, ``k`` and ``v``, contiguous."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def side_by_side(x: Tensor) -> Tensor:
    """``x`` [..., D] with its features side by side, as PyTorch's kernels read queries, keys and values."""
    return x if x.stride(-1) == 1 else x.contiguous()
