"""``te::biased_attention``: scaled dot-product attention with a bias that is added to its scores, and may learn.

    s = q · kᵀ · scale + bias      p = softmax(s)      z = keep ? 1 / (1 - probability) : 0      out = (p ∘ z) · v

    dbias = p ∘ (z ∘ (dout · vᵀ) - Σ dout ∘ out)
    dv = (p ∘ z)ᵀ · dout           dq = dbias · k · scale           dk = dbiasᵀ · q · scale

z is 1 without a dropout; with one its bits are those of ``te::dropout_attention``. The bias has a matrix for each row
of a batch and each head, or one for all of either, whose gradient is the sum over those that share it. Where only a
part of it learns, which more of them share, that part is given by itself. Keys and values may have fewer heads than
queries, of which each serves several in a row.

What hides keys is a part of the bias, minus infinity or the lowest number of a dtype. A query that sees nothing, all of
whose scores are below -10³⁰, has no gradients, and a result of 0 where its scores are minus infinity, as in PyTorch's
attention.

A composite, as ``te::linear`` is, and nothing about FP8. Of PyTorch's fused kernels the memory-efficient one alone has
a gradient for a bias, and it makes its products as Ampere does. The backward operator returns dbias as the C++ core's
kernels (kernels/native_attention.py) have it at hand: keys first, of each row of a batch and each head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.attention_shapes import attended, gradients
from te_compile.ops.library import define, define_composite
from te_compile.ops.masked_attention import bits_of_tiles, factors_of
from te_compile.ops.window_attention import grouped_heads, in_rows

ALIGNED = 8
"""Rows of a bias, and of its gradient, are a multiple of so many elements."""
LOWEST = -1e30
"""A score below this says that the key is not seen."""


def aligned(length: Any) -> Any:
    """The next multiple of ``ALIGNED``; of a symbolic length, too."""
    return (length + (ALIGNED - 1)) // ALIGNED * ALIGNED


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    """s: fp32 [B, H, Sq, Sk]."""
    return grouped_heads(q, q) @ grouped_heads(k, q).mT * scale + bias[..., : k.shape[1]].float()


@registry.register("biased_attention_forward", registry.REFERENCE)
def biased_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bits: Tensor | None, probability: float, scale: float
) -> tuple[Tensor, Tensor]:
    """See the module. q: [B, Sq, H, D]; k, v: [B, Sk, G, D], H a multiple of G; of one dtype, any strides; bias:
    [B or 1, H or 1, Sq, R] of that dtype, contiguous, R a multiple of 8 of which the first Sk are read; bits: int32, of
    a dropout of that probability, as ``bits_of_tiles`` draws them, None for none.

    Returns out: [B, Sq, H, D] contiguous, of that dtype; logsumexp: fp32 [B, H, Sq], -∞ for queries that see nothing.
    """
    scores = _scores(q, k, bias, scale)
    top = scores.amax(3, keepdim=True)
    weights = torch.exp(scores - top.where(top > -torch.inf, 0))
    total = weights.sum(3, keepdim=True)
    p = weights / total.where(total > 0, 1)
    logsumexp = (top + total.log()).where(top >= LOWEST, -torch.inf).squeeze(3)
    return in_rows(p * factors_of(bits, p, probability) @ grouped_heads(v, q), q), logsumexp


@registry.register("biased_attention_backward", registry.REFERENCE)
def biased_attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    wants_ds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the module. grad: [B, Sq, H, D]; out and logsumexp: as forward returned them.

    Returns dq, dk and dv in the shapes and dtype of q, k and v, contiguous, and, if that is wanted, the gradient of
    what is added to scores, [B, H, Sk, R] of their dtype, R the next multiple of 8 of Sq, undefined behind Sq; else
    nothing, [0].
    """
    scores, sees = _scores(q, k, bias, scale), logsumexp.unsqueeze(3) > -torch.inf
    p = torch.exp(scores - logsumexp.unsqueeze(3).where(sees, torch.inf))
    z = factors_of(bits, p, probability)
    dout, result = grouped_heads(grad, grad), grouped_heads(out, out)
    shift = (dout * result).sum(dim=3, keepdim=True)
    ds = p * (dout @ grouped_heads(v, q).mT * z - shift)
    dq, dk, dv = ds @ grouped_heads(k, q) * scale, ds.mT @ grouped_heads(q, q) * scale, (p * z).mT @ dout
    queries = q.shape[1]
    rows = F.pad(ds.mT, (0, aligned(queries) - queries)).to(q.dtype) if wants_ds else ds.new_empty(0, dtype=q.dtype)
    return in_rows(dq, q), in_rows(dk, k), in_rows(dv, v), rows.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("biased_attention_forward", implementation)
    return function(q, k, v, bias, bits, probability, scale)


