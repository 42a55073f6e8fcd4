"""Which operators the C++ core's own CUDA kernels run (its cuBLASLt products are in cublaslt_implementation.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import calibration, registry
from te_compile.ops.norm_quantize import norm_quantize_reference
from te_compile.ops.registry import Target
from te_compile.recipe import ScaleRule

CUDA = "cuda"
PRIORITY = 20  # before Triton's


def _check_norm_quantize(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_norm

    native_norm.check(target, arguments)


@registry.register("norm_quantize", CUDA, priority=PRIORITY, check=_check_norm_quantize)
def norm_quantize(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``te::norm_quantize`` by kernels/native_norm.py."""
    if x.numel() == 0:
        return norm_quantize_reference(x, weight, bias, eps, kind, scale, dtype, rowwise, columnwise, emit, rule)
    from te_compile.kernels.native_norm import norm_quantize as kernel

    measure = calibration.must_measure(scale)
    return kernel(x, weight, bias, eps, kind, scale, dtype, rowwise, columnwise, emit, rule, measure)
