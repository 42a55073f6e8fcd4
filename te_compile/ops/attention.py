"""``te::attention``: scaled dot-product attention whose forward products are in FP8.

    out = te::fp8_attention(Q(q), Q(k), Q(v)ᵀ)          dq, dk, dv = te::attention_backward(dout, q̂, k̂, v̂, out, …)

A composite, as ``te::linear`` is: after AOTAutograd the joint graph holds its quantizes, with scales and amaxes, and
the two operators. Q is ``te::quantize`` with the scale measured on the tensor itself, under every recipe: FP8 state
belongs to a parameter, and attention has none.

The backward pass is in high precision, on what the codes stand for: x̂ = code · scale_inv, in the dtype of the result.
So it saves the codes, half of what attention in high precision saves of q, k and v, and its softmax is that of the
forward pass. Rounding, of the operands as of the softmax, counts as the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops.attention_backward import ATTENTION_BACKWARD
from te_compile.ops.fp8_attention import FP8_ATTENTION
from te_compile.ops.library import define_composite
from te_compile.ops.quantize import QUANTIZE

E4M3 = torch.float8_e4m3fn


def _quantized(x: Tensor, columnwise: bool, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of x [B, S, H, D] in its shape, those of the matrix [B · S, H · D] transposed if asked for, and scale_inv.

    The matrix is x as the projections write it.
    """
    batch, length, heads, width = x.shape
    matrix = x.reshape(batch * length, heads * width)
    q, qt, _, scale_inv = QUANTIZE(matrix, None, E4M3, True, columnwise, rule)
    return q.view(batch, length, heads, width), qt, scale_inv


def _dequantized(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.to(torch.float32) * scale_inv).to(dtype)


class _Attention(torch.autograd.Function):
    """The module's formulas, in operators of the joint graph; all tensors are [B, S, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        out_dtype: torch.dtype,
        rule: str,
        name: str,
    ) -> Tensor:
        q_codes, _, q_scale_inv = _quantized(q, False, rule)
        k_codes, _, k_scale_inv = _quantized(k, False, rule)
        v_codes, vt, v_scale_inv = _quantized(v, True, rule)
        out, logsumexp = FP8_ATTENTION(
            q_codes, k_codes, vt, q_scale_inv, k_scale_inv, v_scale_inv, causal, scale, out_dtype, name
        )
        ctx.save_for_backward(q_codes, k_codes, v_codes, q_scale_inv, k_scale_inv, v_scale_inv, out, logsumexp)
        ctx.constants = causal, scale, name
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, out, logsumexp = ctx.saved_tensors
        q, k, v = (_dequantized(*pair, out.dtype) for pair in zip(saved[:3], saved[3:], strict=True))
        gradients = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, *ctx.constants)
        wanted = zip(gradients, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        return *(gradient.to(dtype) if needed else None for gradient, dtype, needed in wanted), *[None] * 5


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
    rule: str,
    name: str,
) -> Tensor:
    """q: [B, H, Sq, D], k and v: [B, Hk, Sk, D] bf16, fp16 or fp32, H a multiple of Hk. Returns [B, H, Sq, D].

    The result lies in memory as [B, Sq, H, D], for the output projection to read. rule: the scale rule's text; name:
    of the attention, for people and reports.
    """
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return _Attention.apply(*rows, causal, scale, out_dtype, rule, name).transpose(1, 2)


ATTENTION = define_composite(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, ScalarType out_dtype, str rule, str name) "
    "-> Tensor",
    attention,
)
