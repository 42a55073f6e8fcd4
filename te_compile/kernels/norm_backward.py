"""The backward of a row norm: dx, with the residual's gradient added, and the gradients of weight and bias.

Bytes, for x [M, K] of two-byte elements: dy, x and the residual's gradient read, dx written, 8·M·K together; weights,
statistics and partial sums are small beside them. An H200 copies 4.27 TB/s, which allows

    8192 × 4096    268 MB     63 µs        8192 × 16384    1074 MB    252 µs

dx of a row needs the sums over that row, so a program holds whole rows in registers; dw and db are sums over rows, so
it walks over many and keeps their sums in registers too. There are as many programs as the GPU holds at a time, each
leaves one partial row of dw and of db, and column_sums.py adds those up: no atomics, the same bits in every run.

Between a row's last load and its first store lie an exchange between all warps and no traffic at all, so the rows to
come must be under way: Triton's pipeliner copies them into shared memory while this one is worked on. Short rows are
taken several at a time, so that a step is long enough for that to matter.

The sums are fp32 and stay in registers beside the row. In a layer norm of 16384 columns those of dw and db would fill
half the registers of an SM: there, and where no dx is wanted, a second launch of the same kernel walks over blocks of
columns and reads dy and x once more (1611 MB for the second shape, 377 µs).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.column_sums import added_up
from te_compile.kernels.launch import launch
from te_compile.kernels.quantize import INTERPRETED, TRITON_DTYPES, rounded
from te_compile.kernels.row_norm import CENTRED, WEIGHT_OFFSET, rounding_of

LONGEST_ROW = 32768  # bytes of x or dy: beyond it no thread has registers for its part
LONGEST_SUMS = 16384  # elements of dw and db together: the sums of more leave no registers for the row itself
SHORT_STEP = 2048  # elements: shorter rows are taken several at a time
MOST_AHEAD = 3  # steps
EXCHANGES = 2048  # bytes of shared memory that are not for rows: what Triton reduces through, and the driver's own


@triton.jit
def _add_pairs(first, second, more_first, more_second):
    return first + more_first, second + more_second


@triton.jit
def _read(pointer, inside, EVEN: tl.constexpr):
    """A block of rows as stored, with no mask where none is needed, else 0 outside."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def _norm_backward_kernel(
    dy, x, weight, means, rstds, residual, dx, dw, db, rows, columns, dy_stride, x_stride, residual_stride,
    OFFSET: tl.constexpr, CENTRE: tl.constexpr, ROUND: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = k < columns
    w = tl.full((1, COLUMNS), 1.0, dx.dtype.element_ty if dx is not None else tl.float32)
    if weight is not None:
        w = _read(weight + k[None, :], in_columns[None, :], EVEN)
    dw_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    db_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    length = columns * 1.0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        in_rows = row < rows
        inside = in_rows[:, None] & in_columns[None, :]
        far = row.to(tl.int64)[:, None]
        # What lies outside is zero in dy, so in g, and adds nothing to any sum.
        dy_here = _read(dy + far * dy_stride + k[None, :], inside, EVEN)
        x_here = _read(x + far * x_stride + k[None, :], inside, EVEN)
        rstd = _read(rstds + row, in_rows, EVEN)[:, None]
        upstream, normal = dy_here.to(tl.float32), x_here.to(tl.float32)
        if CENTRE:
            normal -= _read(means + row, in_rows, EVEN)[:, None]
        normal *= rstd
        if dw is not None:
            if ROUND is None:
                dw_sum += upstream * normal
            else:
                dw_sum += upstream * rounded(normal, ROUND)
        if db is not None:
            db_sum += upstream
        if dx is not None:
            g = upstream * (w.to(tl.float32) + OFFSET)
            total = tl.zeros((ROWS,), tl.float32)
            if CENTRE:
                along, total = tl.reduce((g * normal, g), 1, _add_pairs)
            else:
                along = tl.sum(g * normal, axis=1)
            value = g - normal * (along / length)[:, None]
            if CENTRE:
                value -= (total / length)[:, None]
            value *= rstd
            X: tl.constexpr = dx.dtype.element_ty
            if residual is not None:
                residual_here = _read(residual + far * residual_stride + k[None, :], inside, EVEN)
                value = rounded(value, X) + residual_here.to(tl.float32)
            at = dx + far * columns + k[None, :]
            if EVEN:
                tl.store(at, value.to(X))
            else:
                tl.store(at, value.to(X), mask=inside)
    partial = tl.program_id(0).to(tl.int64) * columns + k
    if dw is not None:
        tl.store(dw + partial, tl.sum(dw_sum, axis=0), mask=in_columns)
    if db is not None:
        tl.store(db + partial, tl.sum(db_sum, axis=0), mask=in_columns)


@dataclass(frozen=True)
class Walk:
    """How programs walk: over steps of ``rows`` and ``columns``, by ``warps``, with copies for ``stages`` - 1 steps to
    come under way, ``programs`` of them on each SM."""

    rows: int
    columns: int
    warps: int
    programs: int
    stages: int


