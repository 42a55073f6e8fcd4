"""Which operators the C++ core's own CUDA kernels run (its cuBLASLt products are in cublaslt_implementation.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_compile.ops import calibration, registry
from te_compile.ops.biased_attention import biased_attention_backward_reference, biased_attention_reference
from te_compile.ops.dropout_attention import dropout_attention_backward_reference, dropout_attention_reference
from te_compile.ops.dropout_bits import growth_of
from te_compile.ops.gemm import gemm_reference
from te_compile.ops.gemms import gemms_reference
from te_compile.ops.masked_attention import masked_attention_backward_reference, masked_attention_reference
from te_compile.ops.norm_quantize import Norm, Outputs, Wanted, norm_quantize_reference
from te_compile.ops.registry import Target
from te_compile.ops.triton_implementations import (
    check_dropout,
    check_dropout_attention,
    check_grouped,
    check_grouped_gemm,
)
from te_compile.ops.window_attention import (
    EVERYTHING,
    check_flash,
    window_attention_backward_flash,
    window_attention_backward_reference,
    window_attention_reference,
)

CUDA = "cuda"
PRIORITY = 20  # before Triton's
_FOR_FEW_ROWS = 30  # before cuBLASLt's


def _check_norm_quantize(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_norm

    native_norm.check(target, arguments)


@registry.register("norm_quantize", CUDA, priority=PRIORITY, check=_check_norm_quantize)
def norm_quantize(x: Tensor, norm: Norm, wanted: Wanted) -> Outputs:
    """``te::norm_quantize`` by kernels/native_norm.py."""
    if x.numel() == 0:
        return norm_quantize_reference(x, norm, wanted)
    from te_compile.kernels.native_norm import norm_quantize as kernel

    return kernel(x, norm, wanted, calibration.must_measure(wanted.scale))


def _check_dropout_attention(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_attention

    check_dropout_attention(target, arguments)
    native_attention.check_dropout(target, arguments)


def _check_dropout_attention_backward(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_attention

    check_dropout_attention(target, arguments)
    native_attention.check_dropout_backward(target, arguments)


@registry.register("dropout_attention_forward", CUDA, priority=PRIORITY, check=_check_dropout_attention)
def dropout_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``te::dropout_attention_forward`` by kernels/native_dropout_attention.py."""
    operands = (q, k, v, bits, probability, causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        return dropout_attention_reference(*operands)
    from te_compile.kernels.native_dropout_attention import forward as kernel

    return kernel(*operands)


@registry.register("dropout_attention_backward", CUDA, priority=PRIORITY, check=_check_dropout_attention_backward)
def dropout_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    probability: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::dropout_attention_backward`` by kernels/native_dropout_attention.py."""
    operands = (grad, q, k, v, bits, out, logsumexp, probability, causal, scale)
    if q.numel() == 0 or k.numel() == 0:
        return dropout_attention_backward_reference(*operands)
    from te_compile.kernels.native_dropout_attention import backward as kernel

    return kernel(*operands)


def _check_window_attention(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_attention

    check_flash(target, arguments)
    native_attention.check(target, arguments)


@registry.register("window_attention_forward", CUDA, priority=PRIORITY, check=_check_window_attention)
def window_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``te::window_attention_forward`` by kernels/native_attention.py."""
    if q.numel() == 0:
        return window_attention_reference(q, k, v, left, right, scale)
    from te_compile.kernels.native_attention import forward as kernel

    return kernel(q, k, v, left, right, scale)


@registry.register("window_attention_backward", CUDA, priority=PRIORITY, check=_check_window_attention)
def window_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::window_attention_backward`` by kernels/native_attention.py, or by flash where runs must not differ."""
    operands = (grad, q, k, v, out, logsumexp, left, right, scale)
    if q.numel() == 0:
        return window_attention_backward_reference(*operands)
    if torch.are_deterministic_algorithms_enabled():
        return window_attention_backward_flash(*operands)
    from te_compile.kernels.native_attention import backward as kernel

    return kernel(*operands)


def _check_masked_attention(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_attention

    native_attention.check_masked(target, arguments)
    if arguments["probability"]:
        check_dropout(target, arguments)


@registry.register("masked_attention_forward", CUDA, priority=PRIORITY, check=_check_masked_attention)
def masked_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    row_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``te::masked_attention_forward`` by kernels/native_attention.py."""
    if q.numel() == 0 or k.numel() == 0:
        return masked_attention_reference(q, k, v, rows, row_tiles, bits, probability, scale)
    from te_compile.kernels.native_attention import forward as kernel

    constants = EVERYTHING, EVERYTHING, scale, bits, growth_of(probability)
    return kernel(q, k, v, *constants, mask=(rows, row_tiles))


@registry.register("masked_attention_backward", CUDA, priority=PRIORITY, check=_check_masked_attention)
def masked_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    columns: Tensor,
    column_tiles: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``te::masked_attention_backward`` by kernels/native_attention.py, whose last bits differ from run to run: where
    they must not, by the reference."""
    operands = grad, q, k, v, out, logsumexp
    if q.numel() == 0 or k.numel() == 0 or torch.are_deterministic_algorithms_enabled():
        given = (*operands, columns, column_tiles, bits, probability, scale)
        return masked_attention_backward_reference(*given)
    from te_compile.kernels.native_attention import backward as kernel

    constants = EVERYTHING, EVERYTHING, scale, bits, growth_of(probability)
    return kernel(*operands, *constants, mask=(columns, column_tiles))


def _check_biased_attention(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_attention

    native_attention.check_biased(target, arguments)
    if arguments["probability"]:
        check_dropout(target, arguments)


@registry.register("biased_attention_forward", CUDA, priority=PRIORITY, check=_check_biased_attention)
def biased_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bits: Tensor | None, probability: float, scale: float
) -> tuple[Tensor, Tensor]:
    """``te::biased_attention_forward`` by kernels/native_attention.py."""
    if q.numel() == 0 or k.numel() == 0:
        return biased_attention_reference(q, k, v, bias, bits, probability, scale)
    from te_compile.kernels.native_attention import forward as kernel

    return kernel(q, k, v, EVERYTHING, EVERYTHING, scale, bits, growth_of(probability), bias=bias)


@registry.register("biased_attention_backward", CUDA, priority=PRIORITY, check=_check_biased_attention)
def biased_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bits: Tensor | None,
    probability: float,
    scale: float,
    wants_ds: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``te::biased_attention_backward`` by kernels/native_attention.py, whose last bits differ from run to run: where
    they must not, by the reference."""
    if q.numel() == 0 or k.numel() == 0 or torch.are_deterministic_algorithms_enabled():
        given = (grad, q, k, v, bias, out, logsumexp, bits, probability, scale, wants_ds)
        return biased_attention_backward_reference(*given)
    from te_compile.kernels.native_attention import biased_backward as kernel

    return kernel(grad, q, k, v, bias, out, logsumexp, scale, bits, growth_of(probability), wants_ds)


def _check_grouped_gemm(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_grouped_gemm

    check_grouped_gemm(target, arguments)
    native_grouped_gemm.check(target, arguments)


def _check_grouped_wgrad(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import native_grouped_gemm

    check_grouped(target, arguments)
    native_grouped_gemm.check_wgrad(target, arguments)


@registry.register("grouped_gemm", CUDA, priority=PRIORITY, check=_check_grouped_gemm)
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """``te::grouped_gemm`` by kernels/native_grouped_gemm.py."""
    from te_compile.kernels.native_grouped_gemm import grouped_gemm as kernel

    return kernel(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


@registry.register("grouped_wgrad", CUDA, priority=PRIORITY, check=_check_grouped_wgrad)
def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
) -> Tensor:
    """``te::grouped_wgrad`` by kernels/native_grouped_gemm.py."""
    from te_compile.kernels.native_grouped_gemm import grouped_wgrad as kernel

    return kernel(a, b, a_scale_inv, b_scale_inv, ends, out_dtype, accumulation)


def _check_skinny_gemm(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import skinny_gemm

    skinny_gemm.check(target, arguments)


def _check_skinny_gemms(target: Target, arguments: dict[str, Any]) -> None:
    from te_compile.kernels import skinny_gemm

    skinny_gemm.check_several(target, arguments)


@registry.register("gemm", CUDA, priority=_FOR_FEW_ROWS, check=_check_skinny_gemm)
def gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    addend: Tensor | None = None,
) -> Tensor:
    """``te::gemm`` of few rows by kernels/skinny_gemm.py."""
    if a.numel() == 0 or b.numel() == 0:
        return gemm_reference(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation, addend)
    from te_compile.kernels import skinny_gemm

    return skinny_gemm.products(a, [b], a_scale_inv, [b_scale_inv], [bias], [addend], out_dtype)[0]


@registry.register("gemms", CUDA, priority=PRIORITY, check=_check_skinny_gemms)
def gemms(
    a: Tensor,
    b: Sequence[Tensor],
    a_scale_inv: Tensor,
    b_scale_inv: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    out_dtype: torch.dtype,
    accumulation: str,
) -> list[Tensor]:
    """``te::gemms`` by kernels/skinny_gemm.py."""
    if a.numel() == 0 or any(each.numel() == 0 for each in b):
        return gemms_reference(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulation)
    from te_compile.kernels import skinny_gemm

    return skinny_gemm.products(a, b, a_scale_inv, b_scale_inv, bias, [None] * len(b), out_dtype)
