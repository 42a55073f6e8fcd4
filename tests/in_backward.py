"""Something that is done while a backward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Doing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], object]) -> Tensor:
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.work()
        return gradient, None


def doing(work: Callable[[], object], x: Tensor) -> Tensor:
    """``x``; ``work`` is done where a backward pass gets to it."""
    done: Tensor = _Doing.apply(x, work)
    return done


def in_backward(*works: Callable[[], object], **how: Any) -> None:
    """Do ``works`` one after the other in one backward pass. how: the arguments of ``Tensor.backward``."""
    x = torch.ones((), requires_grad=True)
    for work in reversed(works):
        x = doing(work, x)
    x.backward(**how)
