"""``te::sink_attention``: scaled dot-product attention in which each query has one more score, which no value follows.

    p = softmax([q · kᵀ · scale + mask, sink])      out = p without its last column · v

GPT-OSS and others let a head attend to nothing that way. The arguments are those of ``F.scaled_dot_product_attention``
and lie where that has them, so that the same passes read them; ``sinks`` is one more.

A composite. Where nothing is masked but what a window says, ``te::window_attention`` takes its place
(passes/window_attentions.py). What keeps a mask runs on PyTorch's memory-efficient kernel, which returns the logarithm
of its sum: the formulas of window_attention.py make that exact. For the rest it is spelled out as models do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from te_compile.ops.attention_shapes import side_by_side
from te_compile.ops.library import define_composite
from te_compile.ops.registry import Target
from te_compile.ops.window_attention import beside_sinks, gradient_of_sinks
from te_compile.ops.without_autocast import without_autocast

_HALVES = (torch.bfloat16, torch.float16)
_OLDEST = (8, 0)  # the first compute capability on which it takes both of these
_ALIGNMENT = 8  # elements of 16 bits that the kernel reads at once


def runs_on_the_efficient_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Does the memory-efficient kernel take such operands, [B, H, …, …] with as many heads each?"""
    capability = Target.of(query.device).capability
    if capability is None or capability < _OLDEST or query.dtype not in _HALVES:
        return False
    widths = (query.shape[3], value.shape[3], *(() if mask is None else (key.shape[2],)))
    # Inductor knows no layout for other numbers of keys that the backward pass reads.
    fits = all(isinstance(width, int) and width and width % _ALIGNMENT == 0 for width in widths)
    return fits and not torch.are_deterministic_algorithms_enabled()


class _OnTheEfficientKernel(torch.autograd.Function):
    """Operands [B, H, S, D], the mask [B, H, S, keys] with its keys side by side, sinks fp32 [B, H, S]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor,
        causal: bool,
        scale: float,
    ) -> Tensor:
        operands = [side_by_side(x) for x in (query, key, value)]
        out, padded, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            *operands, mask, True, 0.0, causal, scale=scale
        )
        queries = query.shape[2]
        kept, total = beside_sinks(padded[:, :, :queries], sinks)
        share, rows = kept.transpose(1, 2).unsqueeze(3), out.transpose(1, 2)
        rows = torch.where(share == 0, 0.0, rows * share).to(out.dtype)  # a row without keys holds anything
        out = rows.contiguous().transpose(1, 2)  # the backward kernel takes no other strides, and does not look
        ctx.save_for_backward(*operands, mask, sinks, out, total, seed, offset)
        ctx.constants = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, total, seed, offset = ctx.saved_tensors
        causal, scale = ctx.constants
        learns = mask is not None and ctx.needs_input_grad[3]
        wanted = [*ctx.needs_input_grad[:3], learns]
        made = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            side_by_side(grad), query, key, value, mask, out, _in_blocks(total), seed, offset, 0.0, wanted, causal,
            scale=scale,
        )  # fmt: skip
        of_sinks = None
        if ctx.needs_input_grad[4]:
            of_sinks = gradient_of_sinks((grad.float() * out.float()).sum(3), total, sinks)
        gradients = (gradient if needed else None for gradient, needed in zip(made, wanted, strict=True))
        return *gradients, of_sinks, None, None


_BLOCK = 32


def _in_blocks(total: Tensor) -> Tensor:
    """``total`` [B, H, S] with as many rows as the kernel reads; those it has no query for are hidden by the kernel."""
    return torch.nn.functional.pad(total, (0, -total.shape[2] % _BLOCK), value=math.inf).contiguous()


def _product(query: Tensor, key: Tensor, wide: bool) -> Tensor:
    if not wide:
        return query @ key.mT
    with without_autocast(query.device.type):
        return query.float() @ key.float().mT


def _spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor,
    causal: bool,
    scale: float,
    wide: bool,
) -> Tensor:
    scores = _product(query, key, wide) * scale
    if causal:
        places = (torch.arange(length, device=query.device) for length in (query.shape[2], key.shape[2]))
        queries, keys = places
        scores = scores.masked_fill(keys[None, :] > queries[:, None], -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.cat([scores.float(), sinks.unsqueeze(3)], dim=3).softmax(3)[..., :-1]
    return weights.to(value.dtype) @ value


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """[B, G, S, D] as [B, H, S, D], each head as often as queries have heads for it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def sink_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor,
    wide: bool = False,
) -> Tensor:
    """See the module; all but ``sinks`` as in ``F.scaled_dot_product_attention``, in 4 dimensions and without dropout.

    query: [B, H, Q, D]; key: [B, H, K, D]; value: [B, H, K, V], or with enable_gqa fewer heads of these; of one dtype.
    sinks: what broadcasts to [B, H, Q, 1], of any floating dtype. wide: where no fused kernel runs, scores are
    multiplied in fp32, else in the dtype of the operands. Returns [B, H, Q, V].

    Raises ValueError if dropout_p is not 0.
    """
    if dropout_p != 0:
        raise ValueError(f"dropout_p={dropout_p}: attention with sinks has no dropout")
    given = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    key, value = (_for_each_head(x, query.shape[1]) if enable_gqa else x for x in (key, value))
    each = sinks.float().expand(*query.shape[:3], 1).squeeze(3)
    if not runs_on_the_efficient_kernel(query, key, value, attn_mask):
        return _spelled_out(query, key, value, attn_mask, each, is_causal, given, wide)
    mask = None if attn_mask is None else _bias(attn_mask, query, key)
    return _OnTheEfficientKernel.apply(query, key, value, mask, each, is_causal, given)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``mask`` as numbers to add, [B, H, Q, K] with its keys side by side."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    if mask.shape[-1] != key.shape[2] or mask.stride(-1) != 1:
        mask = mask.expand(*mask.shape[:-1], key.shape[2]).contiguous()
    return mask.expand(*query.shape[:3], key.shape[2])


SINK_ATTENTION = define_composite(
    "sink_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, Tensor sinks, bool wide=False) -> Tensor",
    sink_attention,
)
