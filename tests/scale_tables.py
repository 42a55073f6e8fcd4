"""A block whose norms take scales and shifts from one table, as diffusion transformers have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Modulated(nn.Module):
    """Two linears behind norms that the four rows of ``table`` shift and scale: [1, S, width] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, later_shift, later_scale = self.table.chunk(4, dim=1)
        x = x + self.first(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        return x + self.second(F.layer_norm(x, x.shape[-1:]) * (1 + later_scale) + later_shift)
