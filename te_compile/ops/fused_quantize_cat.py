"""``te::fused_quantize_cat``: two matrices computed from the same tensors and quantised side by side, as the one matrix
that they are halves of.

One linear may compute both gate and up of a gated MLP; then the gradient that its backward quantises has those of the
two side by side. Each of them follows from the gradient of their product and from both. Computed where they are
quantised, in one pass over those three, neither is ever written in high precision.

    z, w = spec(inputs)                                  [M, K] each, te_compile.ops.pointwise
    q, qt, amax, scale_inv = quantize(cat([z, w], 1))    te_compile.ops.quantize, of [M, 2 K]

Returns a flat list, [q, qt, amax, scale_inv, sums …]; of each sum in the spec [K].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import calibration, registry
from te_compile.ops.fused_quantize import check_triton, has_no_kernel
from te_compile.ops.library import define
from te_compile.ops.pointwise import Spec, SpecError, evaluate, extent
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.ops.reach import is_within_reach
from te_compile.recipe import ScaleRule

FIRST_SUM = 4
"""Where the sums begin in what the operator returns."""


@registry.register("fused_quantize_cat", registry.REFERENCE)
def fused_quantize_cat_reference(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
) -> list[Tensor]:
    """See the module. inputs: as ``spec`` declares them, any strides. scale: [] fp32 of both, None to take it from the
    amax of both. What was not asked for has shape [0]."""
    halves = [evaluate(spec.alone(index), inputs)[0] for index in range(2)]
    _, _, sums = evaluate(spec, inputs)
    return [*quantize_reference(torch.cat(halves, 1), scale, dtype, rowwise, columnwise, rule), *sums]


@registry.register("fused_quantize_cat", "triton", priority=10, check=check_triton)
def fused_quantize_cat_triton(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
) -> list[Tensor]:
    """A kernel generated from the spec."""
    from te_compile.kernels import pointwise

    given = (inputs, scale, spec, dtype, rowwise, columnwise, rule)
    rows, columns = extent(spec, inputs)
    if has_no_kernel(spec, inputs) or not is_within_reach(rows, 2 * columns):
        return fused_quantize_cat_reference(*given)
    return pointwise.fused_quantize_cat(*given, calibration.must_measure(scale))


def _parsed(spec: str) -> Spec:
    parsed = Spec.parse(spec)
    if not parsed.second:
        raise SpecError(f"the spec {spec!r} has no second half to quantise")
    return parsed


def _fused_quantize_cat(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    function = registry.function_of("fused_quantize_cat", implementation)
    return function(inputs, scale, _parsed(spec), dtype, rowwise, columnwise, ScaleRule.parse(rule))


def _fused_quantize_cat_fake(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> list[Any]:
    parsed, x = _parsed(spec), inputs[0]
    rows, columns = extent(parsed, inputs)
    return [
        x.new_empty((rows, 2 * columns) if rowwise else (0,), dtype=dtype),
        x.new_empty((2 * columns, padded(rows)) if columnwise else (0,), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
        *(x.new_empty((columns,), dtype=result.dtype) for result in parsed.sums),
    ]


FUSED_QUANTIZE_CAT = define(
    "fused_quantize_cat(Tensor[] inputs, Tensor? scale, str spec, ScalarType dtype, bool rowwise, bool columnwise, "
    'str rule, str implementation="reference") -> Tensor[]',
    _fused_quantize_cat,
    _fused_quantize_cat_fake,
)
