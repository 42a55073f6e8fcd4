"""``te::fp8_attention``: the forward pass of attention with both products in FP8.

For one query row and its visible keys, with all codes E4M3 and all arithmetic in fp32:

    s  = (q · k) · (q_scale_inv · k_scale_inv) · scale · log2(e)      scores, so that 2^s = e^(scaled product)
    m  = ⌈max s⌉                                                      a whole number
    p  = 2^(s - m + 8)                                                at most 256
    l  = Σ p
    out = Σ E4M3(p) · v / l · v_scale_inv                             rounded once, to ``out_dtype``
    logsumexp = ln 2 · (m - 8 + log2 l)                               natural, of the scaled products

A kernel sees keys block by block and must round p before it knows the final maximum. Because every maximum is a whole
number, what it rescales later by are powers of two, and rounding to E4M3 commutes with those: the codes are the same
whatever the blocks, where p is a normal E4M3 number (2^-6 or more). Smaller ones a kernel may round more finely than
is written here, never more coarsely: it is off by 2^-9 at most, where the largest p of the row is 128 or more. The 8
puts p at up to 256 of E4M3's 448: all powers of two round alike, and this one leaves most room below.

``causal`` shows query i the keys up to i, whatever their number (as ``F.scaled_dot_product_attention`` does). Queries
may have a multiple of the heads of keys and values; each of those then serves as many heads of queries, in order.

Tensor cores with FP8 operands read both along the contraction, and the second product contracts over keys. So values
come transposed: [Hk · D, B · Sk] and what pads its rows, as ``te::quantize`` gives it beside [B · Sk, Hk · D].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define

P_EXPONENT = 8  # the weight of the largest score lies in (2^7, 2^8]
LOG2_E = math.log2(math.e)


def visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys a query sees if attention is causal: bool [queries, keys]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values [B, S, Hk, D] as fp32 [B, H, S, D], one for each head of queries."""
    return x.float().transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


@registry.register("fp8_attention", registry.REFERENCE)
def fp8_attention_reference(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See the module. q: [B, Sq, H, D], k: [B, Sk, Hk, D], vt: [Hk · D, B · Sk or more] E4M3; scale_inv: [] fp32.

    Returns out [B, Sq, H, D] of ``out_dtype``, contiguous, and logsumexp [B, H, Sq] fp32. Queries without a key get 0
    and minus infinity.
    """
    heads, (batch, keys, shared, width) = q.shape[2], k.shape
    v = vt[:, : batch * keys].t().reshape(batch, keys, shared, width)
    q, k, v = (per_query_head(x, heads) for x in (q, k, v))
    if keys == 0:
        return torch.zeros_like(q.transpose(1, 2), dtype=out_dtype).contiguous(), q.new_full(q.shape[:3], -math.inf)
    scores = (q @ k.transpose(2, 3)) * (q_scale_inv * k_scale_inv * (scale * LOG2_E))
    if causal:
        scores = scores.masked_fill(~visible(q.shape[2], keys, q.device), -math.inf)
    largest = scores.amax(dim=3, keepdim=True).ceil()
    p = torch.exp2(scores - (largest - P_EXPONENT))
    total = p.sum(dim=3, keepdim=True)
    out = (p.to(torch.float8_e4m3fn).float() @ v) / total * v_scale_inv
    logsumexp = math.log(2) * (largest - P_EXPONENT + total.log2())
    return out.transpose(1, 2).to(out_dtype).contiguous(), logsumexp.squeeze(3)


def _fp8_attention(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
    label: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("fp8_attention", implementation)
    return function(q, k, vt, q_scale_inv, k_scale_inv, v_scale_inv, causal, scale, out_dtype)


def _fp8_attention_fake(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
    label: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty((batch, heads, queries), dtype=torch.float32)


FP8_ATTENTION = define(
    "fp8_attention(Tensor q, Tensor k, Tensor vt, Tensor q_scale_inv, Tensor k_scale_inv, Tensor v_scale_inv, "
    'bool causal, float scale, ScalarType out_dtype, str label, str implementation="reference") '
    "-> (Tensor out, Tensor logsumexp)",
    _fp8_attention,
    _fp8_attention_fake,
)