BIASED_ATTENTION_FORWARD = define(
    "biased_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? bits, float probability, "
    'float scale, str implementation="reference") -> (Tensor out, Tensor logsumexp)',
    _forward,
    attended,
)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    wants_ds: bool,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    function = registry.function_of("biased_attention_backward", implementation)
    return function(grad, q, k, v, bias, out, logsumexp, bits, probability, scale, wants_ds)


def _backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    wants_ds: bool,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (q.shape[0], q.shape[2], k.shape[1], aligned(q.shape[1])) if wants_ds else (0,)
    return *gradients(grad, q, k, v), q.new_empty(shape)


BIASED_ATTENTION_BACKWARD = define(
    "biased_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor out, Tensor logsumexp, "
    'Tensor? bits, float probability, float scale, bool wants_ds, str implementation="reference") -> '
    "(Tensor dq, Tensor dk, Tensor dv, Tensor ds)",
    _backward,
    _backward_fake,
)


def _in_aligned_rows(bias: Tensor) -> Tensor:
    """``bias`` with its keys side by side, in rows of a multiple of eight."""
    missing = aligned(bias.shape[3]) - bias.shape[3]
    return (bias if isinstance(missing, int) and missing == 0 else F.pad(bias, (0, missing))).contiguous()


def _sum_of_shared(ds: Tensor, dims: list[int]) -> Tensor:
    return ds.sum(dims, keepdim=True)


def _sum_of_shared_fake(ds: Tensor, dims: list[int]) -> Tensor:
    return ds.new_empty([1 if place in dims else size for place, size in enumerate(ds.shape)])


SUM_OF_SHARED = define("sum_of_shared(Tensor ds, int[] dims) -> Tensor", _sum_of_shared, _sum_of_shared_fake)
"""The sum over the first dimensions, which stay. An operator of its own: Inductor fuses sums with what reads them, here
keys last, and would read ``ds`` across its rows for that."""


def gradient_of_bias(bias_shape: Any, ds: Tensor) -> Tensor:
    """The gradient of a bias of this shape, [B or 1, H or 1, Sq, R], of ds: [B, H, Sk, …], as the backward operator
    returns it. Those that share a matrix are added up as they lie."""
    shared = [place for place in (0, 1) if isinstance(bias_shape[place], int) and bias_shape[place] == 1]
    total = SUM_OF_SHARED(ds, shared) if shared else ds
    gradient = total[..., : bias_shape[2]].mT
    missing = bias_shape[3] - ds.shape[2]
    return gradient if isinstance(missing, int) and missing == 0 else F.pad(gradient, (0, missing))


class _BiasedAttention(torch.autograd.Function):
    """The module's formulas, in operators of the joint graph; q, k and v are [B, S, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        probability: float,
        scale: float,
        learned: Tensor | None,
    ) -> Tensor:
        bits = bits_of_tiles(q, k, probability) if probability else None
        rows = _in_aligned_rows(bias)
        out, logsumexp = BIASED_ATTENTION_FORWARD(q, k, v, rows, bits, probability, scale)
        ctx.save_for_backward(q, k, v, rows, out, logsumexp, bits)
        ctx.constants = probability, scale
        learner = bias if learned is None else learned
        ctx.learner = learner.shape, learner.dtype
        ctx.learns = ctx.needs_input_grad[3 if learned is None else 6]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *made, ds = BIASED_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, *ctx.constants, ctx.learns)
        wanted = [gradient if needed else None for gradient, needed in zip(made, ctx.needs_input_grad[:3], strict=True)]
        shape, dtype = ctx.learner
        learned = gradient_of_bias(shape, ds).to(dtype) if ctx.learns else None
        whole, part = (None, learned) if ctx.needs_input_grad[6] else (learned, None)
        return *wanted, whole, None, None, part


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    probability: float,
    scale: float,
    learned: Tensor | None = None,
) -> Tensor:
    """q: [B, H, Sq, D]; k and v: [B, G, Sk, D], H a multiple of G; bias: [B or 1, H or 1, Sq, R], of whose R numbers
    the first Sk are added; of one dtype.

    probability: of dropping a weight, 0 for none; else G must be H. learned: [B or 1, H or 1, Sq, Sk], of any dtype,
    what of the bias learns, given one that itself learns nothing. Its numbers are not read; its gradient is that of the
    whole, so what else the bias is made of must be added to it, or hide by less than -10³⁰. Returns [B, H, Sq, D],
    which lies in memory as [B, Sq, H, D], for the output projection to read.
    """
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    return _BiasedAttention.apply(*operands, bias, probability, scale, learned).transpose(1, 2)


BIASED_ATTENTION = define_composite(
    "biased_attention(Tensor q, Tensor k, Tensor v, Tensor bias, float probability, float scale, "
    "Tensor? learned=None) -> Tensor",
    biased_attention,
)
