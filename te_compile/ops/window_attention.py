"""``te::window_attention``: scaled dot-product attention in which a query sees the keys around its own place.

    s = q · kᵀ · scale  where  i - left ≤ j ≤ i + right,  else -∞      out = softmax(s) · v

    ds = p ∘ (dout · vᵀ - Σ dout ∘ out) · scale
    dv = pᵀ · dout            dq = ds · k            dk = dsᵀ · q

for query i and key j of sequences of one length. Sliding windows of decoders have right = 0, local attention of
encoders a right of its own; a left or right of -1 (``EVERYTHING``) ends nowhere. Keys and values may have fewer heads
than queries, of which each serves several in a row.

Sinks are one more score for each query, of which no value follows (GPT-OSS): softmax has e^sink more to divide by. That
is exact behind any kernel that returns the logarithm of its sum, and so are its gradients: p is e^(s - sum') then, all
that ``backward`` reads of it.

    sum' = log(e^logsumexp + e^sink)    out' = out · e^(logsumexp - sum')    dsink = -e^(sink - sum') · Σ dout ∘ out'

A composite, as ``te::linear`` is, and nothing about FP8. PyTorch's attention knows windows as masks alone: it reads a
number for each pair of query and key, computes all of them and keeps flash attention out. The flash kernels that
PyTorch brings take a window, and skip what is outside. So do the C++ core's (kernels/native_attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.attention_shapes import attended, gradients, side_by_side
from te_compile.ops.library import define, define_composite
from te_compile.ops.registry import Target, Unsupported

FLASH = "flash"
EVERYTHING = -1
"""A query sees all keys on that side."""
OLDEST = (8, 0)
"""The first compute capability that flash attention runs on."""
WIDEST, WIDTHS = 256, 8
"""The most features of a head that it takes, and what they are a multiple of."""

# --- reference --------------------------------------------------------------------------------------------------------


def visible_within(length: int, left: int, right: int, device: torch.device) -> Tensor:
    """bool [length, length]: which keys a query sees."""
    place = torch.arange(length, device=device)
    ahead = place[None, :] - place[:, None]
    before, behind = (length if side == EVERYTHING else side for side in (left, right))
    return (ahead >= -before) & (ahead <= behind)


def grouped_heads(x: Tensor, like: Tensor) -> Tensor:
    """[B, S, G, D] as fp32 [B, H, S, D], each head as often as queries have heads for it."""
    return x.transpose(1, 2).float().repeat_interleave(like.shape[2] // max(1, x.shape[2]), 1)


def _scores(q: Tensor, k: Tensor, left: int, right: int, scale: float) -> Tensor:
    """s: fp32 [B, H, S, S]."""
    scores = grouped_heads(q, q) @ grouped_heads(k, q).mT * scale
    return scores.masked_fill(~visible_within(q.shape[1], left, right, q.device), -torch.inf)


def in_rows(x: Tensor, like: Tensor) -> Tensor:
    """fp32 [B, H, S, D] as ``like`` [B, S, G, D] is, contiguous; heads that share one are added up."""
    batch, _, length, width = x.shape
    shared = (
        x.view(batch, like.shape[2], -1, length, width).sum(2) if x.numel() else x.new_zeros(like.transpose(1, 2).shape)
    )
    return shared.transpose(1, 2).to(like.dtype).contiguous()


@registry.register("window_attention_forward", registry.REFERENCE)
def window_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See the module. q: [B, S, H, D]; k, v: [B, S, G, D], H a multiple of G; of one dtype, any strides.

    Returns out: [B, S, H, D] contiguous, of that dtype; logsumexp: fp32 [B, H, S].
    """
    scores = _scores(q, k, left, right, scale)
    return in_rows(scores.softmax(3) @ grouped_heads(v, q), q), scores.logsumexp(3)


@registry.register("window_attention_backward", registry.REFERENCE)
def window_attention_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module. grad: [B, S, H, D]; out and logsumexp: as forward returned them.

    Returns dq, dk and dv in the shapes and dtype of q, k and v, contiguous.
    """
    p = torch.exp(_scores(q, k, left, right, scale) - logsumexp.unsqueeze(3))
    dout, result = grouped_heads(grad, grad), grouped_heads(out, out)
    shift = (dout * result).sum(dim=3, keepdim=True)
    ds = p * (dout @ grouped_heads(v, q).mT - shift) * scale
    return in_rows(ds @ grouped_heads(k, q), q), in_rows(ds.mT @ grouped_heads(q, q), k), in_rows(p.mT @ dout, v)


# --- PyTorch's flash kernels ------------------------------------------------------------------------------------------


def check_flash(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, for what PyTorch's flash kernels do not take."""
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if target.capability is None or target.capability < OLDEST:
        raise Unsupported(f"flash attention needs compute capability 8.0, this device has {target.capability}")
    if not torch.backends.cuda.is_flash_attention_available():
        raise Unsupported("this PyTorch was built without flash attention")
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"q is {q.dtype}, not of 16 bits")
    width = q.shape[3]
    if not isinstance(width, int) or width % WIDTHS or width > WIDEST:
        raise Unsupported(f"a head of {width} features is not a multiple of {WIDTHS} up to {WIDEST}")
    if {k.shape[3], v.shape[3]} != {width}:
        raise Unsupported("queries, keys and values have heads of several widths")


