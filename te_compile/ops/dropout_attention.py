"""``te::dropout_attention``: scaled dot-product attention with dropout, in the precision of its operands.

    p = softmax(q · kᵀ · scale)      z = keep ? 1 / (1 - probability) : 0      out = (p ∘ z) · v

    ds = p ∘ (z ∘ (dout · vᵀ) - Σ dout ∘ out) · scale
    dv = (p ∘ z)ᵀ · dout             dq = ds · k                               dk = dsᵀ · q

A composite, as ``te::linear`` is: after AOTAutograd the joint graph holds a seed that PyTorch's generator draws, the
bits that ``te::dropout_bits`` draws from it, and the two operators, which read the same bits. The probability is that
of up to sixteen binary places (``kept_share``), and z makes the expectation of p ∘ z equal to p by just that.

It has nothing to do with FP8. PyTorch's flash kernels draw each number twice and round the probability to 1 / 256,
cuDNN's round it to sixteenths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.attention_shapes import attended, gradients
from te_compile.ops.dropout_bits import DROPOUT_BITS, growth_of, unpacked
from te_compile.ops.fp8_attention import visible
from te_compile.ops.library import define, define_composite
from te_compile.ops.mask_tiles import tiles_of

SEEDS = 2**62


def _weights(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """The logits of [B, S, H, D]: fp32 [B, H, Sq, Sk]."""
    query, key = (x.transpose(1, 2).float() for x in (q, k))
    scores = query @ key.transpose(2, 3) * scale
    seen = visible(scores.shape[2], scores.shape[3], q.device)
    return scores.masked_fill(~seen, -torch.inf) if causal else scores


def dropout_factors(bits: Tensor, like: Tensor, probability: float) -> Tensor:
    """z, in the shape of the weights [B, H, Sq, Sk]. bits: of so many queries and keys, or more."""
    return unpacked(bits, like.shape[3])[:, : like.shape[2]].view(like.shape) * growth_of(probability)


def _in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype).contiguous()


@registry.register("dropout_attention_forward", registry.REFERENCE)
def dropout_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See the module. q: [B, Sq, H, D], k and v: [B, Sk, H, D], of one dtype, any strides; bits: int32 [B · H, W, Sq].

    Returns out: [B, Sq, H, D] contiguous, of that dtype; logsumexp: fp32 [B, H, Sq].
    """
    scores = _weights(q, k, causal, scale)
    kept = scores.softmax(3) * dropout_factors(bits, scores, probability)
    return _in_rows(kept @ v.transpose(1, 2).float(), q.dtype), scores.logsumexp(3)


@registry.register("dropout_attention_backward", registry.REFERENCE)
def dropout_attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    probability: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module. grad: [B, Sq, H, D]; out and logsumexp: as forward returned them.

    Returns dq, dk and dv in the shapes and dtype of q, k and v, contiguous.
    """
    scores = _weights(q, k, causal, scale)
    p, z = torch.exp(scores - logsumexp.unsqueeze(3)), dropout_factors(bits, scores, probability)
    dout, query, key, value, result = (x.transpose(1, 2).float() for x in (grad, q, k, v, out))
    shift = (dout * result).sum(dim=3, keepdim=True)
    ds = p * (z * (dout @ value.transpose(2, 3)) - shift) * scale
    dq, dk, dv = ds @ key, ds.transpose(2, 3) @ query, (p * z).transpose(2, 3) @ dout
    return _in_rows(dq, q.dtype), _in_rows(dk, q.dtype), _in_rows(dv, q.dtype)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    probability: float,
    causal: bool,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("dropout_attention_forward", implementation)
    return function(q, k, v, bits, probability, causal, scale)


DROPOUT_ATTENTION_FORWARD = define(
    "dropout_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bits, float probability, bool causal, "
    'float scale, str implementation="reference") -> (Tensor out, Tensor logsumexp)',
    _forward,
    attended,
)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    probability: float,
    causal: bool,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    function = registry.function_of("dropout_attention_backward", implementation)
    return function(grad, q, k, v, bits, out, logsumexp, probability, causal, scale)


DROPOUT_ATTENTION_BACKWARD = define(
    "dropout_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bits, Tensor out, Tensor logsumexp, "
    'float probability, bool causal, float scale, str implementation="reference") -> (Tensor dq, Tensor dk, Tensor dv)',
    _backward,
    gradients,
)


def drawn_bits(
    q: Tensor, k: Tensor, probability: float, causal: bool = False, tile: tuple[int, int] = (1, 1)
) -> Tensor:
    """Bits for the weights of q: [B, Sq, H, D] and k: [B, Sk, H, D], by a seed that PyTorch's generator draws.

    tile: draw for multiples of so many queries and keys.
    """
    batch, queries, heads, _ = q.shape
    drawn = [tiles_of(length, size) * size for length, size in zip((queries, k.shape[1]), tile, strict=True)]
    seed = torch.randint(SEEDS, (1,), device=q.device)
    bits: Tensor = DROPOUT_BITS(seed, batch * heads, *drawn, probability, causal)
    return bits


class _DropoutAttention(torch.autograd.Function):
    """The module's formulas, in operators of the joint graph; all tensors are [B, S, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, probability: float, causal: bool, scale: float) -> Tensor:
        bits = drawn_bits(q, k, probability, causal)
        out, logsumexp = DROPOUT_ATTENTION_FORWARD(q, k, v, bits, probability, causal, scale)
        ctx.save_for_backward(q, k, v, bits, out, logsumexp)
        ctx.constants = probability, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made = DROPOUT_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, *ctx.constants)
        wanted = zip(made, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None, None


def dropout_attention(q: Tensor, k: Tensor, v: Tensor, probability: float, causal: bool, scale: float) -> Tensor:
    """q: [B, H, Sq, D], k and v: [B, H, Sk, D], of one dtype; causal only where Sq = Sk. Returns [B, H, Sq, D].

    The result lies in memory as [B, Sq, H, D], for the output projection to read. probability: of dropping a weight,
    one that ``kept_share`` knows from 0 and 1.
    """
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    return _DropoutAttention.apply(*rows, probability, causal, scale).transpose(1, 2)


DROPOUT_ATTENTION = define_composite(
    "dropout_attention(Tensor q, Tensor k, Tensor v, float probability, bool causal, float scale) -> Tensor",
    dropout_attention,
)
