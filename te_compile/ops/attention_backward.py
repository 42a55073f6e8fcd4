"""``te::attention_backward``: the gradients of attention from its result and the logarithm of its sums, unmasked.

    p  = exp(q · kᵀ · scale - logsumexp)            ds = p · (dout · vᵀ - Σ dout · out) · scale
    dv = pᵀ · dout                                  dq = ds · k              dk = dsᵀ · q

The backward of ``te::fp8_attention`` with q, k and v as its FP8 codes stand for them, so that p is what the forward
pass had before it rounded it: rounding counts as the identity. Products are in the dtype of q, k and v on a GPU and in
fp32 in the reference. Heads and ``causal`` are as there; a key head's gradient is the sum over the query heads it
serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_compile.ops import registry
from te_compile.ops.fp8_attention import per_query_head, visible
from te_compile.ops.library import define
from te_compile.ops.registry import Target, Unsupported


def _per_key_head(gradient: Tensor, like: Tensor) -> Tensor:
    """[B, H, Sk, D] summed over the query heads of each key head, in the shape and dtype of ``like`` [B, Sk, Hk, D]."""
    grouped = gradient.unflatten(1, (like.shape[2], -1)).sum(dim=2)
    return grouped.transpose(1, 2).to(like.dtype).contiguous()


@registry.register("attention_backward", registry.REFERENCE)
def attention_backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module. grad, q, out: [B, Sq, H, D]; k, v: [B, Sk, Hk, D], of any dtype; logsumexp: [B, H, Sq] fp32.

    Returns dq, dk and dv in the shapes and dtypes of q, k and v, contiguous.
    """
    heads = q.shape[2]
    wide = [per_query_head(x, heads) for x in (grad, q, k, v, out)]
    dout, query, key, value, result = wide
    scores = query @ key.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(~visible(scores.shape[2], scores.shape[3], q.device), -torch.inf)
    p = torch.exp(scores - logsumexp.unsqueeze(3))
    ds = p * (dout @ value.transpose(2, 3) - (dout * result).sum(dim=3, keepdim=True)) * scale
    dq, dk, dv = ds @ key, ds.transpose(2, 3) @ query, p.transpose(2, 3) @ dout
    return dq.transpose(1, 2).to(q.dtype).contiguous(), _per_key_head(dk, k), _per_key_head(dv, v)


def _check_flash(target: Target, arguments: dict[str, Any]) -> None:
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if arguments["causal"] and not statically_known_true(arguments["q"].shape[1] == arguments["k"].shape[1]):
        raise Unsupported("PyTorch's flash kernel counts causal positions from the end where queries and keys differ")


@registry.register("attention_backward", "flash", priority=10, check=_check_flash)
def attention_backward_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own flash kernel, which takes bf16 and fp16; fp32 goes through it as bf16."""
    if grad.numel() == 0 or k.numel() == 0:  # an empty batch
        return attention_backward_reference(grad, q, k, v, out, logsumexp, causal, scale)
    narrow = torch.bfloat16 if q.dtype == torch.float32 else q.dtype
    operands = [x.to(narrow).transpose(1, 2) for x in (grad, q, k, v, out)]
    # The state of the random numbers that a dropout would draw again; without one it is not read.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *operands, logsumexp, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, offset, scale=scale
    )
    dq, dk, dv = (
        x.transpose(1, 2).to(like.dtype).contiguous() for x, like in zip(gradients, (q, k, v), strict=True)
    )  # fmt: skip
    return dq, dk, dv


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
    label: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    function = registry.function_of("attention_backward", implementation)
    return function(grad, q, k, v, out, logsumexp, causal, scale)


def _attention_backward_fake(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
    label: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


ATTENTION_BACKWARD = define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, bool causal, "
    'float scale, str label, str implementation="reference") -> (Tensor dq, Tensor dk, Tensor dv)',
    _attention_backward,
    _attention_backward_fake,
)
