"""``te::masked_attention``: scaled dot-product attention under a boolean mask, which is read by tiles.

    s = q · kᵀ · scale  where the query sees the key, else -∞
    p = softmax(s)      z = keep ? 1 / (1 - probability) : 0      out = (p ∘ z) · v

    ds = p ∘ (z ∘ (dout · vᵀ) - Σ dout ∘ out) · scale
    dv = (p ∘ z)ᵀ · dout           dq = ds · k           dk = dsᵀ · q

z is 1 without a dropout; with one its bits are those of ``te::dropout_attention``. A query that sees nothing has a
result of 0, as in PyTorch's attention, and gradients of 0. All heads have one mask, the rows of a batch one each or all
the same. Keys and values may have fewer heads than queries, of which each serves several in a row.

A composite, as ``te::linear`` is, and nothing about FP8. PyTorch's kernels read a mask for each pair of query and key,
and compute all of them; the C++ core's (kernels/native_attention.py) compute what ``te::mask_tiles`` says is seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.attention_shapes import attended, gradients
from te_compile.ops.dropout_attention import drawn_bits, dropout_factors
from te_compile.ops.library import define, define_composite
from te_compile.ops.mask_tiles import KEYS, STEP, unpacked
from te_compile.ops.window_attention import grouped_heads, in_rows


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """s: fp32 [B, H, Sq, Sk]. seen: bool [M, Sq, Sk]."""
    scores = grouped_heads(q, q) @ grouped_heads(k, q).mT * scale
    return scores.masked_fill(~seen.unsqueeze(1), -torch.inf)


@registry.register("masked_attention_forward", registry.REFERENCE)
def masked_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    row_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See the module. q: [B, Sq, H, D]; k, v: [B, Sk, G, D], H a multiple of G; of one dtype, any strides; rows and
    row_tiles: as ``te::mask_tiles`` makes them, with M of 1 or B; bits: int32, of a dropout of that probability, as
    :func:`bits_of_tiles` draws them, None for none.

    Returns out: [B, Sq, H, D] contiguous, of that dtype; logsumexp: fp32 [B, H, Sq], -∞ where nothing is seen.
    """
    scores = _scores(q, k, unpacked(rows, k.shape[1]), scale)
    logsumexp = scores.logsumexp(3)
    p = torch.exp(scores - _finite(logsumexp))
    return in_rows(p * factors_of(bits, p, probability) @ grouped_heads(v, q), q), logsumexp


def factors_of(bits: Tensor | None, like: Tensor, probability: float) -> Tensor | float:
    """z, in the shape of the weights or for all of them."""
    return 1.0 if bits is None else dropout_factors(bits, like, probability)


def _finite(logsumexp: Tensor) -> Tensor:
    """To subtract from scores: [B, H, Sq, 1], with 0 for queries all of whose scores are -∞."""
    return logsumexp.where(logsumexp > -torch.inf, 0).unsqueeze(3)


@registry.register("masked_attention_backward", registry.REFERENCE)
def masked_attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    columns: Tensor,
    column_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module. grad: [B, Sq, H, D]; out and logsumexp: as forward returned them.

    Returns dq, dk and dv in the shapes and dtype of q, k and v, contiguous.
    """
    scores = _scores(q, k, unpacked(columns, q.shape[1]).mT, scale)
    p = torch.exp(scores - _finite(logsumexp))
    z = factors_of(bits, p, probability)
    dout, result = grouped_heads(grad, grad), grouped_heads(out, out)
    shift = (dout * result).sum(dim=3, keepdim=True)
    ds = p * (dout @ grouped_heads(v, q).mT * z - shift) * scale
    dq, dk, dv = ds @ grouped_heads(k, q), ds.mT @ grouped_heads(q, q), (p * z).mT @ dout
    return in_rows(dq, q), in_rows(dk, k), in_rows(dv, v)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    row_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("masked_attention_forward", implementation)
    return function(q, k, v, rows, row_tiles, bits, probability, scale)


MASKED_ATTENTION_FORWARD = define(
    "masked_attention_forward(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor row_tiles, Tensor? bits, "
    'float probability, float scale, str implementation="reference") -> (Tensor out, Tensor logsumexp)',
    _forward,
    attended,
)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    columns: Tensor,
    column_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    function = registry.function_of("masked_attention_backward", implementation)
    return function(grad, q, k, v, out, logsumexp, columns, column_tiles, bits, probability, scale)


MASKED_ATTENTION_BACKWARD = define(
    "masked_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor columns, Tensor column_tiles, Tensor? bits, float probability, float scale, "
    'str implementation="reference") -> (Tensor dq, Tensor dk, Tensor dv)',
    _backward,
    gradients,
)


def bits_of_tiles(q: Tensor, k: Tensor, probability: float) -> Tensor:
    """Which weights of q: [B, Sq, H, D] and k: [B, Sk, H, D] a dropout keeps, int32 [B · H, 4 · ⌈Sk / 128⌉,
    64 · ⌈Sq / 64⌉]: the backward pass reads them by tiles, also of queries and keys that are not there."""
    return drawn_bits(q, k, probability, tile=(STEP, KEYS))


class _MaskedAttention(torch.autograd.Function):
    """The module's formulas, in operators of the joint graph; q, k and v are [B, S, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        row_tiles: Tensor,
        columns: Tensor,
        column_tiles: Tensor,
        probability: float,
        scale: float,
    ) -> Tensor:
        bits = bits_of_tiles(q, k, probability) if probability else None
        out, logsumexp = MASKED_ATTENTION_FORWARD(q, k, v, rows, row_tiles, bits, probability, scale)
        ctx.save_for_backward(q, k, v, out, logsumexp, columns, column_tiles, bits)
        ctx.constants = probability, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        made = MASKED_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, *ctx.constants)
        wanted = zip(made, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needed else None for gradient, needed in wanted), None, None, None, None, None, None


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    row_tiles: Tensor,
    columns: Tensor,
    column_tiles: Tensor,
    probability: float,
    scale: float,
) -> Tensor:
    """q: [B, H, Sq, D]; k and v: [B, G, Sk, D], H a multiple of G; of one dtype. Returns [B, H, Sq, D].

    rows and what follows: from ``te::mask_tiles``, with ``both`` where there will be a backward pass. probability: of
    dropping a weight, 0 for none; else G must be H. The result lies in memory as [B, Sq, H, D], for the output
    projection to read.
    """
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    return _MaskedAttention.apply(*operands, rows, row_tiles, columns, column_tiles, probability, scale).transpose(1, 2)


MASKED_ATTENTION = define_composite(
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor row_tiles, Tensor columns, "
    "Tensor column_tiles, float probability, float scale) -> Tensor",
    masked_attention,
)
