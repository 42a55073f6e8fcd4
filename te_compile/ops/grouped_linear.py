"""``te::grouped_linear``: the linears of a mixture's experts in FP8, each on the tokens that were sent to it.

    y[m]  = Q(x[m]) · Q(w[e])ᵀ       dx[m] = Q(dy[m]) · Q(w[e])       dw[e] = Σ Q(dy[m])ᵀ · Q(x[m])

with e the expert of token m and the sum over its tokens: te_compile.ops.grouped_gemm says how groups are given. It is a
composite like ``te::linear``, and what stands there of the quantised weight, of padding and of ``slot`` holds here.

x and dy have one scale each, for all experts, and so does the weight: its FP8 state is the parameter's, and a state has
one row for each role whatever the parameter's shape. Experts of one layer are drawn alike and differ in magnitude far
less than by the fourteen binades of normal numbers that E4M3 has below its largest. So the weight is quantised as one
matrix, the experts on top of each other; in its transposed copy an expert is a run of columns.

Rows past the last end belong to no expert, and torch's own product leaves them unwritten, so that x and dy may hold
anything there. It must not reach an amax: ``te::owned_rows`` sets those rows of x to zero, once for all products that
read it, and the backward pass does so with dy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops.grouped_gemm import GROUPED_GEMM, GROUPED_WGRAD
from te_compile.ops.library import define_composite
from te_compile.ops.linear import LinearConfig, quantized_weight, weight_padding
from te_compile.ops.quantize import QUANTIZE


def owned_rows(x: Tensor, ends: Tensor) -> Tensor:
    """x: [T, K], zero in the rows from ``ends[-1]`` on."""
    owned = torch.arange(x.shape[0], device=x.device) < ends[-1]
    return torch.where(owned.unsqueeze(1), x, 0.0)


class _OwnedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor) -> Tensor:
        return owned_rows(x, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None  # from dgrad, which is zero in the other rows


OWNED_ROWS = define_composite("owned_rows(Tensor x, Tensor ends) -> Tensor", _OwnedRows.apply)


class _GroupedLinear(torch.autograd.Function):
    """The module's formulas and gradients, in operators of the joint graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        codes: Tensor | None,
        codes_transposed: Tensor | None,
        weight_scale_inv: Tensor | None,
        x_scale: Tensor | None,
        grad_scale: Tensor | None,
        slot: Tensor | None,
        out_dtype: torch.dtype,
        config: LinearConfig,
        weight_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stored, turned = _experts(codes, codes_transposed, weight.shape[0])
        along_k, along_n = (turned, stored) if config.transposed else (stored, turned)
        ctx.quantizes_weight = weight_scale_inv is None
        weight_amax = x.new_empty(0, dtype=torch.float32)
        if weight_scale_inv is None:
            along_k, weight_amax, weight_scale_inv = _quantized_experts(weight, weight_scale, config, forward=True)
            along_n = weight
        q, qt, amax, scale_inv = QUANTIZE(x, x_scale, config.forward, True, True, config.rule)
        y = GROUPED_GEMM(
            q, along_k, scale_inv, weight_scale_inv, ends, out_dtype, "fast", f"{config.name} forward"
        )  # fmt: skip
        ctx.save_for_backward(qt, scale_inv, along_n, weight_scale_inv, grad_scale, ends, weight_scale)
        ctx.config, ctx.has_slot = config, slot is not None
        ctx.x_dtype, ctx.weight_dtype, ctx.out_dtype = x.dtype, weight.dtype, out_dtype
        ctx.weight_padding = weight_padding(weight)
        ctx.mark_non_differentiable(amax, weight_amax)
        return y, amax, weight_amax

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        qt, scale_inv, along_n, weight_scale_inv, grad_scale, ends, weight_scale = ctx.saved_tensors
        config = ctx.config
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = grad_weight = grad_amax = None
        if needs_x and ctx.quantizes_weight:
            along_n = _quantized_experts(along_n, weight_scale, config, forward=False)[0]
        if needs_x or needs_weight:
            grad = owned_rows(grad, ends)
            q, q_transposed, grad_amax, grad_scale_inv = QUANTIZE(
                grad, grad_scale, config.backward, True, True, config.rule
            )
        if needs_x:
            scales = grad_scale_inv, weight_scale_inv
            grad_x = GROUPED_GEMM(q, along_n, *scales, ends, ctx.out_dtype, "split", f"{config.name} dgrad")
            grad_x = grad_x.to(ctx.x_dtype)
        if needs_weight:
            operands = (
                (qt, q_transposed, scale_inv, grad_scale_inv)
                if config.transposed
                else (q_transposed, qt, grad_scale_inv, scale_inv)
            )
            grad_weight = GROUPED_WGRAD(*operands, ends, ctx.weight_dtype, "split", f"{config.name} wgrad")
            if any(ctx.weight_padding):
                more_rows, more_columns = ctx.weight_padding
                grad_weight = F.pad(grad_weight, (0, -more_columns, 0, -more_rows))
        if not ctx.has_slot:
            grad_amax = None
        return grad_x, grad_weight, None, None, None, None, None, None, grad_amax, None, None, None


