"""The ``te::`` operators. Importing this package defines them all and offers every implementation of them."""

from te_compile.ops import (
    cublaslt_implementation,
    fused_quantize,
    gemm,
    gradient_slots,
    grouped_gemm,
    grouped_linear,
    linear,
    native_implementations,
    norm,
    norm_backward,
    norm_quantize,
    quantize,
    scaling,
    triton_implementations,
    weights,
)

__all__ = [
    "cublaslt_implementation",
    "fused_quantize",
    "gemm",
    "gradient_slots",
    "grouped_gemm",
    "grouped_linear",
    "linear",
    "native_implementations",
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize",
    "scaling",
    "triton_implementations",
    "weights",
]
