"""Per-tensor FP8 as a textbook has it: the yardstick for whole models.

    Q(t) = fp8(t · s) / s,   s = fp8_max / max |t|

A linear computes Q(x) · Q(w)ᵀ + b with x and w in E4M3; its gradients are Q(dy) · Q(w) and Q(dy)ᵀ · Q(x) with dy in
E5M2. Grouped experts do the same on the rows of each, with one scale for all. Products are taken in fp32. Nothing of
te_compile is used here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(t: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """What is left of ``t`` after a trip through FP8, in fp32; ``scale`` None: taken from ``t`` itself."""
    largest = torch.finfo(dtype).max
    wide = t.detach().float()
    if scale is None:
        amax = wide.abs().amax() if wide.numel() else wide.new_zeros(())
        usable = bool(amax > 0) and bool(amax.isfinite())
        scale = torch.full_like(amax, largest) / amax if usable else torch.ones_like(amax)
    return (wide * scale).clamp(-largest, largest).to(dtype).float() * (1 / scale)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.x, ctx.w = rounded(x, FORWARD), rounded(w, FORWARD)
        ctx.dtypes = x.dtype, w.dtype, None if b is None else b.dtype
        y = ctx.x @ ctx.w.t()
        return (y if b is None else y + b.float()).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        g = rounded(dy, BACKWARD)
        dx = (g @ ctx.w).to(dy.dtype).to(ctx.dtypes[0])
        rows, columns = g.flatten(0, -2), ctx.x.flatten(0, -2)
        dw = (rows.t() @ columns).to(ctx.dtypes[1])
        db = None if ctx.dtypes[2] is None else dy.float().flatten(0, -2).sum(0).to(ctx.dtypes[2])
        return dx, dw, db, None


def emulated_linear(x: Tensor, w: Tensor, b: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x: [..., K], w: [N, K], b: [N]; the result [..., N] has the dtype of ``x`` or the one given."""
    return _Emulated.apply(x, w, b, x.dtype if dtype is None else dtype)


class _EmulatedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        stops = ends.tolist()
        ctx.groups = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        ctx.x, ctx.w, ctx.dtypes = rounded(x[: stops[-1]], FORWARD), rounded(w, FORWARD), (x.dtype, w.dtype)
        y = x.new_zeros(x.shape[0], w.shape[2], dtype=torch.float32)
        for rows, expert in zip(ctx.groups, ctx.w, strict=True):
            y[rows] = ctx.x[rows] @ expert
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        g = rounded(dy[: ctx.groups[-1].stop], BACKWARD)
        dx, dw = dy.new_zeros(dy.shape[0], ctx.w.shape[1], dtype=torch.float32), torch.zeros_like(ctx.w)
        for index, rows in enumerate(ctx.groups):
            dx[rows] = g[rows] @ ctx.w[index].t()
            dw[index] = ctx.x[rows].t() @ g[rows]
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), None


def emulated_experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x: [T, K], w: [E, K, N], ends: [E], the end of each expert's rows; y: [T, N], zero in rows of no expert."""
    return _EmulatedExperts.apply(x, w, ends)


def emulated(model: nn.Module, eligible: Callable[[str, nn.Module], bool]) -> nn.Module:
    """A copy of ``model`` whose linears run in emulated FP8 where ``eligible(module name, module)``.

    Both nn.Linear and Hugging Face's Conv1D, which keeps its weight as [K, N].
    """
    copied = copy.deepcopy(model)
    for name, module in copied.named_modules():
        is_conv1d = type(module).__name__ == "Conv1D"
        if not (isinstance(module, nn.Linear) or is_conv1d) or not eligible(name, module):
            continue

        def forward(x: Tensor, module: nn.Module = module, stored_kn: bool = is_conv1d) -> Tensor:
            weight = module.weight.t() if stored_kn else module.weight
            return emulated_linear(x, weight, module.bias)

        module.__dict__["forward"] = forward  # an instance attribute wins over the class's method
    return copied
