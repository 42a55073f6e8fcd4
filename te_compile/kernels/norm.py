"""A row norm and the quantize of its result: statistics, y, q, qᵀ and amax.

Bytes, for x [M, K] of two-byte elements without y: 2·M·K read, M·K written for q, M·K for qᵀ; y, if wanted, 2·M·K more.
An H200 copies 4.27 TB/s (read and written bytes together), which allows

    8192 × 4096     134 MB     31 µs (47 with y)        8192 × 16384    537 MB    126 µs (189 with y)

A row must have been read whole before its first code can be written, and qᵀ wants runs of many rows: too much for one
program to hold. So there are two launches. The first one finds mean and rstd of each row and reads x alone (2·M·K
bytes, 16 µs and 63 µs above); the second one is quantize.py with a norm in front, and starts where the first one ended,
because the L2 still holds that part: 58 µs and 213 µs for an RMS norm, 64 µs and 218 µs for a layer norm. Programs that
walk over their rows twice were slower. One launch in which tiles wait for statistics that run ahead of them through the
L2 gained nothing: what it saves in bytes it loses in waiting. What Triton has no word for, blocks that share their
memory, reads x once: csrc/cuda/norm_quantize_kernel.cuh, preferred where built. Where no qᵀ is wanted rows fit into
programs: norm_rows.py. Few rows, as in decoding, fit into one: norm_alone.py; or into a cluster: native_norm.py.

The mean and the variance come from sums of differences from the mean of the row's first block. Sums about 0 would lose
the variance of large numbers that differ little; these lose a factor of at most the number of blocks, because a first
block far from the mean is itself variance. A running mean (Welford) is as safe and costs three times the arithmetic.

Without a scale (current scaling, or the first step of a delayed one) a launch in between finds the amax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.kernels.norm_alone import norm_quantize_alone
from te_compile.kernels.norm_rows import LONGEST_ROW, norm_quantize_rows, normalised
from te_compile.kernels.quantize import (
    OTHERS,
    fp8_words,
    largest_of_four,
    must_measure,
    record_amax,
    rule_constants,
    scale_in_use,
    scaled,
    store_quarter,
    store_tile,
    store_words,
)
from te_compile.kernels.row_norm import RowNorm
from te_compile.kernels.tiles import Tile, Work, alone, choose
from te_compile.ops.norm_quantize import Norm, Outputs, Wanted
from te_compile.ops.quantize import padded
from te_compile.ops.reach import near


@triton.jit
def _load_block(x, valid, column, columns):
    """A block of rows as stored, zeros outside."""
    inside = valid[:, None] & (column < columns)[None, :]
    return tl.load(x[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _row_statistics(x, valid, columns, eps, CENTRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """mean (zeros unless CENTRE) and rstd, fp32 [ROWS], of the rows whose first elements are at ``x``."""
    k = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    value = _load_block(x, valid, k, columns)
    shift = tl.zeros((ROWS,), tl.float32)
    if CENTRE:
        shift = tl.sum(value.to(tl.float32), axis=1) / tl.minimum(columns, COLUMNS)
    for block in range(tl.cdiv(columns, COLUMNS)):
        column = block * COLUMNS + k
        following = _load_block(x, valid, column + COLUMNS, columns)  # asked for before this one is worked on
        apart = value.to(tl.float32)
        if CENTRE:
            apart = tl.where((column < columns)[None, :], apart - shift[:, None], 0.0)
            total += apart
        squares += apart * apart
        value = following
    length = columns * 1.0
    variance = tl.sum(squares, axis=1) / length
    mean = shift
    if CENTRE:
        difference = tl.sum(total, axis=1) / length
        mean += difference
        variance = tl.maximum(variance - difference * difference, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return mean, tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))


@triton.jit(do_not_specialize_on_alignment=["amax"])
def _statistics_kernel(
    x, amax, means, rstds, rows, columns, stride_m, eps,
    CENTRE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(amax, 0.0)  # for the launches that follow
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    mean, rstd = _row_statistics(x + row * stride_m, valid, columns, eps, CENTRE, ROWS, COLUMNS)
    if CENTRE:
        tl.store(means + row, mean, mask=valid)
    tl.store(rstds + row, rstd, mask=valid)


@triton.jit
def _quarter(
    x, means, rstds, w, b, j, tile_m, tile_k, word, k, rows, columns, stride_m,
    Y: tl.constexpr, ROUND: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows 4·i + j of a tile of y, as ``normalised`` has it, zeros outside; ``x`` is where the tile starts."""
    m = 4 * word + j
    valid = tile_m + m < rows
    inside = valid[:, None] & (tile_k + k < columns)[None, :]
    value = tl.load(x + m[:, None] * stride_m + k[None, :], mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstds + tile_m + m, mask=valid, other=0.0)
    mean = rstd
    if CENTRE:
        mean = tl.load(means + tile_m + m, mask=valid, other=0.0)
    y = normalised(value, mean, rstd, w, b, Y, ROUND, CENTRE, WEIGHT, BIAS)
    # Rows past the end are not zero after a bias or a mean; their codes are padding and must be.
    return tl.where(inside, y, 0.0)


