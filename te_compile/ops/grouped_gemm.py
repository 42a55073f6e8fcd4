"""``te::grouped_gemm`` and ``te::grouped_wgrad``: FP8 products of a mixture's experts, each with rows of its own.

Tokens lie sorted by expert: those of expert e are the rows from ``ends[e - 1]`` (0 for the first) to ``ends[e]``. How
many each expert has is known to the device alone.

    te::grouped_gemm    y[m]  = a[m] · b[e]ᵀ · a_scale_inv · b_scale_inv              for the expert e of row m   [M, N]
    te::grouped_wgrad   dw[e] = Σ a[:, m] · b[:, m]ᵀ · a_scale_inv · b_scale_inv      over the rows m of e     [E, R, C]

The first has its groups along rows, forward and dgrad alike; in the second they lie along the contraction, which is
what wgrad needs. Operands are read along the contraction, as in ``te::gemm``, and ``accumulation`` and ``label`` mean
what they mean there.

An expert without rows adds nothing, and its part of a weight gradient is zero. Rows past the last end belong to nobody:
y is zero there. (``torch._grouped_mm`` leaves them unwritten, so a model cannot rely on anything else.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.library import define

PRODUCTS = ("gemm", "gemm_into_grad", "grouped_gemm", "grouped_wgrad")
"""Every FP8 product. All name their operands alike, and end in ``label`` and ``implementation``."""


def _groups(ends: Tensor, rows: int) -> list[tuple[int, int]]:
    """The first row and the end of each group, as numbers of the host."""
    stops = [min(end, rows) for end in ends.tolist()]
    return list(zip([0, *stops], stops, strict=False))


@registry.register("grouped_gemm", registry.REFERENCE)
def grouped_gemm_reference(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """See the module. a: [M, K], b: [E, N, K] FP8; scales: [] fp32; ends: [E] integers that never fall."""
    y = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    for expert, (start, end) in zip(b.unbind(0), _groups(ends, a.shape[0]), strict=True):
        y[start:end] = gemm_reference(a[start:end], expert, a_scale_inv, b_scale_inv, None, out_dtype, accumulation)
    return y


@registry.register("grouped_wgrad", registry.REFERENCE)
def grouped_wgrad_reference(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """See the module. a: [R, M], b: [C, M] FP8, M padded as ``te::quantize`` pads it; the rest as above."""
    return torch.stack(
        [
            gemm_reference(a[:, start:end], b[:, start:end], a_scale_inv, b_scale_inv, None, out_dtype, accumulation)
            for start, end in _groups(ends, a.shape[1])
        ]
    )


def _grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    function = registry.function_of("grouped_gemm", implementation)
    return function(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


def _grouped_gemm_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    torch._check(
        a.shape[1] == b.shape[2], lambda: f"te::grouped_gemm contracts {a.shape[1]} with {b.shape[2]} ({label})"
    )
    torch._check(ends.shape[0] == b.shape[0], lambda: f"{ends.shape[0]} groups of rows, {b.shape[0]} experts ({label})")
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _grouped_wgrad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    function = registry.function_of("grouped_wgrad", implementation)
    return function(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


def _grouped_wgrad_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    torch._check(
        a.shape[1] == b.shape[1], lambda: f"te::grouped_wgrad contracts {a.shape[1]} with {b.shape[1]} ({label})"
    )
    return a.new_empty((ends.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


_SIGNATURE = (
    "(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor ends, ScalarType out_dtype, "
    'str accumulation, str label, str implementation="reference") -> Tensor'
)
GROUPED_GEMM = define(f"grouped_gemm{_SIGNATURE}", _grouped_gemm, _grouped_gemm_fake)
GROUPED_WGRAD = define(f"grouped_wgrad{_SIGNATURE}", _grouped_wgrad, _grouped_wgrad_fake)
