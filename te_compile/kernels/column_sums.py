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
