"""Column sums of partial sums, in an order that is the same in every run.

Kernels that walk over a matrix by tiles or rows leave one partial row each, fp32; atomics would add them up in another
order each time. A partial row is read once: 128 of 4096 columns take 4 µs on an H200, which is mostly the launch, so
two matrices of equal shape (the gradients of a norm's weight and bias) share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.launch import launch
from te_compile.ops.column_sums import AT_ONCE

MOST_ROWS = 256


@triton.jit
def _add_up(partials, total, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of ``COLUMNS`` columns of ``partials``, fp32 [count, columns]."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = k < columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        at = (start + row).to(tl.int64)
        within = (start + row < count)[:, None] & inside[None, :]
        sums += tl.load(partials + at[:, None] * columns + k[None, :], mask=within, other=0.0)
    tl.store(total + k, tl.sum(sums, axis=0), mask=inside)


@triton.jit
def _add_up_kernel(
    partials, total, more_partials, more_total, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    if tl.program_id(1) == 0:
        _add_up(partials, total, count, columns, ROWS, COLUMNS)
    elif more_partials is not None:
        _add_up(more_partials, more_total, count, columns, ROWS, COLUMNS)


@triton.jit
def _add_up_many_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, t0, t1, t2, t3, t4, t5, t6, t7, n0, n1, n2, n3, n4, n5, n6, n7,
    k0, k1, k2, k3, k4, k5, k6, k7, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The totals t of up to eight partials p, fp32 [n, k], None for none."""
    _add_up_if(0, p0, t0, n0, k0, ROWS, COLUMNS)
    _add_up_if(1, p1, t1, n1, k1, ROWS, COLUMNS)
    _add_up_if(2, p2, t2, n2, k2, ROWS, COLUMNS)
    _add_up_if(3, p3, t3, n3, k3, ROWS, COLUMNS)
    _add_up_if(4, p4, t4, n4, k4, ROWS, COLUMNS)
    _add_up_if(5, p5, t5, n5, k5, ROWS, COLUMNS)
    _add_up_if(6, p6, t6, n6, k6, ROWS, COLUMNS)
    _add_up_if(7, p7, t7, n7, k7, ROWS, COLUMNS)


@triton.jit
def _add_up_if(which: tl.constexpr, partials, total, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up this one if the program is one of its, and not past its end."""
    if partials is not None:  # noqa: SIM102 - this is known when it is compiled, and the next is not
        if (tl.program_id(1) == which) & (tl.program_id(0) * COLUMNS < columns):
            _add_up(partials, total, count, columns, ROWS, COLUMNS)


def added_up_at_once(partials: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """The sum of each of ``partials``, fp32 [P, K] with any P and K, in its dtype: eight in a launch."""
    totals = [buffers.empty(partial, partial.shape[1:], dtype) for partial, dtype in zip(partials, dtypes, strict=True)]
    for first in range(0, len(partials), AT_ONCE):
        some = partials[first : first + AT_ONCE]
        absent = AT_ONCE - len(some)
        counts, columns = ([partial.shape[at] for partial in some] for at in range(2))
        rows = min(max(triton.next_power_of_2(max(counts)), 16), MOST_ROWS)
        launch(
            _add_up_many_kernel, (triton.cdiv(max(columns), 32), len(some)),
            *some, *[None] * absent, *totals[first : first + AT_ONCE], *[None] * absent,
            *counts, *[1] * absent, *columns, *[1] * absent, ROWS=rows, COLUMNS=32, num_warps=8 if rows > 64 else 4,
        )  # fmt: skip
    return totals


def added_up(partials: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """The sum of each of ``partials``, one or two of fp32 [count, K], over its first dimension: [K] in its dtype."""
    count, columns = partials[0].shape
    totals = [buffers.empty(partial, (columns,), dtype) for partial, dtype in zip(partials, dtypes, strict=True)]
    more = (partials[1], totals[1]) if len(partials) > 1 else (None, None)
    # 128 programs and 128 bytes of a row for each even of 4096 columns: the whole GPU reads.
    rows = min(max(triton.next_power_of_2(count), 16), MOST_ROWS)  # at once: each turn of the loop waits for memory
    launch(
        _add_up_kernel, (triton.cdiv(columns, 32), len(partials)),
        partials[0], totals[0], *more, count, columns, ROWS=rows, COLUMNS=32, num_warps=8 if rows > 64 else 4,
    )  # fmt: skip
    return totals
