"""A row norm and the quantize of its result where no transposed copy is wanted: inference, in one pass over x.

Without qᵀ, which wants runs of many rows, a program can hold its rows whole: it reads them once, finds mean and
variance of what it holds, and writes y and q. Bytes: 2·M·K read, M·K written; 101 MB and 24 µs for 8192 × 4096 at the
4.27 TB/s of an H200. The variance is that of differences from the mean, in two steps, for the row is there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.kernels.quantize import TRITON_DTYPES, fp8_codes, largest_of, magnitude, record_amax, rounded, scaled

LONGEST_ROW = 16384
_ELEMENTS = 8192  # of a program, if a row is no longer
_PER_THREAD = 32


@triton.jit
def normalised(
    value, mean, rstd, w, b,
    Y: tl.constexpr, ROUND: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A tile of y, in fp32 but rounded to ``Y``, from a tile of x in fp32; w, b: fp32 rows."""
    if CENTRE:
        value = value - mean[:, None]
    value = value * rstd[:, None]
    if WEIGHT:
        if ROUND is not None:
            value = rounded(value, ROUND)
        value = value * w[None, :]
    if BIAS:
        value = value + b[None, :]
    return rounded(value, Y)


@triton.jit(do_not_specialize_on_alignment=["scale", "amax"])
def _rows_kernel(
    x, weight, bias, scale, y, q, amax, scale_inv, means, rstds, rows, columns, stride_m, eps,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    E5M2: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    used = tl.load(scale)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), used))
    row, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    valid, in_columns = row < rows, k < columns
    inside = valid[:, None] & in_columns[None, :]
    value = tl.load(x + row[:, None] * stride_m + k[None, :], mask=inside, other=0.0).to(tl.float32)
    length = columns * 1.0
    mean = tl.zeros((ROWS,), tl.float32)
    apart = value
    if CENTRE:
        mean = tl.sum(value, axis=1) / length
        apart = tl.where(inside, value - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=valid)
    variance = tl.sum(apart * apart, axis=1) / length
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstds + row, rstd, mask=valid)
    w = tl.zeros((COLUMNS,), tl.float32)
    b = w
    if weight is not None:
        w = tl.load(weight + k, mask=in_columns, other=0.0).to(tl.float32) + OFFSET
    if bias is not None:
        b = tl.load(bias + k, mask=in_columns, other=0.0).to(tl.float32)
    z = normalised(value, mean, rstd, w, b, Y, ROUND, CENTRE, weight is not None, bias is not None)
    z = tl.where(inside, z, 0.0)
    at = row[:, None] * columns + k[None, :]
    if EMIT:
        tl.store(y + at, z.to(Y), mask=inside)
    if ROWWISE:
        tl.store(q + at, fp8_codes(scaled(z, used), E5M2), mask=inside)
    record_amax(amax, largest_of(magnitude(z)))


def norm_quantize_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    emit: bool,
    y_dtype: torch.dtype,
    rounding: torch.dtype | None,
    offset: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, q, amax, 1 / scale, mean and rstd of x: [M, K ≤ LONGEST_ROW], rows contiguous, M > 0, on the current device.

    scale: known, not 0. rounding: what x · rstd is rounded to before the weight meets it; offset: what is added to the
    weight; centred: does the mean go? mean and rstd are fp32 [M, 1]; what was not asked for has shape [0].
    """
    rows, columns = x.shape
    width = max(64, triton.next_power_of_2(columns))
    height = max(1, _ELEMENTS // width)
    with on_device_of(x):
        q = buffers.empty(x, (rows, columns) if rowwise else (0,), dtype)
        amax, scale_inv = buffers.amax(x), buffers.empty(x, (), torch.float32)
        y = buffers.empty(x, (rows, columns) if emit else (0,), y_dtype)
        mean = buffers.empty(x, (rows, 1) if centred else (0,), torch.float32)
        rstd = buffers.empty(x, (rows, 1), torch.float32)
        launch(
            _rows_kernel, triton.cdiv(rows, height),
            x, weight, bias, scale, y, q.view(torch.uint8), amax, scale_inv, mean, rstd,
            rows, columns, x.stride(0), eps,
            Y=TRITON_DTYPES[y_dtype], ROUND=None if rounding is None else TRITON_DTYPES[rounding],
            OFFSET=offset, CENTRE=centred, E5M2=dtype == torch.float8_e5m2, EMIT=emit, ROWWISE=rowwise,
            ROWS=height, COLUMNS=width, num_warps=max(4, height * width // (32 * _PER_THREAD)),
        )  # fmt: skip
    return y, q, amax, scale_inv, mean, rstd
