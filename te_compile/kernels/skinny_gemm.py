"""FP8 products of few rows by the C++ core, one or several that read the same rows: csrc/cuda/skinny_gemm.cu.

Such products take what reading their weights takes, and what starting and ending a launch takes beside that. Those of a
decoder layer, microseconds on an H200 by ``python -m benchmarks.skinny``, in 16 bits, by cuBLASLt, by this one by one,
and with those in one launch that read one input:

                             8 rows                        16 rows
    Llama-3-8B's shape       137, 81.2, 74.1, 63.8         140, 89.5, 81.3, 68.0
    Qwen3-32B's shape        275, 146, 142, 131            273, 150, 155, 142
    GPT-2 XL's shape         40.6, 35.7, 23.7, 19.2        41.3, 35.8, 26.0, 21.7

With 32 rows, whose reading takes longer than that of the weights, it was slower than cuBLASLt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.recording import STREAM
from te_compile.ops.gemms import AT_ONCE
from te_compile.ops.registry import Target, Unsupported

MOST_ROWS = 16  # TE_SKINNY_ROWS of csrc/include/te_compile.h
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes: where operands begin, and the length of their rows
_SMALLEST_CAPABILITY = (8, 9)


def check(target: Target, arguments: dict[str, Any]) -> None:
    """Raise Unsupported, with the reason, unless :func:`products` can make the product ``arguments`` (te::gemm's)."""
    _check_operands(target, arguments, [arguments["b"]], [arguments.get("bias")])


def check_several(target: Target, arguments: dict[str, Any]) -> None:
    """The same of several products (te::gemms')."""
    count = len(arguments["b"])
    if not 0 < count <= AT_ONCE:
        raise Unsupported(f"makes up to {AT_ONCE} products at once, not {count}")
    _check_operands(target, arguments, arguments["b"], arguments["bias"])


def _check_operands(
    target: Target, arguments: dict[str, Any], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> None:
    native.require(target)
    if target.capability is None or target.capability < _SMALLEST_CAPABILITY:
        raise Unsupported(f"FP8 tensor cores need compute capability 8.9, this device has {target.capability}")
    a, out_dtype, accumulation = (arguments[name] for name in ("a", "out_dtype", "accumulation"))
    rows, length = a.shape
    if not isinstance(rows, int) or not isinstance(length, int):
        raise Unsupported("how many rows there are is not known at compile time")
    if rows > MOST_ROWS:
        raise Unsupported(f"is for up to {MOST_ROWS} rows")
    if accumulation != "fast":
        raise Unsupported(f"accumulation is {accumulation!r}, not 'fast'")
    for operand in (a, *weights):
        if operand.dtype != torch.float8_e4m3fn:
            raise Unsupported(f"multiplies float8_e4m3fn, not {operand.dtype}")
        if not all(isinstance(size, int) for size in operand.shape):
            raise Unsupported("the size of a weight is not known at compile time")
    if length % ALIGNMENT:
        raise Unsupported(f"K={length} is not a multiple of {ALIGNMENT}")
    for dtype in (out_dtype, *(bias.dtype for bias in biases if bias is not None)):
        if dtype not in OUT_DTYPES:
            raise Unsupported(f"reads and writes bfloat16, float16 or float32, not {dtype}")


def products(
    a: Tensor,
    b: Sequence[Tensor],
    a_scale_inv: Tensor,
    b_scale_inv: Sequence[Tensor],
    bias: Sequence[Tensor | None],
    addend: Sequence[Tensor | None],
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """y_i = (a · b_iᵀ) · a_scale_inv · b_scale_inv_i + addend_i + bias_i, each [M, N_i] of ``out_dtype``, rounded once.

    a: [M, K], b_i: [N_i, K] E4M3, none empty; M up to 16, K a multiple of 16. Scales: [] fp32. bias_i: [N_i] of any of
    ``OUT_DTYPES``; addend_i: [M, N_i] of ``out_dtype``.
    """
    a, *weights = map(_well_laid, (a, *b))
    rows, length = a.shape
    columns = [weight.shape[0] for weight in weights]
    biases = [None if each is None else each.contiguous() for each in bias]
    addends = [None if each is None else each.contiguous() for each in addend]
    with on_device_of(a):
        made = [buffers.empty(a, (rows, each), out_dtype) for each in columns]
    codes = native.dtype_codes()
    native.call(
        native.module().cuda_skinny_gemm,
        a.device.index, a, a_scale_inv, rows, length, codes[out_dtype],
        columns, [codes[out_dtype if each is None else each.dtype] for each in biases],
        *(each for of in (weights, b_scale_inv, biases, addends, made) for each in _four(of)),
        STREAM,
    )  # fmt: skip
    return made


def _four(each: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [*each, *[None] * (AT_ONCE - len(each))]


def _well_laid(operand: Tensor) -> Tensor:
    """``operand``, or a copy of one whose rows do not lie one behind the other or begin where no vector does."""
    lies_well = operand.is_contiguous() and operand.data_ptr() % ALIGNMENT == 0
    return operand if lies_well else operand.clone(memory_format=torch.contiguous_format)
