"""``te::fused_quantize``: compute a matrix and quantize it, in one pass over what it is computed from.

    z = spec(inputs)                            [M, K], te_compile.ops.pointwise
    q, qt, amax, scale_inv = quantize(z)        te_compile.ops.quantize

z is never written in high precision unless the spec emits it because someone else reads it; column sums (bias
gradients) are taken on the way. The spec is text, so the operator is any producer: an activation, a gate, a dropout, a
residual sum or the backward of one of these.

Returns a flat list, because Inductor and the partitioner handle one level of nesting well:
[q, qt, amax, scale_inv, emitted …, sums …], where q, qt, amax and scale_inv mean what they mean in ``te::quantize``.
With ``partial_sums`` each sum is fp32 [⌈M / 64⌉, K], rows that have yet to be added up (te_compile.ops.partial_sums).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import calibration, registry
from te_compile.ops.library import define
from te_compile.ops.partial_sums import partial_rows
from te_compile.ops.pointwise import Spec, evaluate, extent
from te_compile.ops.quantize import padded, quantize_reference
from te_compile.ops.reach import check_reach, is_within_reach
from te_compile.ops.registry import Target, Unsupported
from te_compile.recipe import ScaleRule

FIRST_EMITTED = 4  # where the emitted values start in what the operator returns; the sums follow


@registry.register("fused_quantize", registry.REFERENCE)
def fused_quantize_reference(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    partial_sums: bool = False,
) -> list[Tensor]:
    """See the module. inputs: as ``spec`` declares them, any strides. What was not asked for has shape [0]."""
    z, emitted, sums = evaluate(spec, inputs, partial_sums)
    return [*quantize_reference(z, scale, dtype, rowwise, columnwise, rule), *emitted, *sums]


def check_triton(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, if no kernel can be generated for the spec in ``arguments``."""
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if target.capability is None or target.capability < (8, 9):
        raise Unsupported(f"FP8 conversion needs compute capability 8.9, this device has {target.capability}")
    # Imported late: a machine without Triton runs the reference and need not have it.
    try:
        from te_compile.kernels.pointwise_source import FORMS
    except ImportError as error:
        raise Unsupported(f"Triton is not installed ({error})") from None
    spec = Spec.parse(arguments["spec"])
    missing = {step.operation for step in spec.steps} - FORMS.keys()
    if missing:
        raise Unsupported(f"no Triton form of {', '.join(sorted(missing))}")
    check_reach(*extent(spec, arguments["inputs"]))


def has_no_kernel(spec: Spec, inputs: list[Tensor]) -> bool:
    """Are these of a size for which no tile can be launched? It may be known no earlier than now."""
    return any(tensor.numel() == 0 for tensor in inputs) or not is_within_reach(*extent(spec, inputs))


@registry.register("fused_quantize", "triton", priority=10, check=check_triton)
def fused_quantize_triton(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    partial_sums: bool = False,
) -> list[Tensor]:
    """A kernel generated from the spec."""
    from te_compile.kernels import pointwise

    given = (inputs, scale, spec, dtype, rowwise, columnwise, rule)
    if has_no_kernel(spec, inputs):
        return fused_quantize_reference(*given, partial_sums)
    return pointwise.fused_quantize(*given, calibration.must_measure(scale), partial_sums=partial_sums)


def _fused_quantize(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    partial_sums: bool = False,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    function = registry.function_of("fused_quantize", implementation)
    return function(inputs, scale, Spec.parse(spec), dtype, rowwise, columnwise, ScaleRule.parse(rule), partial_sums)


def _fused_quantize_fake(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: str,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: str,
    partial_sums: bool = False,
    implementation: str = registry.REFERENCE,
) -> list[Tensor]:
    parsed = Spec.parse(spec)
    rows, columns = extent(parsed, inputs)
    x = inputs[0]
    return [
        x.new_empty((rows, columns) if rowwise else (0,), dtype=dtype),
        x.new_empty((columns, padded(rows)) if columnwise else (0,), dtype=dtype),
        x.new_empty((), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32),
        *(x.new_empty((rows, columns), dtype=result.dtype) for result in parsed.emitted),
        *(
            x.new_empty((partial_rows(rows), columns), dtype=torch.float32)
            if partial_sums
            else x.new_empty((columns,), dtype=result.dtype)
            for result in parsed.sums
        ),
    ]


FUSED_QUANTIZE = define(
    "fused_quantize(Tensor[] inputs, Tensor? scale, str spec, ScalarType dtype, bool rowwise, bool columnwise, "
    'str rule, bool partial_sums=False, str implementation="reference") -> Tensor[]',
    _fused_quantize,
    _fused_quantize_fake,
)
