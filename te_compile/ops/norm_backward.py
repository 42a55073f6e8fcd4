"""``te::norm_backward``: all gradients of a norm, and the sum with the gradient of the residual stream, in one pass.

For y = norm(x) as ops/norm.py has it, with n = (x - mean) · rstd, or x · rstd, and g = dy · ∂y/∂n:

    dx = rstd · (g - mean(g) - n · mean(g · n)), rounded to x's dtype         mean(g) for LayerNorm only
    dx = dx + residual                                                        if there is one, rounded again
    dw = Σ dy · n                                                             n as the weight met it
    db = Σ dy

In plain ATen these are a reduction over rows and two over columns, each of which reads dy and x, and a pointwise part
that reads them once more. Opaque, a kernel reads dy, x and the residual's gradient once and writes dx once. Where no
kernel runs, passes/open_norms.py puts the plain operators back, and Inductor has what it would have had.

In a model with residual connections x is read by the norm and by a sum, so autograd adds two gradients of x.
passes/fuse_norm_backward.py makes that sum ``residual``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.norm import LAYER, RMS_OFFSET, as_the_weight_meets_it

Gradients = tuple[Tensor, Tensor, Tensor]


def _normal(x: Tensor, mean: Tensor, rstd: Tensor, kind: str) -> Tensor:
    return (x.float() - mean if kind == LAYER else x.float()) * rstd


def norm_input_gradient(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, kind: str) -> Tensor:
    """dx: [M, K] of x's dtype, from dy and x: [M, K] and the saved statistics: fp32 [M, 1]."""
    normal = _normal(x, mean, rstd, kind)
    g = dy.float()
    if weight is not None:
        g = g * (1.0 + weight.float() if kind == RMS_OFFSET else weight.float())
    g_without_scale = g - normal * (g * normal).mean(-1, keepdim=True)
    if kind == LAYER:
        g_without_scale = g_without_scale - g.mean(-1, keepdim=True)
    return (rstd * g_without_scale).to(x.dtype)


def norm_weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, kind: str, dtype: torch.dtype | None = None
) -> Tensor:
    """dw: [K] of ``dtype``, None for the weight's, summed in fp32; other arguments as in ``norm_input_gradient``."""
    normal = as_the_weight_meets_it(_normal(x, mean, rstd, kind), x, weight, kind)
    return (dy.float() * normal.float()).sum(0).to(dtype or weight.dtype)


@registry.register("norm_backward", registry.REFERENCE)
def norm_backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    kind: str,
    wants_dx: bool,
    wants_dw: bool,
    bias_dtype: torch.dtype | None,
    partial_sums: bool = False,
) -> Gradients:
    """See the module. dy: [M, K] of y's dtype or of one that is widened to it, x: [M, K], any strides; mean, rstd: as
    ``te::norm_forward`` returns them; residual: [M, K] of x's dtype, only where dx is wanted; bias_dtype: what db is
    wanted in, None if it is not.

    Returns dx: [M, K] contiguous, of x's dtype; dw: [K] of the weight's dtype; db: [K]. One that is not wanted has
    shape [0]. With ``partial_sums`` dw and db are fp32 [P, K], rows that have yet to be added up; here one row.
    """
    dx, dw, db = (x.new_empty(0) for _ in range(3))
    if wants_dx:
        dx = norm_input_gradient(dy, x, weight, mean, rstd, kind)
        dx = (dx if residual is None else dx + residual).contiguous()
    if wants_dw:
        assert weight is not None, "dw of a norm without a weight"
        dw = norm_weight_gradient(dy, x, weight, mean, rstd, kind, torch.float32 if partial_sums else None)
        dw = dw[None] if partial_sums else dw
    if bias_dtype is not None:
        total = dy.float().sum(0)
        db = total[None] if partial_sums else total.to(bias_dtype)
    return dx, dw, db


def _norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    kind: str,
    wants_dx: bool,
    wants_dw: bool,
    bias_dtype: torch.dtype | None,
    partial_sums: bool = False,
    implementation: str = registry.REFERENCE,
) -> Gradients:
    function = registry.function_of("norm_backward", implementation)
    return function(dy, x, weight, mean, rstd, residual, kind, wants_dx, wants_dw, bias_dtype, partial_sums)


def _norm_backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    kind: str,
    wants_dx: bool,
    wants_dw: bool,
    bias_dtype: torch.dtype | None,
    partial_sums: bool = False,
    implementation: str = registry.REFERENCE,
) -> Gradients:
    columns = x.shape[1]
    dx = x.new_empty(x.shape if wants_dx else (0,))
    wanted = [weight.dtype if wants_dw and weight is not None else None, bias_dtype]
    if partial_sums:
        sums = sum(dtype is not None for dtype in wanted)
        rows = 1 if implementation == registry.REFERENCE else _partial_rows(dy, x, residual, wants_dx, sums)
        dw, db = (x.new_empty((rows, columns) if dtype else (0,), dtype=torch.float32) for dtype in wanted)
    else:
        dw, db = (x.new_empty(columns if dtype else 0, dtype=dtype) for dtype in wanted)
    return dx, dw, db


def _partial_rows(dy: Tensor, x: Tensor, residual: Tensor | None, wants_dx: bool, sums: int) -> int:
    from te_compile.kernels.norm_backward import partial_rows  # imported late: Triton may not be there

    return partial_rows(dy, x, residual, wants_dx, sums)


NORM_BACKWARD = define(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? residual, str kind, "
    'bool wants_dx, bool wants_dw, ScalarType? bias_dtype, bool partial_sums=False, str implementation="reference") '
    "-> (Tensor dx, Tensor dw, Tensor db)",
    _norm_backward,
    _norm_backward_fake,
)
