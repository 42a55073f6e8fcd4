"""A row norm and the quantize of its result where no transposed copy is wanted, as in inference: x is read once.

Without qᵀ, which wants runs of many rows, a program can hold its rows whole: it reads them once, finds mean and
variance of what it holds, and writes y and q. Bytes: 2·M·K read, M·K written; 101 MB and 24 µs for 8192 × 4096 at the
4.27 TB/s of an H200. The variance is that of differences from the mean, in two steps, for the row is there.

Where a scale is given that may be 0, as in the first step of delayed scaling, the same kernel runs before, finds the
amax and writes nothing else; where there is a scale after all it ends at once. So a row's statistics are the same to
the last bit whether the host knows yet that there is a scale or not. Without one (current scaling) rows are those of
kernels/norm.py, which makes the transposed copy as well: whoever makes that later gets codes of the same statistics.

Few warps of many elements are faster than many of few, for they meet to add up each row, and two tiles are faster than
one that is half empty. RMS norms on an H200 in microseconds, 8192 rows, 16384 of 1024 columns:

    columns                                  1024   2048   2560   3072   4096   5120
    one tile, 32 elements a thread             20     20     31     31     33     57
    as it is                                   18     18     23     26     32     42

With a bias beside its weight, a row comes with twice as many bytes of parameters, out of the L2: two rows of a program
share them, and they are asked for before the rows are added up. Layer norms of 8192 rows on an H100, in microseconds:

    columns                                    4096   8192  16384
    one row, parameters when they are wanted     46     91    265
    two rows                                     41     81    194
    and parameters early                         40     78    183

Rows in two tiles have no registers left to wait with: there, early parameters made 56 µs of 5120 columns into 61.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.kernels.programmatic import let_next_begin, may_next_begin
from te_compile.kernels.quantize import (
    fp8_codes,
    largest_of,
    magnitude,
    must_measure,
    record_amax,
    rounded,
    rule_constants,
    scale_in_use,
    scaled,
)
from te_compile.kernels.row_norm import RowNorm
from te_compile.ops.norm_quantize import Outputs, Wanted

LONGEST_ROW = 16384
_ELEMENTS = 4096  # of a program, if a row is no longer
_PER_THREAD = 64
_LONGEST_TILE_ALONE = 2048  # columns
_SHARING = range(4096, 16385)  # columns of tiles of which a program takes two if there is a bias


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


@triton.jit
def load_rows(x, row, k, rows, columns, stride_m):
    """Columns ``k`` of the program's rows in fp32, zeros outside, and which are inside."""
    inside = (row < rows)[:, None] & (k < columns)[None, :]
    return tl.load(x + row[:, None] * stride_m + k[None, :], mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def off_centre(value, inside, mean, CENTRE: tl.constexpr):
    """Differences from the mean, zeros outside."""
    if CENTRE:
        value = tl.where(inside, value - mean[:, None], 0.0)
    return value


@triton.jit
def load_parameters(weight, bias, k, columns):
    """Columns ``k`` of weight and bias as they are stored, zeros for what there is none of."""
    w = tl.zeros((k.shape[0],), tl.float32)
    b = w
    if weight is not None:
        w = tl.load(weight + k, mask=k < columns, other=0.0)
    if bias is not None:
        b = tl.load(bias + k, mask=k < columns, other=0.0)
    return w, b


@triton.jit
def _write(
    value, inside, mean, rstd, w, b, used, y, q, row, k, columns,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    E5M2: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr,
):  # fmt: skip
    """Store y and q of one part, as far as wanted; returns the bits of its largest magnitude."""
    w, b = w.to(tl.float32) + OFFSET, b.to(tl.float32)
    z = normalised(value, mean, rstd, w, b, Y, ROUND, CENTRE, WEIGHT, BIAS)
    z = tl.where(inside, z, 0.0)
    at = row[:, None] * columns + k[None, :]
    if EMIT:
        tl.store(y + at, z.to(Y), mask=inside)
    if ROWWISE:
        tl.store(q + at, fp8_codes(scaled(z, used), E5M2), mask=inside)
    return largest_of(magnitude(z))


@triton.jit
def _rows(
    x, weight, bias, used, y, q, means, rstds, row, rows, columns, stride_m, eps,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    E5M2: tl.constexpr, STATISTICS: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr,
    COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norm and quantize these rows, and store what is wanted; returns the bits of their largest magnitude."""
    k = tl.arange(0, COLUMNS)
    value, inside = load_rows(x, row, k, rows, columns, stride_m)
    length = columns * 1.0
    mean = tl.zeros((row.shape[0],), tl.float32)
    if not REST:
        w, b = load_parameters(weight, bias, k, columns)
    if REST:
        j = COLUMNS + tl.arange(0, REST)
        other, inside_other = load_rows(x, row, j, rows, columns, stride_m)
    if CENTRE:
        mean = tl.sum(value, axis=1)
        if REST:
            mean += tl.sum(other, axis=1)
        mean = mean / length
        if STATISTICS:
            tl.store(means + row, mean, mask=row < rows)
    apart = off_centre(value, inside, mean, CENTRE)
    squares = tl.sum(apart * apart, axis=1)
    if REST:
        apart_other = off_centre(other, inside_other, mean, CENTRE)
        squares += tl.sum(apart_other * apart_other, axis=1)
    rstd = tl.div_rn(tl.full((row.shape[0],), 1.0, tl.float32), tl.sqrt_rn(squares / length + eps))
    if STATISTICS:
        tl.store(rstds + row, rstd, mask=row < rows)
    if REST:
        w, b = load_parameters(weight, bias, k, columns)
    largest = _write(
        value, inside, mean, rstd, w, b, used, y, q, row, k, columns,
        weight is not None, bias is not None, Y, ROUND, OFFSET, CENTRE, E5M2, EMIT, ROWWISE,
    )  # fmt: skip
    if REST:
        w_other, b_other = load_parameters(weight, bias, j, columns)
        largest_other = _write(
            other, inside_other, mean, rstd, w_other, b_other, used, y, q, row, j, columns,
            weight is not None, bias is not None, Y, ROUND, OFFSET, CENTRE, E5M2, EMIT, ROWWISE,
        )  # fmt: skip
        largest = tl.maximum(largest, largest_other)
    return largest


@triton.jit(do_not_specialize_on_alignment=["scale", "amax"])
def _rows_kernel(
    x, weight, bias, scale, y, q, amax, scale_inv, means, rstds, rows, columns, stride_m, eps,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    MEASURING: tl.constexpr, MEASURED: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr,
    E5M2: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    let_next_begin(NEXT)
    # MEASURING: find the amax and nothing else. MEASURED: that has been done where there was no scale.
    # A row is COLUMNS and, if it is no power of two, REST more in a tile of its own.
    program = tl.program_id(0)
    wanted = True
    if MEASURING:
        wanted = must_measure(scale)
    if wanted:
        used = 1.0
        if not MEASURING:
            used = scale_in_use(scale, amax, MEASURED, TARGET, EPSILON, POWER_2)
            if program == 0:
                tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), used))
        if MEASURED and not MEASURING:
            program = tl.num_programs(0) - 1 - program  # the L2 still holds what the launch before read last
        row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        largest = _rows(
            x, weight, bias, used, y, q, means, rstds, row, rows, columns, stride_m, eps,
            Y, ROUND, OFFSET, CENTRE, E5M2, not MEASURING, EMIT and not MEASURING, ROWWISE and not MEASURING,
            COLUMNS, REST,
        )  # fmt: skip
        record_amax(amax, largest)


def _parts(columns: int) -> tuple[int, int]:
    """A row's two tiles, powers of two: of a long row that is none, half of the next one and what is left; else all, 0.

    Programs take several of shorter rows, which would lie badly in two tiles.
    """
    whole = max(64, triton.next_power_of_2(columns))
    rest = triton.next_power_of_2(max(1, columns - whole // 2))
    return (whole // 2, rest) if columns > _LONGEST_TILE_ALONE and rest < whole // 2 else (whole, 0)


def _height(width: int, rest: int, biased: bool) -> int:
    """How many rows a program takes."""
    if rest:
        return 1
    return 2 if biased and width in _SHARING else max(1, _ELEMENTS // width)


def norm_quantize_rows(x: Tensor, norm: RowNorm, wanted: Wanted, measure: bool) -> Outputs:
    """What is wanted of the norm of x: [M, K ≤ LONGEST_ROW], rows contiguous, M > 0, on the current device: no qᵀ.

    measure: the scale, which is given, may be 0. mean and rstd are fp32 [M, 1]; what was not asked for has shape [0].
    """
    scale, dtype, rowwise, _, emit, rule = wanted
    rows, columns = x.shape
    width, rest = _parts(columns)
    height = _height(width, rest, norm.bias is not None)
    with on_device_of(x):
        q = buffers.empty(x, (rows, columns) if rowwise else (0,), dtype)
        amax, scale_inv = buffers.amax(x), buffers.empty(x, (), torch.float32)
        y = buffers.empty(x, (rows, columns) if emit else (0,), norm.y_dtype)
        mean = buffers.empty(x, (rows, 1) if norm.centred else (0,), torch.float32)
        rstd = buffers.empty(x, (rows, 1), torch.float32)
    target, epsilon, power_2 = rule_constants(rule, dtype)

    def run(measuring: bool) -> None:
        launch(
            _rows_kernel, triton.cdiv(rows, height),
            x, norm.weight, norm.bias, scale, y, q.view(torch.uint8), amax, scale_inv, mean, rstd,
            rows, columns, x.stride(0), norm.eps,
            **norm.constants(), MEASURING=measuring, MEASURED=measure,
            TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, EMIT=emit, ROWWISE=rowwise,
            ROWS=height, COLUMNS=width, REST=rest, NEXT=not measuring and may_next_begin(x, rows),
            num_warps=max(1, height * width // (32 * _PER_THREAD)),
        )  # fmt: skip

    with on_device_of(x):
        if measure:
            run(measuring=True)
        run(measuring=False)
    return y, q, buffers.empty(x, (0,), dtype), amax, scale_inv, mean, rstd
