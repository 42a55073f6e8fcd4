"""``te::fused_quantize_pair``: two matrices that are computed from the same tensors, quantised in one pass over those.

A gated MLP's backward has such a pair: the gradients of the gate and of what it gates both follow from the gradient of
their product and from the two themselves. By themselves they read five matrices, together three.

    z, w = spec(inputs)                              [M, K] each, te_compile.ops.pointwise
    [q, qt, amax, scale_inv] of z, and of w          te_compile.ops.quantize
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
from te_compile.recipe import ScaleRule

RESULTS_OF_ONE = 4
"""q, qt, amax and scale_inv of the first value come first, and then those of the second."""

Layouts = list[tuple[bool, bool]]


@registry.register("fused_quantize_pair", registry.REFERENCE)
def fused_quantize_pair_reference(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: Layouts,
    rule: ScaleRule,
) -> list[Tensor]:
    """See the module. inputs: as ``spec`` declares them, any strides. scales: [] fp32 of each value, None to take it
    from the amax. layouts: of each value, whether q and qt are wanted; what is not has shape [0]."""
    results: list[Tensor] = []
    for index, (scale, wanted) in enumerate(zip(scales, layouts, strict=True)):
        z, _, _ = evaluate(spec.alone(index), inputs)
        results += quantize_reference(z, scale, dtype, *wanted, rule)
    return results


@registry.register("fused_quantize_pair", "triton", priority=10, check=check_triton)
def fused_quantize_pair_triton(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: Layouts,
    rule: ScaleRule,
) -> list[Tensor]:
    """A kernel generated from the spec."""
    from te_compile.kernels import pointwise

    if has_no_kernel(spec, inputs):
        return fused_quantize_pair_reference(inputs, scales, spec, dtype, layouts, rule)
    measure = any(map(calibration.must_measure, scales))
    return pointwise.fused_quantize_pair(inputs, scales, spec, dtype, layouts, rule, measure)


def _parsed(spec: str) -> Spec:
    parsed = Spec.parse(spec)
    if not parsed.second or parsed.sums:
        raise SpecError(f"the spec {spec!r} is not that of two values of which codes alone are wanted")
    return parsed


def _fused_quantize_pair(
    inputs: list[Tensor],
    scale: Tensor | None,
    second_scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    second_rowwise: bool,
    second_columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    function = registry.function_of("fused_quantize_pair", implementation)
    layouts = [(rowwise, columnwise), (second_rowwise, second_columnwise)]
    return function(inputs, [scale, second_scale], _parsed(spec), dtype, layouts, ScaleRule.parse(rule))


def _fused_quantize_pair_fake(
    inputs: list[Tensor],
    scale: Tensor | None,
    second_scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    second_rowwise: bool,
    second_columnwise: bool,
    rule: str,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    rows, columns = extent(_parsed(spec), inputs)
    x, results = inputs[0], list[Any]()
    for in_rows, in_columns in ((rowwise, columnwise), (second_rowwise, second_columnwise)):
        results += (
            x.new_empty((rows, columns) if in_rows else (0,), dtype=dtype),
            x.new_empty((columns, padded(rows)) if in_columns else (0,), dtype=dtype),
            x.new_empty((), dtype=torch.float32),
            x.new_empty((), dtype=torch.float32),
        )
    return results


FUSED_QUANTIZE_PAIR = define(
    "fused_quantize_pair(Tensor[] inputs, Tensor? scale, Tensor? second_scale, str spec, ScalarType dtype, "
    "bool rowwise, bool columnwise, bool second_rowwise, bool second_columnwise, "
    'str rule, str implementation="reference") -> Tensor[]',
    _fused_quantize_pair,
    _fused_quantize_pair_fake,
)
