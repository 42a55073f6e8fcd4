"""An attention module that te_fp8 leaves closed: it hands torch.nn's function keys and values that are made already."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 4  # of the keys


class StaticKeys(nn.Module):
    """Projects queries [L, N, E] alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.packed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.ones(x.shape[1] * self.heads, LENGTH, self.width // self.heads, dtype=x.dtype)
        result, _ = F.multi_head_attention_forward(
            x, x, x, self.width, self.heads, self.packed.weight, self.packed.bias, None, None, False, 0.0,
            self.out.weight, self.out.bias, need_weights=False, static_k=keys, static_v=2 * keys,
        )  # fmt: skip
        return result
