"""``te::quantize``: a matrix to FP8, in the layouts that its GEMMs read.

    q      = saturate(x · s) rounded to nearest even; NaN where x is not finite    [M, K]
    qt     = qᵀ, padded with zeros to a multiple of 16 columns  [K, ceil16(M)]
    amax   = max |x|, infinite if any element is not finite     []
    scale_inv = 1 / s                                           []

``s`` is ``scale`` when it is given and positive (delayed scaling). When it is absent (current scaling) or zero (a state
that has seen no data yet) the scale is taken from this call's own amax by the scale rule, so no step runs on a blind
scale. Hopper's FP8 GEMM reads both operands along the contraction, hence the transposed copy for dgrad and wgrad; its
rows are padded because wgrad contracts over M, which users choose freely, and zeros add nothing to a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.recipe import ScaleRule

ALIGNMENT = 16  # elements: what FP8 GEMMs want of every contraction length and leading dimension


def padded(length: int) -> int:
    """``length`` rounded up to the FP8 GEMM alignment; works on symbolic sizes."""
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def amax_reference(x: Tensor) -> Tensor:
    """max |x| as fp32 []; infinite if any element of ``x`` is NaN or infinite; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    largest = x.detach().abs().amax().float()
    return torch.where(torch.isfinite(largest), largest, torch.inf)


def effective_scale(scale: Tensor | None, amax: Tensor, rule: ScaleRule, dtype: torch.dtype) -> Tensor:
    """The scale in use, fp32 []: ``scale`` if given and positive, else the rule applied to this call's ``amax``."""
    measured = rule.scale(amax, torch.finfo(dtype).max)
    return measured if scale is None else torch.where(scale > 0, scale, measured)


def cast_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x · scale`` in fp32, saturated to ±max of ``dtype``, rounded to nearest even; NaN where x is NaN or infinite.

    An infinity that became a number would hide an overflow from whoever looks for it, a loss scaler above all.
    """
    largest = torch.finfo(dtype).max
    saturated = (x.float() * scale).clamp(-largest, largest)
    return torch.where(x.isinf(), torch.nan, saturated).to(dtype)


def transposed_reference(q: Tensor) -> Tensor:
    """``q`` [M, K] → qᵀ [K, ceil16(M)], the added columns zero."""
    rows = q.shape[0]
    qt = q.new_zeros((q.shape[1], padded(rows)))
    qt[:, :rows].copy_(q.t())
    return qt


@registry.register("quantize", registry.REFERENCE)
def quantize_reference(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rowwise: bool, columnwise: bool, rule: ScaleRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See the module. x: [M, K] bf16, fp16 or fp32, any strides; q and qt are contiguous.

    An output that was not asked for has shape [0].
    """
    amax = amax_reference(x)
    used = effective_scale(scale, amax, rule, dtype)
    q = cast_reference(x, used, dtype).contiguous()  # torch keeps the strides of x, which kernels and the fake do not
    qt = transposed_reference(q) if columnwise else q.new_empty(0)
    return (q if rowwise else q.new_empty(0)), qt, amax, used.reciprocal()


def _quantize(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    function = registry.function_of("quantize", implementation)
    return function(x, scale, dtype, rowwise, columnwise, ScaleRule.parse(rule))


def _quantize_fake(
    x: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    q = x.new_empty((rows, columns) if rowwise else (0,), dtype=dtype)
    qt = x.new_empty((columns, padded(rows)) if columnwise else (0,), dtype=dtype)
    scalar = x.new_empty((), dtype=torch.float32)
    return q, qt, scalar, torch.empty_like(scalar)


QUANTIZE = define(
    "quantize(Tensor x, Tensor? scale, ScalarType dtype, bool rowwise, bool columnwise, str rule, "
    'str implementation="reference") -> (Tensor q, Tensor qt, Tensor amax, Tensor scale_inv)',
    _quantize,
    _quantize_fake,
)
