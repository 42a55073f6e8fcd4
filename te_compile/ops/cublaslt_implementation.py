"""``te::gemm`` by the project's own cuBLASLt layer, where it is built: timed algorithms and cached plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.registry import Target


def _check(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import cublaslt

    cublaslt.check(target, arguments)


@registry.register("gemm", "cublaslt", priority=20, check=_check)
def gemm_cublaslt(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None = None,
) -> Tensor:
    """``te::gemm`` by kernels/cublaslt.py."""
    from te_compile.kernels import cublaslt

    if a.numel() == 0 or b.numel() == 0:  # an empty batch: no rows, or a sum over none
        return gemm_reference(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)
    return cublaslt.gemm(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)
