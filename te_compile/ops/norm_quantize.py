"""``te::norm_quantize``: a norm and the quantize of its result, in one pass over the data.

    y          = norm(x)                                  ops/norm.py
    q, qt, amax, scale_inv = quantize(y)                  ops/quantize.py

Apart they cost a write and a read of y, which in a pre-norm transformer nobody but the linears reads. ``y`` is returned
when ``emit`` asks for it: a residual or a linear in high precision may use the norm too. The values quantised are those
of y in its own dtype, so merging changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.norm import LAYER, norm_reference, output_dtype
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.recipe import ScaleRule

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@registry.register("norm_quantize", registry.REFERENCE)
def norm_quantize_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    emit: bool,
    rule: ScaleRule,
) -> Outputs:
    """See the module. x: [M, K]. A result that was not asked for has shape [0]."""
    y, mean, rstd = norm_reference(x, weight, bias, eps, kind)
    q, qt, amax, scale_inv = quantize_reference(y, scale, dtype, rowwise, columnwise, rule)
    return (y if emit else y.new_empty(0)), q, qt, amax, scale_inv, mean, rstd


def _norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    emit: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    function = registry.function_of("norm_quantize", implementation)
    return function(x, weight, bias, eps, kind, scale, dtype, rowwise, columnwise, emit, ScaleRule.parse(rule))


def _norm_quantize_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    scale: Tensor | None,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    emit: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> Outputs:
    rows, columns = x.shape
    y_dtype = output_dtype(x.dtype, None if weight is None else weight.dtype, kind)
    y = x.new_empty((rows, columns) if emit else (0,), dtype=y_dtype)
    q = x.new_empty((rows, columns) if rowwise else (0,), dtype=dtype)
    qt = x.new_empty((columns, padded(rows)) if columnwise else (0,), dtype=dtype)
    amax, scale_inv = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    mean = x.new_empty((rows, 1) if kind == LAYER else (0,), dtype=torch.float32)
    return y, q, qt, amax, scale_inv, mean, x.new_empty((rows, 1), dtype=torch.float32)


NORM_QUANTIZE = define(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind, Tensor? scale, ScalarType dtype, "
    'bool rowwise, bool columnwise, bool emit, str rule, str implementation="reference") '
    "-> (Tensor y, Tensor q, Tensor qt, Tensor amax, Tensor scale_inv, Tensor mean, Tensor rstd)",
    _norm_quantize,
    _norm_quantize_fake,
)
