"""FP8 products of experts that each have rows of their own: the two forms of ops/grouped_gemm.py.

Work, for M rows, K to N features and E experts, is 2·M·K·N operations in each of the three products, whoever gets the
rows. An H200 does about 1200 TFLOP/s of FP8; its 4.27 TB/s bound the product by M·(K + 2·N) + E·N·K bytes instead where
an expert has fewer than some 560 rows. Mixtral's first product on 4 × 2048 tokens, two experts each (M = 16384,
K = 4096, N = 28672, E = 8):

    3.8 TFLOP     3.2 ms            2.0 GB     0.5 ms

Where each group ends is known to the device alone, and asking would stall it, so the grid is as large as any division
of the rows could need: a group wastes less than one tile, hence M / BLOCK_M + E tiles of rows, and one more for rows
after the last group, which are set to zero. A program finds its group by counting the tiles of those before it, in one
vector over all experts; what is left over has no row to write. Nothing is allocated or launched that depends on the
data, so a CUDA graph can hold it.

In the weight gradient groups lie along the contraction, where wide loads must start at multiples of 16, which groups do
not. A program begins at the first such multiple in its group, with whole blocks that need no mask. Of what is left
behind these and in front of them it clears the codes of other groups in registers: a NaN of theirs would not vanish by
a factor of zero. In front there are less than 16, which take a block of 32, the least that a product takes.

For weight gradients the wide tile was the fastest of nine on an H100, in the shapes of Mixtral, Qwen3-MoE and GPT-OSS.
For the other product tiles are first choices for Hopper's wgmma (64 rows a warp group, 128 bytes of contraction a row)
and have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch

BLOCK_K = 128  # of the contraction; also how many of its products are summed before they are promoted to fp32 ("split")
LEAST_K = tl.constexpr(32)
GROUP_ROWS = 8  # row tiles that take all column tiles together, so that the L2 serves both operands


@dataclass(frozen=True)
class GemmTile:
    """What one program computes, with how many warps and how many blocks of the contraction on their way."""

    rows: int
    columns: int
    warps: int
    stages: int


WIDE = GemmTile(128, 128, 8, 3)
NARROW = GemmTile(64, 128, 4, 4)  # for experts that have fewer than 64 rows on average


@triton.jit
def _multiplied(acc, a, b, SPLIT: tl.constexpr):
    """acc + a · bᵀ, for tiles that are read along the contraction.

    "split" promotes after each block by an addition of its own. Left to Triton (``max_num_imprecise_acc``), the
    addition stands before the wait for the tensor core that it reads from, and only ptxas's caution saves the result.
    """
    if SPLIT:
        acc += tl.dot(a, tl.trans(b))
    else:
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def _tile_of(program, row_tiles, columns, BLOCK_N: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Which tile of rows and which of columns a program takes: ``GROUP_ROWS`` tiles of rows walk over all columns."""
    column_tiles = tl.cdiv(columns, BLOCK_N)
    together = GROUP_ROWS * column_tiles
    first = (program // together) * GROUP_ROWS
    height = tl.minimum(row_tiles - first, GROUP_ROWS)
    return first + (program % together) % height, (program % together) // height


@triton.jit
def _rows_of_tile(ends, tile, rows, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile of rows (``experts`` for none), its first row, and where its group ends."""
    group = tl.arange(0, EXPERTS)
    end = tl.load(ends + group, mask=group < experts, other=0).to(tl.int32)
    start = tl.load(ends + group - 1, mask=(group < experts) & (group > 0), other=0).to(tl.int32)
    end = tl.minimum(end, rows)
    tiles = tl.where(group < experts, (tl.maximum(end - start, 0) + BLOCK_M - 1) // BLOCK_M, 0)
    behind = tl.cumsum(tiles, axis=0)
    expert = tl.sum(((behind <= tile) & (group < experts)).to(tl.int32), axis=0)
    mine = group == expert
    before = tl.sum(tl.where(mine, behind - tiles, 0), axis=0)
    first = tl.sum(tl.where(mine, start, 0), axis=0)
    stop = tl.sum(tl.where(mine, end, 0), axis=0)
    # The rows after the last group come after its tiles.
    before = tl.where(expert == experts, tl.sum(tiles, axis=0), before)
    first = tl.where(expert == experts, tl.max(end, axis=0), first)
    stop = tl.where(expert == experts, rows, stop)
    return expert, first + (tile - before) * BLOCK_M, stop


@triton.jit
def _grouped_gemm_kernel(
    a, b, a_scale_inv, b_scale_inv, ends, y,
    rows, columns, length, experts, row_tiles, stride_expert, stride_column,
    EXPERTS: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    tile, across = _tile_of(tl.program_id(0), row_tiles, columns, BLOCK_N, GROUP_ROWS)
    tile_n = across * BLOCK_N
    expert, tile_m, stop = _rows_of_tile(ends, tile, rows, experts, EXPERTS, BLOCK_M)
    if tile_m < stop:
        m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        within_m, within_n = tile_m + m < stop, tile_n + n < columns
        a += tile_m.to(tl.int64) * length
        b += expert.to(tl.int64) * stride_expert + tile_n.to(tl.int64) * stride_column
        a_at, b_at = a + m[:, None] * length + k[None, :], b + n[:, None] * stride_column + k[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, tl.where(expert < experts, length, 0), BLOCK_K):
            if WHOLE:
                codes = tl.load(a_at, mask=within_m[:, None], other=0.0)
                others = tl.load(b_at, mask=within_n[:, None], other=0.0)
            else:
                left = k[None, :] < length - block
                codes = tl.load(a_at, mask=within_m[:, None] & left, other=0.0)
                others = tl.load(b_at, mask=within_n[:, None] & left, other=0.0)
            acc = _multiplied(acc, codes, others, SPLIT)
            a_at += BLOCK_K
            b_at += BLOCK_K
        acc *= tl.load(a_scale_inv) * tl.load(b_scale_inv)
        y += tile_m.to(tl.int64) * columns + tile_n
        inside = within_m[:, None] & within_n[None, :]
        tl.store(y + m[:, None] * columns + n[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _cleared(codes, row, column, rows, start, end, padded):
    """A block of codes of which only the columns from ``start`` to ``end`` are this group's; the others become 0."""
    bytes_ = codes.to(tl.pointer_type(tl.uint8), bitcast=True)
    at = bytes_ + row[:, None].to(tl.int64) * padded + column[None, :]
    block = tl.load(at, mask=(row < rows)[:, None] & (column < padded)[None, :], other=0)
    block = tl.where((column >= start)[None, :] & (column < end)[None, :], block, tl.zeros_like(block))
    return block.to(codes.dtype.element_ty, bitcast=True)


@triton.jit
def _grouped_wgrad_kernel(
    a, b, a_scale_inv, b_scale_inv, ends, y,
    rows, columns, padded,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    end = tl.minimum(tl.load(ends + expert).to(tl.int32), padded)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
    down, across = _tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), columns, BLOCK_N, GROUP_ROWS)
    tile_m, tile_n = down * BLOCK_M, across * BLOCK_N
    row, column, k = tile_m + tl.arange(0, BLOCK_M), tile_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if start < end:
        first = tl.multiple_of((start + 15) // 16 * 16, 16)
        whole = tl.maximum(end - first, 0) // BLOCK_K
        a_at = a + row[:, None].to(tl.int64) * padded + (first + k)[None, :]
        b_at = b + column[:, None].to(tl.int64) * padded + (first + k)[None, :]
        for _ in range(0, whole):
            codes = tl.load(a_at, mask=(row < rows)[:, None], other=0.0)
            others = tl.load(b_at, mask=(column < columns)[:, None], other=0.0)
            acc = _multiplied(acc, codes, others, SPLIT)
            a_at += BLOCK_K
            b_at += BLOCK_K
        last = tl.multiple_of(first + whole * BLOCK_K, 16)
        if last < end:
            codes = _cleared(a, row, last + k, rows, start, end, padded)
            others = _cleared(b, column, last + k, columns, start, end, padded)
            acc = _multiplied(acc, codes, others, SPLIT)
        if start < first:
            before, stop = tl.multiple_of(first - 16, 16) + tl.arange(0, LEAST_K), tl.minimum(first, end)
            codes = _cleared(a, row, before, rows, start, stop, padded)
            others = _cleared(b, column, before, columns, start, stop, padded)
            acc = _multiplied(acc, codes, others, SPLIT)
    acc *= tl.load(a_scale_inv) * tl.load(b_scale_inv)
    y += expert.to(tl.int64) * rows * columns
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = y + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside)


def tile_for(rows: int, experts: int) -> GemmTile:
    """The tile for so many rows in all."""
    return NARROW if rows < NARROW.rows * experts else WIDE


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    tile: GemmTile | None = None,
) -> Tensor:
    """y [M, N] of a: [M, K] and b: [E, N, K], any strides of b but 1 along K; K is a multiple of 16."""
    (rows, length), (experts, columns, _) = a.shape, b.shape
    tile = tile or tile_for(rows, experts)
    if rows == 0 or columns == 0:  # an empty batch has no tile to launch
        return a.new_empty((rows, columns), dtype=out_dtype)
    row_tiles = rows // tile.rows + experts + 1
    grid = row_tiles * triton.cdiv(columns, tile.columns)
    with on_device_of(a):
        y = buffers.empty(a, (rows, columns), out_dtype)
        launch(
            _grouped_gemm_kernel, grid,
            a.contiguous(), b, a_scale_inv, b_scale_inv, ends.contiguous(), y,
            rows, columns, length, experts, row_tiles, b.stride(0), b.stride(1),
            EXPERTS=triton.next_power_of_2(experts), SPLIT=accumulation == "split", WHOLE=length % BLOCK_K == 0,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, GROUP_ROWS=GROUP_ROWS,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def grouped_wgrad(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulation: str,
    tile: GemmTile = WIDE,
) -> Tensor:
    """dw [E, R, C] of a: [R, M] and b: [C, M], M padded to a multiple of 16."""
    (rows, padded), columns, experts = a.shape, b.shape[0], ends.shape[0]
    if padded == 0:  # an empty batch: sums over no rows
        return a.new_zeros((experts, rows, columns), dtype=out_dtype)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), experts)
    with on_device_of(a):
        y = buffers.empty(a, (experts, rows, columns), out_dtype)
        launch(
            _grouped_wgrad_kernel, grid,
            a.contiguous(), b.contiguous(), a_scale_inv, b_scale_inv, ends.contiguous(), y,
            rows, columns, padded,
            SPLIT=accumulation == "split",
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, GROUP_ROWS=GROUP_ROWS,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y