def _experts(
    codes: Tensor | None, codes_transposed: Tensor | None, experts: int
) -> tuple[Tensor | None, Tensor | None]:
    """Both copies of the weight, [E · R, C] and [C, E · R], expert by expert: [E, R, C] and [E, C, R]."""
    stored = None if codes is None else codes.unflatten(0, (experts, -1))
    turned = None if codes_transposed is None else codes_transposed.unflatten(1, (experts, -1)).transpose(0, 1)
    return stored, turned


def _quantized_experts(
    weight: Tensor, scale: Tensor | None, config: LinearConfig, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The copy that one product reads, expert by expert, made here; amax and scale_inv."""
    codes, amax, scale_inv = quantized_weight(weight, scale, config, forward)
    as_stored = config.transposed != forward
    stored, turned = _experts(codes if as_stored else None, None if as_stored else codes, weight.shape[0])
    experts = stored if stored is not None else turned
    assert experts is not None
    return experts, amax, scale_inv


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    codes: Tensor | None,
    codes_transposed: Tensor | None,
    weight_scale_inv: Tensor | None,
    x_scale: Tensor | None,
    grad_scale: Tensor | None,
    slot: Tensor | None,
    out_dtype: torch.dtype,
    config: str,
    weight_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [T, K], zero in rows of no expert; weight: [E, N, K] or [E, K, N], as the user stores it, for its gradient
    alone; ends: [E]; codes: the weight's FP8 copy as one matrix, each expert padded to multiples of 16, and
    codes_transposed its transpose, the one that no product reads may be absent; scales: [] fp32 (None: current).
    Without weight_scale_inv there are no copies, as in te::linear.
    Returns y [T, N], amax of x [], amax of the weight if it was quantised here, [], else [0]."""
    # As in te::linear: a slot must not make a frozen layer's result require a gradient.
    if slot is not None and not (x.requires_grad or weight.requires_grad):
        slot = slot.detach()
    constants = LinearConfig.parse(config)
    more_rows, more_columns = weight_padding(weight)
    more_in, more_out = (more_rows, more_columns) if constants.transposed else (more_columns, more_rows)
    if more_in:
        x = F.pad(x, (0, more_in))
    operands = x, weight, ends, codes, codes_transposed, weight_scale_inv, x_scale, grad_scale, slot
    y, amax, weight_amax = _GroupedLinear.apply(*operands, out_dtype, constants, weight_scale)
    if more_out:
        y = F.pad(y, (0, -more_out))
    return y, amax, weight_amax


GROUPED_LINEAR = define_composite(
    "grouped_linear(Tensor x, Tensor weight, Tensor ends, Tensor? codes, Tensor? codes_transposed, "
    "Tensor? weight_scale_inv, Tensor? x_scale, Tensor? grad_scale, Tensor? slot, ScalarType out_dtype, str config, "
    "Tensor? weight_scale=None) -> (Tensor y, Tensor amax, Tensor weight_amax)",
    grouped_linear,
)
