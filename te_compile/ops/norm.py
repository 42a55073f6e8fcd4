"""``te::norm``: LayerNorm and the RMSNorms that models spell out, as one operator over the last dimension.

Statistics and arithmetic are fp32, per row of K values:

    layer        y = ((x - mean) · rstd · w + b)        mean = Σx / K,  rstd = 1 / sqrt(Σ(x - mean)² / K + eps)
    rms_float    y = x · rstd · w                       rstd = 1 / sqrt(Σx² / K + eps)     torch.nn.RMSNorm, OLMo 2
    rms_offset   y = x · rstd · (1 + w)                                                    Gemma
    rms          y = (x · rstd, rounded to x's dtype) · w                                  Llama
    rms_mixed    y = (x · rstd, rounded to w's dtype) · w                                  T5

The first three round once, to x's dtype. The last two multiply after rounding, in the promoted dtype. That is all in
which they differ, and it is enough to make outputs differ by a bit, so each keeps its own name here.

``te::norm`` is what graphs from Dynamo hold; tracing opens it into ``te::norm_forward``, which is opaque so that a pass
can merge it with the quantize that follows (LayerNorm would otherwise be a dozen pointwise nodes), and
``te::norm_backward`` (ops/norm_backward.py), opaque so that one kernel can compute all of it. What nothing merged and
no kernel runs is opened as well (passes/open_norms.py) and becomes Inductor's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define, define_composite

LAYER = "layer"
RMS = "rms"
RMS_OFFSET = "rms_offset"
RMS_FLOAT = "rms_float"
RMS_MIXED = "rms_mixed"
KINDS = (LAYER, RMS, RMS_OFFSET, RMS_FLOAT, RMS_MIXED)


def output_dtype(x: torch.dtype, weight: torch.dtype | None, kind: str) -> torch.dtype:
    """The dtype of y for these dtypes of x and of the weight, None if there is none."""
    if kind not in KINDS:
        raise ValueError(f"norm kind {kind!r}: unknown; choose one of {', '.join(KINDS)}")
    if weight is None or kind in (LAYER, RMS_FLOAT, RMS_OFFSET):
        return x
    return weight if kind == RMS_MIXED else torch.promote_types(x, weight)


def as_the_weight_meets_it(normal: Tensor, x: Tensor, weight: Tensor | None, kind: str) -> Tensor:
    """The fp32 normalised values, rounded in the kinds that multiply after rounding."""
    if weight is None or kind not in (RMS, RMS_MIXED):
        return normal
    return normal.to(x.dtype if kind == RMS else weight.dtype)


def norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See the module. x: [M, K] bf16, fp16 or fp32; weight, bias: [K] of any of these dtypes, a bias for "layer" only.

    Returns y: [M, K] contiguous, of ``output_dtype``; mean: fp32 [M, 1], for the rms kinds fp32 [0]; rstd: fp32 [M, 1].
    """
    dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, kind)
    wide = x.contiguous().float()
    if kind == LAYER:
        w, b = (None if parameter is None else parameter.float() for parameter in (weight, bias))
        y, mean, rstd = torch.native_layer_norm(wide, x.shape[-1:], w, b, eps)
        return y.to(dtype), mean, rstd
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = as_the_weight_meets_it(wide * rstd, x, weight, kind)
    if weight is not None:
        y = y * (1.0 + weight.float() if kind == RMS_OFFSET else weight)
    return y.to(dtype), wide.new_empty(0), rstd


registry.register("norm_forward", registry.REFERENCE)(norm_reference)


def _norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    return registry.function_of("norm_forward", implementation)(x, weight, bias, eps, kind)


def _norm_forward_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, _ = x.shape
    y = x.new_empty(x.shape, dtype=output_dtype(x.dtype, None if weight is None else weight.dtype, kind))
    mean = x.new_empty((rows, 1) if kind == LAYER else (0,), dtype=torch.float32)
    return y, mean, x.new_empty((rows, 1), dtype=torch.float32)


NORM_FORWARD = define(
    "norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind, "
    'str implementation="reference") -> (Tensor y, Tensor mean, Tensor rstd)',
    _norm_forward,
    _norm_forward_fake,
)


class _Norm(torch.autograd.Function):
    """x and y are matrices [M, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
        y, mean, rstd = NORM_FORWARD(x, weight, bias, eps, kind)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.kind = kind
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        bias_dtype = ctx.bias_dtype if wanted[2] else None
        # By name, for the file of the operator builds on this one.
        backward = torch.ops.te.norm_backward.default
        gradients = backward(dy, x, weight, mean, rstd, None, ctx.kind, wanted[0], wanted[1], bias_dtype)
        dx, dw, db = (each if is_wanted else None for each, is_wanted in zip(gradients, wanted, strict=True))
        return dx, dw, db, None, None


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    # Reshaped out here: what a custom function returns as a view may not be changed in place, and models do that.
    return _Norm.apply(x.reshape(-1, x.shape[-1]), weight, bias, eps, kind).view(x.shape)


# x: [..., K]; y has its shape.
NORM = define_composite("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind) -> Tensor", _norm)