@registry.register("window_attention_forward", FLASH, priority=10, check=check_flash)
def window_attention_flash(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``te::window_attention_forward`` by ``aten::_flash_attention_forward``."""
    if q.numel() == 0:
        return window_attention_reference(q, k, v, left, right, scale)
    length = q.shape[1]
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *map(side_by_side, (q, k, v)), None, None, length, length, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.contiguous(), logsumexp


@registry.register("window_attention_backward", FLASH, priority=10, check=check_flash)
def window_attention_backward_flash(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::window_attention_backward`` by ``aten::_flash_attention_backward``."""
    if q.numel() == 0:
        return window_attention_backward_reference(grad, q, k, v, out, logsumexp, left, right, scale)
    length = q.shape[1]
    # No dropout: the kernel does not look at the generator's state, which it wants all the same.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    made = torch.ops.aten._flash_attention_backward(
        *map(side_by_side, (grad, q, k, v)), out, logsumexp, None, None, length, length, 0.0, False, state, state,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (gradient.contiguous() for gradient in made)
    return dq, dk, dv


# --- sinks ------------------------------------------------------------------------------------------------------------


def beside_sinks(logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of each weight once a sink takes its share, and the logarithm of the sum with it.

    logsumexp, sinks and both results: fp32, of one shape.
    """
    total = torch.logaddexp(logsumexp, sinks)
    return torch.exp(logsumexp - total), total


def gradient_of_sinks(products: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """dsink, of the shape of ``sinks``. products: Σ dout ∘ out' over features; total: sum'; all fp32, of one shape."""
    return -torch.exp(sinks - total) * products


# --- operators --------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor]:
    function = registry.function_of("window_attention_forward", implementation)
    return function(q, k, v, left, right, scale)


WINDOW_ATTENTION_FORWARD = define(
    "window_attention_forward(Tensor q, Tensor k, Tensor v, int left, int right, float scale, "
    'str implementation="reference") -> (Tensor out, Tensor logsumexp)',
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
    left: int,
    right: int,
    scale: float,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    function = registry.function_of("window_attention_backward", implementation)
    return function(grad, q, k, v, out, logsumexp, left, right, scale)


WINDOW_ATTENTION_BACKWARD = define(
    "window_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    'int left, int right, float scale, str implementation="reference") -> (Tensor dq, Tensor dk, Tensor dv)',
    _backward,
    gradients,
)


class _WindowAttention(torch.autograd.Function):
    """The module's formulas, in operators of the joint graph; sinks are fp32 [B, H, S], all else is [B, S, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, left: int, right: int, scale: float
    ) -> Tensor:
        out, logsumexp = WINDOW_ATTENTION_FORWARD(q, k, v, left, right, scale)
        if sinks is not None:
            kept, logsumexp = beside_sinks(logsumexp, sinks)
            out = (out * kept.transpose(1, 2).unsqueeze(3)).to(out.dtype)
        ctx.save_for_backward(q, k, v, out, logsumexp, *(() if sinks is None else (sinks,)))
        ctx.constants = left, right, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, *sinks = ctx.saved_tensors
        made = WINDOW_ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, *ctx.constants)
        wanted = zip(made, ctx.needs_input_grad[:3], strict=True)
        of_sinks = None
        if ctx.needs_input_grad[3]:
            of_sinks = gradient_of_sinks((grad.float() * out.float()).sum(3).transpose(1, 2), logsumexp, *sinks)
        return *(gradient if needed else None for gradient, needed in wanted), of_sinks, None, None, None


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """q: [B, H, S, D]; k and v: [B, G, S, D], H a multiple of G; of one dtype. Returns [B, H, S, D].

    Query i sees the keys from i - left to i + right. sinks: [B, H, S, 1] or what broadcasts to that, of any floating
    dtype. The result lies in memory as [B, S, H, D], for the output projection to read.
    """
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    each = None if sinks is None else sinks.float().expand(*q.shape[:3], 1).squeeze(3)
    return _WindowAttention.apply(*rows, each, left, right, scale).transpose(1, 2)


WINDOW_ATTENTION = define_composite(
    "window_attention(Tensor q, Tensor k, Tensor v, int left, int right, float scale, Tensor? sinks=None) -> Tensor",
    window_attention,
)