@triton.jit(do_not_specialize_on_alignment=["scale", "amax"])
def _norm_kernel(
    x, weight, bias, scale, y, q, qt, amax, scale_inv, means, rstds,
    rows, columns, padded_rows, stride_m,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    MEASURING: tl.constexpr, MEASURED: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr,
    E5M2: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    # MEASURING: find the amax and nothing else. MEASURED: that has been done.
    wanted = True
    if MEASURING:
        wanted = must_measure(scale)
    if wanted:
        program = tl.program_id(0)
        if not MEASURING:
            used = scale_in_use(scale, amax, MEASURED, TARGET, EPSILON, POWER_2)
            if program == 0:
                tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), used))
        if MEASURING or not MEASURED:
            program = tl.num_programs(0) - 1 - program  # the L2 still holds what the launch before read last
        across = tl.maximum(tl.cdiv(columns, TILE_COLUMNS), 1)
        tile_m = (program // across) * TILE_ROWS
        tile_k = (program % across) * TILE_COLUMNS
        word, k = tl.arange(0, TILE_ROWS // 4), tl.arange(0, TILE_COLUMNS)
        w = tl.zeros((TILE_COLUMNS,), tl.float32)
        b = w
        if weight is not None:
            w = tl.load(weight + tile_k + k, mask=tile_k + k < columns, other=0.0).to(tl.float32) + OFFSET
        if bias is not None:
            b = tl.load(bias + tile_k + k, mask=tile_k + k < columns, other=0.0).to(tl.float32)
        W: tl.constexpr = weight is not None
        B: tl.constexpr = bias is not None
        x += tile_m.to(tl.int64) * stride_m + tile_k
        first = _quarter(
            x, means, rstds, w, b, 0, tile_m, tile_k, word, k, rows, columns, stride_m, Y, ROUND, CENTRE, W, B
        )
        second = _quarter(
            x, means, rstds, w, b, 1, tile_m, tile_k, word, k, rows, columns, stride_m, Y, ROUND, CENTRE, W, B
        )
        third = _quarter(
            x, means, rstds, w, b, 2, tile_m, tile_k, word, k, rows, columns, stride_m, Y, ROUND, CENTRE, W, B
        )
        fourth = _quarter(
            x, means, rstds, w, b, 3, tile_m, tile_k, word, k, rows, columns, stride_m, Y, ROUND, CENTRE, W, B
        )
        largest = largest_of_four(first, second, third, fourth)
        if not MEASURING:
            if EMIT:
                y += tile_m.to(tl.int64) * columns + tile_k
                store_quarter(y, first.to(Y), 0, tile_m, tile_k, word, k, rows, columns)
                store_quarter(y, second.to(Y), 1, tile_m, tile_k, word, k, rows, columns)
                store_quarter(y, third.to(Y), 2, tile_m, tile_k, word, k, rows, columns)
                store_quarter(y, fourth.to(Y), 3, tile_m, tile_k, word, k, rows, columns)
            first, second, third, fourth = (
                scaled(first, used),
                scaled(second, used),
                scaled(third, used),
                scaled(fourth, used),
            )
            if ROWWISE:
                store_tile(q, first, second, third, fourth, tile_m, tile_k, word, k, rows, columns, E5M2)
            if COLUMNWISE:
                words = fp8_words(first, second, third, fourth, E5M2)
                store_words(qt, words, tile_m, tile_k, word, k, columns, padded_rows)
        record_amax(amax, largest)


STATISTICS_WARPS = 4
FEW_ROWS = 32


def _tile(rows: int) -> Tile:
    """How much a program of the second launch does: 32 elements a thread; fewer rows where there are few."""
    return Tile(64, 128, 8) if rows > FEW_ROWS else Tile(16, 128, 4)


def _block(columns: int) -> tuple[int, int]:
    """Rows of a statistics program and the columns it reads at a time: 32 elements a thread."""
    width = min(max(64, triton.next_power_of_2(columns)), 2048)
    return 4096 // width, width


def norm_quantize(x: Tensor, norm: Norm, wanted: Wanted, measure: bool, tile: Tile | None = None) -> Outputs:
    """What is wanted of the norm of x: [M, K]. ``measure``: the scale may be absent or 0.

    mean and rstd are fp32 [M, 1]; y, q, qᵀ that were not asked for and the mean of an rms kind have shape [0].
    """
    rows, columns = x.shape
    x = near(x if x.stride(1) == 1 or columns == 1 else x.contiguous(), 0)
    row_norm, whole = RowNorm.of(norm, x), alone(rows, columns)
    if whole and not tile and (wanted.scale is None or not wanted.columnwise):
        return norm_quantize_alone(x, row_norm, wanted, whole)
    if not (wanted.columnwise or tile) and wanted.scale is not None and columns <= LONGEST_ROW:
        return norm_quantize_rows(x, row_norm, wanted, measure)
    scale, dtype, rowwise, columnwise, emit, _ = wanted
    what = ("norm_quantize", norm.kind, row_norm.y_dtype, dtype, rowwise, columnwise, emit, scale is None)
    tile = tile or choose(_tile(rows), lambda: Work([x], what, OTHERS if rows > FEW_ROWS else ()))
    return _in_two_launches(x, row_norm, wanted, measure, tile)


def _in_two_launches(x: Tensor, norm: RowNorm, wanted: Wanted, measure: bool, tile: Tile) -> Outputs:
    """The same by rows' statistics first, and then by tiles."""
    scale, dtype, rowwise, columnwise, emit, rule = wanted
    rows, columns = x.shape
    with on_device_of(x):
        q = buffers.empty(x, (rows, columns) if rowwise else (0,), dtype)
        qt = buffers.empty(x, (columns, padded(rows)) if columnwise else (0,), dtype)
        amax, scale_inv = (buffers.empty(x, (), torch.float32) for _ in range(2))
        y = buffers.empty(x, (rows, columns) if emit else (0,), norm.y_dtype)
        mean = buffers.empty(x, (rows, 1) if norm.centred else (0,), torch.float32)
        rstd = buffers.empty(x, (rows, 1), torch.float32)
    target, epsilon, power_2 = rule_constants(rule, dtype)
    grid = max(1, triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns))

    def run(measuring: bool) -> None:
        launch(
            _norm_kernel, grid,
            x, norm.weight, norm.bias, scale, y, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv, mean, rstd,
            rows, columns, padded(rows), x.stride(0),
            **norm.constants(), MEASURING=measuring, MEASURED=measure,
            TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, EMIT=emit, ROWWISE=rowwise, COLUMNWISE=columnwise,
            TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps,
        )  # fmt: skip

    with on_device_of(x):
        height, width = _block(columns)
        launch(
            _statistics_kernel, max(1, triton.cdiv(rows, height)),
            x, amax, mean, rstd, rows, columns, x.stride(0), norm.eps,
            CENTRE=norm.centred, ROWS=height, COLUMNS=width, num_warps=STATISTICS_WARPS,
        )  # fmt: skip
        if measure:
            run(measuring=True)
        run(measuring=False)
    return y, q, qt, amax, scale_inv, mean, rstd
