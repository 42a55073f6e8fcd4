"""A row norm of few rows and the quantize of its result in one program: see kernels/alone.py.

It serves what kernels/norm_rows.py does, and current scaling too, whose transposed copy it makes as well: whoever makes
that later, as ``save_memory=True`` has it, then gets codes of the same statistics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.alone import scale_of_all
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.kernels.norm_rows import load_parameters, load_rows, normalised, off_centre
from te_compile.kernels.programmatic import let_next_begin, may_next_begin
from te_compile.kernels.quantize import (
    fp8_codes,
    largest_of,
    magnitude,
    rule_constants,
    scaled,
)
from te_compile.kernels.row_norm import RowNorm
from te_compile.kernels.tiles import Tile
from te_compile.ops.norm_quantize import Outputs, Wanted
from te_compile.ops.quantize import padded

_PADDING = 16  # the rows of qᵀ's padding are fewer


@triton.jit
def _store_transposed(qt, codes, row, k, rows, columns, padded_rows, PADDING: tl.constexpr):
    """qᵀ, and the zeros that fill up its rows."""
    inside = (k < columns)[:, None] & (row < rows)[None, :]
    tl.store(qt + k[:, None] * padded_rows + row[None, :], tl.trans(codes), mask=inside)
    past = rows + tl.arange(0, PADDING)
    nothing = tl.zeros((k.shape[0], PADDING), tl.uint8)
    inside = (k < columns)[:, None] & (past < padded_rows)[None, :]
    tl.store(qt + k[:, None] * padded_rows + past[None, :], nothing, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["scale", "amax"])
def _norm_alone_kernel(
    x, weight, bias, scale, y, q, qt, amax, scale_inv, means, rstds, rows, columns, padded_rows, stride_m, eps,
    Y: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr,
    E5M2: tl.constexpr, EMIT: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    let_next_begin(NEXT)
    row, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value, inside = load_rows(x, row, k, rows, columns, stride_m)
    w, b = load_parameters(weight, bias, k, columns)
    length = columns * 1.0
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTRE:
        mean = tl.sum(value, axis=1) / length
        tl.store(means + row, mean, mask=row < rows)
    differences = off_centre(value, inside, mean, CENTRE)
    variance = tl.sum(differences * differences, axis=1) / length
    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    tl.store(rstds + row, rstd, mask=row < rows)

    w, b = w.to(tl.float32) + OFFSET, b.to(tl.float32)
    z = normalised(value, mean, rstd, w, b, Y, ROUND, CENTRE, weight is not None, bias is not None)
    z = tl.where(inside, z, 0.0)
    used = scale_of_all(largest_of(magnitude(z)), scale, amax, scale_inv, TARGET, EPSILON, POWER_2)
    at = row[:, None] * columns + k[None, :]
    if EMIT:
        tl.store(y + at, z.to(Y), mask=inside)
    codes = fp8_codes(scaled(z, used), E5M2)
    if ROWWISE:
        tl.store(q + at, codes, mask=inside)
    if COLUMNWISE:
        _store_transposed(qt, codes, row, k, rows, columns, padded_rows, PADDING)


def norm_quantize_alone(x: Tensor, norm: RowNorm, wanted: Wanted, tile: Tile) -> Outputs:
    """What is wanted of the norm of x [M, K], rows contiguous, of which ``tile`` holds all. The rest as for
    ``norm_quantize_rows``."""
    scale, dtype, rowwise, columnwise, emit, rule = wanted
    rows, columns = x.shape
    with on_device_of(x):
        q, qt, amax, scale_inv = buffers.quantized(x, rows, columns, dtype, rowwise, columnwise, cleared=False)
        y = buffers.empty(x, (rows, columns) if emit else (0,), norm.y_dtype)
        mean = buffers.empty(x, (rows, 1) if norm.centred else (0,), torch.float32)
        rstd = buffers.empty(x, (rows, 1), torch.float32)
        target, epsilon, power_2 = rule_constants(rule, dtype)
        launch(
            _norm_alone_kernel, 1,
            x, norm.weight, norm.bias, scale, y, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv, mean, rstd,
            rows, columns, padded(rows), x.stride(0), norm.eps,
            **norm.constants(), TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, EMIT=emit, ROWWISE=rowwise, COLUMNWISE=columnwise,
            PADDING=_PADDING, ROWS=tile.rows, COLUMNS=tile.columns, NEXT=may_next_begin(x, rows),
            num_warps=tile.warps,
        )  # fmt: skip
    return y, q, qt, amax, scale_inv, mean, rstd
