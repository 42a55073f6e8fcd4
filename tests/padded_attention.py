"""Rows of tokens of which one ends early, and models of attention that read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 512


class Checkpointed(nn.Module):
    """A block that runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, there, use_reentrant=False)
        return y


def padded(length: int) -> tuple[Tensor, Tensor]:
    """Two rows of tokens in bf16 on a GPU, [2, S, 512], and which are there, int64 [2, S]."""
    there = torch.ones(2, length, device="cuda", dtype=torch.long)
    there[0, length // 3 :] = 0
    return torch.randn(2, length, WIDTH, device="cuda", dtype=torch.bfloat16), there


def gradients(y: Tensor, model: nn.Module, dy: Tensor) -> tuple[Tensor, ...]:
    """Of the parameters."""
    return torch.autograd.grad(y, list(model.parameters()), dy)
