"""Attention with sinks as it is defined, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax over one column more. q: [B, H, Q, D]; k, v: [B, G, K, D], heads shared where G is less than H; sinks:
    what expands to [B, H, Q, 1]; mask: what is added, or bool."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3).softmax(3)[..., :-1] @ v
