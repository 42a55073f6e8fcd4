"""``te::gemm``: the FP8 matrix product, operands read along the contraction.

    y[M, N] = (a[M, K] · b[N, K]ᵀ) · a_scale_inv · b_scale_inv + addend[M, N] + bias[N]

All three products of a linear are this one: forward reads x and w, dgrad dy and wᵀ, wgrad dyᵀ and xᵀ, each as the
FP8 copy whose rows run along its contraction (Hopper's FP8 tensor cores accept no other layout).

``accumulation`` is "fast" (the tensor core's own accumulator, about 14 bits on Hopper) or "split" (partial sums
promoted to fp32); Transformer Engine uses fast for forward and split for both gradients, and so do we. The reference
accumulates in fp32 for both. ``addend`` is a residual stream, or the gradient that another linear has for the same
input; a pass puts it here (passes/add_in_products.py). The reference rounds the sum once; an implementation may round
the product to 16 bits before it adds, as two operators would (cuBLASLt's for Hopper does). ``label`` names the linear
and the product, for people and reports; it changes no number. In compiled code the product alone is left of it
(passes/set_names_aside.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_compile.ops import registry
from te_compile.ops.library import define
from te_compile.ops.quantize import ALIGNMENT
from te_compile.ops.registry import Target, Unsupported

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_ALIGNMENT = 16  # bytes: cuBLASLt refuses a scale pointer that is less aligned, though it reads four


def aligned(scale: Tensor) -> Tensor:
    """``scale`` where cuBLASLt can read it: itself, or a copy if it is an unaligned element of a larger tensor."""
    return scale if scale.data_ptr() % SCALE_ALIGNMENT == 0 else scale.clone()


@registry.register("gemm", registry.REFERENCE)
def gemm_reference(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None = None,
) -> Tensor:
    """See the module. a: [M, K], b: [N, K] FP8; scales: [] fp32; addend and result: [M, N] of ``out_dtype``."""
    product = (a.float() @ b.float().t()) * (a_scale_inv * b_scale_inv)
    if addend is not None:
        product = product + addend.float()
    return (product if bias is None else product + bias.float()).to(out_dtype)


def _check_scaled_mm(target: Target, arguments: dict[str, Any]) -> None:
    if target.device != "cuda":
        raise Unsupported(f"needs a CUDA device, not {target.device}")
    if target.capability is None or target.capability < (8, 9):
        raise Unsupported(f"FP8 tensor cores need compute capability 8.9, this device has {target.capability}")
    if arguments.get("addend") is not None:
        raise Unsupported("aten._scaled_mm adds nothing to a product")
    a, b = arguments["a"], arguments["b"]
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise Unsupported("no FP8 library multiplies E5M2 by E5M2")
    for name, length in (("K", a.shape[1]), ("N", b.shape[0])):
        if isinstance(length, int) and length % ALIGNMENT:
            raise Unsupported(f"{name}={length} is not a multiple of {ALIGNMENT}")


@registry.register("gemm", "scaled_mm", priority=10, check=_check_scaled_mm)
def gemm_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None = None,
) -> Tensor:
    """``aten._scaled_mm``: cuBLASLt through PyTorch."""
    if a.numel() == 0 or b.numel() == 0:  # an empty batch: no rows, or a sum over none
        return gemm_reference(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)
    # The library adds a bias only of the result's own 16-bit dtype.
    fused = bias if bias is not None and bias.dtype == out_dtype and out_dtype != torch.float32 else None
    y = torch._scaled_mm(
        a,
        b.t(),
        scale_a=aligned(a_scale_inv),
        scale_b=aligned(b_scale_inv),
        bias=fused,
        out_dtype=out_dtype,
        use_fast_accum=accumulation == "fast",
    )
    return y if bias is None or fused is not None else (y.float() + bias.float()).to(out_dtype)


def _gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    addend: Tensor | None = None,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    function = registry.function_of("gemm", implementation)
    return function(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)


def _gemm_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    label: str,
    addend: Tensor | None = None,
    implementation: str = registry.REFERENCE,
) -> Tensor:
    torch._check(a.shape[1] == b.shape[1], lambda: f"te::gemm contracts {a.shape[1]} with {b.shape[1]} ({label})")
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


GEMM = define(
    "gemm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype, "
    'str accumulation, str label, Tensor? addend=None, str implementation="reference") -> Tensor',
    _gemm,
    _gemm_fake,
)