def walk_for(width: int, itemsize: int, matrices: int, shared_memory: int) -> Walk:
    """For ``matrices`` to be read in rows of ``width`` elements, a power of two, of up to ``itemsize`` bytes each.

    A thread holds 16 elements of two bytes, or 8 of four, of each: with the sums for dw and db that takes 100
    registers. Eight warps an SM that have three rows each on their way beat sixteen with fewer: 70 µs and 77 for
    8192 × 4096 on an H200. Rows of 16384 get 16 warps, for 32 have half the registers each.
    """
    rows = max(1, SHORT_STEP // width)
    warps = min(max(rows * width * itemsize // 1024, 1), 8 * itemsize)
    programs = max(1, 8 // warps)
    step = matrices * rows * width * itemsize
    ahead = (shared_memory // programs - EXCHANGES) // step
    return Walk(rows, width, warps, programs, 1 + max(0, min(ahead, MOST_AHEAD)))


@cache
def _device_limits(index: int) -> tuple[int, int]:
    """How many SMs there are, and the shared memory of each in bytes. For the interpreter, four."""
    if INTERPRETED:
        return 4, 1 << 18
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def walks_for(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    wants_dx: bool,
    sums: int,
    walk: Walk | None = None,
    sums_walk: Walk | None = None,
) -> tuple[Walk, Walk]:
    """How whole rows are walked over, and how ``sums`` rows of sums are found: the same walk for one launch of both.
    What is given stays."""
    width, itemsize = triton.next_power_of_2(x.shape[1]), max(dy.itemsize, x.itemsize)
    _, shared_memory = _device_limits(x.device.index or 0)
    walk = walk or walk_for(width, itemsize, 2 if residual is None or not wants_dx else 3, shared_memory)
    if wants_dx and sums_walk is None and sums * width <= LONGEST_SUMS:
        return walk, walk
    return walk, sums_walk or walk_for(min(width, SHORT_STEP), itemsize, 2, shared_memory)


def programs_of(walk: Walk, x: Tensor) -> tuple[int, int]:
    """How many programs walk over the rows of x, and how many beside each other over its columns."""
    rows, columns = x.shape
    across = triton.cdiv(columns, walk.columns)
    most = max(1, walk.programs * _device_limits(x.device.index or 0)[0] // across)
    return min(triton.cdiv(rows, walk.rows), most), across


def partial_rows(dy: Tensor, x: Tensor, residual: Tensor | None, wants_dx: bool, sums: int) -> int:
    """How many partial rows :func:`norm_backward` leaves of each of so many sums."""
    return programs_of(walks_for(dy, x, residual, wants_dx, sums)[1], x)[0]


def _as_rows(matrix: Tensor) -> Tensor:
    """``matrix``, or a copy if its rows do not lie element by element."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual: Tensor | None,
    kind: str,
    wants_dx: bool,
    wants_dw: bool,
    bias_dtype: torch.dtype | None,
    walk: Walk | None = None,
    sums_walk: Walk | None = None,
    partial_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db, as te_compile/ops/norm_backward.py has them, of x: [M, K] with M > 0.

    ``walk``: how whole rows are walked over, for dx. ``sums_walk``: how dw and db are found, in a launch of their own;
    None for the same launch, or for what fits. Where dx is wanted, a row may have up to LONGEST_ROW bytes.
    ``partial_sums``: dw and db as programs leave them, fp32 [P, K].
    """
    rows, columns = x.shape
    dy, x = _as_rows(dy), _as_rows(x)
    residual = None if residual is None or not wants_dx else _as_rows(residual)
    weight = None if weight is None else weight.contiguous()
    dtypes = [weight.dtype] if wants_dw and weight is not None else []
    dtypes += [] if bias_dtype is None else [bias_dtype]
    walk, summing = walks_for(dy, x, residual, wants_dx, len(dtypes), walk, sums_walk)
    apart = summing is not walk
    rounding = rounding_of(kind, x, weight)

    def run(walk: Walk, dx: Tensor | None, partials: list[Tensor]) -> None:
        launch(
            _norm_backward_kernel, programs_of(walk, x),
            dy, x, weight, mean, rstd, None if dx is None else residual, dx,
            partials[0] if partials and wants_dw else None,
            partials[-1] if partials and bias_dtype is not None else None,
            rows, columns, dy.stride(0), x.stride(0), 0 if residual is None else residual.stride(0),
            OFFSET=0.0 if weight is None else WEIGHT_OFFSET.get(kind, 0.0), CENTRE=kind in CENTRED,
            ROUND=None if rounding is None or rounding == torch.float32 else TRITON_DTYPES[rounding],
            EVEN=columns % walk.columns == 0 and rows % walk.rows == 0,
            ROWS=walk.rows, COLUMNS=walk.columns, STAGES=walk.stages, num_warps=walk.warps,
        )  # fmt: skip

    with on_device_of(x):
        dx = buffers.empty(x, (rows, columns) if wants_dx else (0,), x.dtype)
        partials = [buffers.empty(x, (programs_of(summing, x)[0], columns), torch.float32) for _ in dtypes]
        if wants_dx:
            run(walk, dx, [] if apart else partials)
        if apart and partials:
            run(summing, None, partials)
        sums = partials if partial_sums or not partials else added_up(partials, dtypes)
        dw = sums[0] if wants_dw else buffers.empty(x, (0,), x.dtype)
        db = buffers.empty(x, (0,), x.dtype) if bias_dtype is None else sums[-1]
    return dx, dw, db
