"""The loss of a language model and the gradient of its logits, reading the logits once each way.

Bytes, for logits [N, V] of two-byte elements: 2·N·V read in forward; in backward as many read and written, and read
once more where the gradient of the logits themselves is added. An H200 copies 4.27 TB/s, which allows

                       forward             backward              backward with an addend
    32768 × 30528    2001 MB   469 µs    4002 MB    937 µs        6002 MB   1406 µs
     8192 × 32000     524 MB   123 µs    1049 MB    246 µs        1573 MB    368 µs

A program takes a row. It walks over the columns in steps, each thread by vectors of 16 bytes, and every vector of a
step has a running maximum and a running sum of its own, which one thread holds: no exchange between threads before the
end of the row, and one exponential an element beside one a vector. Exponents are taken of x - max, and the loss is
log Σ - (x[t] - max), which keeps its digits where it is small. What hides the latency is other programs on the SM.

Rows may begin anywhere: with GPT-2's 50257 columns each does so two bytes off the one before. Vectors are read from the
first address in a row that is a multiple of 16, and the elements before and after them, less than two vectors, one by
one. In backward that needs all matrices to be off alike, as contiguous ones are; where they are not, all is read one by
one, and is right.

The sums of the gradient over all rows, a bias's gradient, need another form of backward, for a program that has one row
can only leave it to be read again. There a program takes a block of columns and walks down some of the rows, whose
statistics are known: each thread keeps the sums of its columns, of the rounded values as they are written, and no two
exchange anything. Each program leaves one partial row, fp32, and column_sums.py adds those up: no atomics, the same
bits in every run. Its columns are the same in every row, so vectors are as wide as all rows are aligned alike: 16 bytes
for 30528 columns of two bytes, 4 for 30522.

Each element of the logits is read by the thread that writes that of the gradient, and before it does, in both forms of
backward. So the gradient may be written over contiguous logits.

What a target says is never trusted with an address: one that is no class reads nothing and gives NaN. The logits of a
row that is ignored are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.column_sums import added_up
from te_compile.kernels.launch import launch
from te_compile.kernels.quantize import rounded

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Walk:
    """How a program walks along a row: by steps of ``vectors`` vectors of the logits, with ``warps`` warps, and with
    copies for ``stages`` - 1 steps to come under way, in shared memory (1: none, loads go to registers)."""

    vectors: int
    warps: int
    stages: int


# Two vectors a thread, of the logits and of what is added to their gradient, take 32 registers in forward and 48 in
# backward: an SM holds 64 and 40 warps, with at least 64 KiB of loads under way. Reasoned, not measured;
# ``python -m benchmarks.kernels --only "cross entropy" --sweep`` measures others.
FORWARD = Walk(512, 8, 1)
BACKWARD = Walk(512, 8, 1)


@dataclass(frozen=True)
class Descent:
    """How a program walks down some columns, for their sums: by steps of ``rows`` of ``columns`` elements, with
    ``warps`` warps, over ``height`` rows: fewer where that leaves too few programs, more where it leaves too many
    partial rows."""

    rows: int
    columns: int
    warps: int
    height: int


# Two vectors a thread of each of two rows: what a row's target and statistics cost is spread over 16 elements, and with
# 80 registers an SM holds 24 warps with 48 KiB of loads under way. A partial row of 128 rows is written and read with
# 2 % of the bytes of those rows. On an H200 8192 x 32000 in bf16 take 287 µs, 80% of a copy's bandwidth, where the form
# without sums takes 248; ``python -m benchmarks.kernels --only "cross entropy backward + sums" --sweep`` tries others.
SUMMING = Descent(2, 2048, 4, 128)
ENOUGH_PROGRAMS = 2048  # twice what an H200 has at a time, and more
LEAST_HEIGHT = 16  # rows: their partial row is an eighth of their bytes, and another pass would read half of them again
MOST_PARTIALS = 256  # rows, what column_sums.py reads at once
MOST_PARTIAL_BYTES = 64 << 20


@triton.jit
def _power(difference):
    """e to the ``difference``, fp32."""
    return tl.exp2(difference * LOG2E)


@triton.jit
def _ends(head, body, length, VECTOR: tl.constexpr):
    """The columns of a row of ``length`` that are in none of the ``body`` vectors that begin at column ``head``: up to
    2 · VECTOR, and which of the numbers returned are any."""
    index = tl.arange(0, 2 * VECTOR)
    after = head + body * VECTOR + index - VECTOR
    is_before = index < VECTOR
    column = tl.where(is_before, index, after)
    return column, column < tl.where(is_before, head, length)


@triton.jit
def _head(offset, columns, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """How many of a row's elements, which begin ``offset`` after an aligned address, come before the first vector."""
    if EVEN:
        head = tl.full((), 0, tl.int32)
    else:
        head = ((VECTOR - offset % VECTOR) % VECTOR).to(tl.int32)
    return tl.minimum(head, columns)


@triton.jit
def _cross_entropy_forward_kernel(
    logits, targets, losses, logsumexps, columns, stride, ignore_index,
    EVEN: tl.constexpr, VECTOR: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    ignored = target == ignore_index
    valid = (target >= 0) & (target < columns) & (ignored == 0)
    length = tl.where(ignored, 0, columns)
    head = _head(row * stride, length, EVEN, VECTOR)
    body = (length - head) // VECTOR
    lane = tl.arange(0, VECTORS)
    first = logits + tl.multiple_of(row * stride + head, VECTOR)
    at = first + lane[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    most = tl.full((VECTORS,), LOWEST, tl.float32)  # and no infinity: all of a vector may be -inf
    total = tl.zeros((VECTORS,), tl.float32)
    for step in tl.range(0, body, VECTORS, num_stages=STAGES):
        inside = (step + lane < body)[:, None]
        x = tl.load(at + step * VECTOR, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, axis=1))
        total = total * _power(most - higher) + tl.sum(_power(x - higher[:, None]), axis=1)
        most = higher
    highest = tl.max(most, axis=0)
    if not EVEN:
        column, is_any = _ends(head, body, length, VECTOR)
        x = tl.load(logits + row * stride + column, mask=is_any, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(x, axis=0))
    whole = tl.sum(total * _power(most - highest), axis=0)
    if not EVEN:
        whole += tl.sum(_power(x - highest), axis=0)
    logarithm = tl.log(whole)
    picked = tl.load(logits + row * stride + target, mask=valid, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(ignored, 0.0, logarithm - (picked - highest)))
    tl.store(logsumexps + row, tl.where(ignored, 0.0, highest + logarithm))


@triton.jit
def _write_gradient(logits, addend, out, hit, reads, writes, logsumexp, scale):
    """Write (softmax - one-hot) · scale (+ addend) for some columns of a row, and return it as it was before rounding.
    logits, addend, out: pointers to these; hit: which is the target; reads, writes: which logits are read and which
    results written."""
    x = tl.load(logits, mask=reads, other=float("-inf")).to(tl.float32)
    value = (_power(x - logsumexp) - tl.where(hit, 1.0, 0.0)) * scale
    if addend is not None:
        value += tl.load(addend, mask=writes, other=0.0).to(tl.float32)
    tl.store(out, value.to(out.dtype.element_ty), mask=writes)
    return value


@triton.jit
def _cross_entropy_backward_kernel(
    logits, targets, logsumexps, gradients, addend, out, columns, stride, gradient_stride, addend_stride, ignore_index,
    EVEN: tl.constexpr, LOGITS_ALIKE: tl.constexpr, ADDEND_ALIKE: tl.constexpr,
    VECTOR: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logsumexp = tl.load(logsumexps + row)
    scale = tl.load(gradients + row * gradient_stride)
    ignored = target == ignore_index
    known = (target >= 0) & (target < columns)
    scale = tl.where(ignored, 0.0, tl.where(known, scale, float("nan")))
    target = tl.where(ignored | (known == 0), -1, target).to(tl.int32)  # a column or none
    head = _head(row * columns, columns, EVEN, VECTOR)
    body = (columns - head) // VECTOR
    read, length = tl.where(ignored, 0, body), tl.where(ignored, 0, columns)  # where nothing counts nothing is read
    lane, within = tl.arange(0, VECTORS)[:, None], tl.arange(0, VECTOR)[None, :]
    place = lane * VECTOR + within
    logits_row, addend_row, out_row = row * stride, row * addend_stride, row * columns
    logits_first, addend_first = logits_row + head, addend_row + head
    if LOGITS_ALIKE:
        logits_first = tl.multiple_of(logits_first, VECTOR)
    if ADDEND_ALIKE:
        addend_first = tl.multiple_of(addend_first, VECTOR)
    out_at = out + tl.multiple_of(out_row + head, VECTOR) + place
    logits_at = logits + logits_first + place
    for step in tl.range(0, body, VECTORS, num_stages=STAGES):
        writes = step + lane < body
        reads = step + lane < read
        first = step * VECTOR
        _write_gradient(
            logits_at + first, None if addend is None else addend + addend_first + place + first, out_at + first,
            place == target - head - first, reads, writes, logsumexp, scale,
        )  # fmt: skip
    if not EVEN:
        column, is_any = _ends(head, body, columns, VECTOR)
        _write_gradient(
            logits + logits_row + column, None if addend is None else addend + addend_row + column,
            out + out_row + column, column == target, is_any & (column < length), is_any, logsumexp, scale,
        )  # fmt: skip


@triton.jit
def _row_statistics(targets, logsumexps, gradients, row, in_rows, columns, gradient_stride, ignore_index):
    """Of some rows: the column that is the target, -1 for none; logsumexp; what the gradient is scaled by; and whether
    the logits are read. Outside ``in_rows`` all of a row's gradient is 0."""
    target = tl.load(targets + row, mask=in_rows, other=ignore_index)
    logsumexp = tl.load(logsumexps + row, mask=in_rows, other=0.0)
    scale = tl.load(gradients + row.to(tl.int64) * gradient_stride, mask=in_rows, other=0.0)
    counts = target != ignore_index
    known = (target >= 0) & (target < columns)
    scale = tl.where(counts, tl.where(known, scale, float("nan")), 0.0)
    target = tl.where(counts & known, target, -1).to(tl.int32)
    return target, logsumexp, scale, counts


@triton.jit
def _cross_entropy_backward_with_sums_kernel(
    logits, targets, logsumexps, gradients, addend, out, partials,
    rows, units, stride_units, gradient_stride, addend_units, ignore_index, height,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Lengths come in units of UNIT elements, so that it is seen how far apart vectors may begin.
    columns = units * UNIT
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < columns
    first = tl.program_id(1) * height
    end = tl.minimum(first + height, rows)
    lane = tl.arange(0, ROWS)
    target, logsumexp, scale, counts = _row_statistics(
        targets, logsumexps, gradients, first + lane, first + lane < end, columns, gradient_stride, ignore_index
    )
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, end, ROWS):
        row = start + lane
        far = row.to(tl.int64)[:, None]
        writes = (row < end)[:, None] & in_columns[None, :]
        value = _write_gradient(
            logits + far * stride_units * UNIT + column[None, :],
            None if addend is None else addend + far * addend_units * UNIT + column[None, :],
            out + far * columns + column[None, :],
            column[None, :] == target[:, None], counts[:, None] & writes, writes, logsumexp[:, None], scale[:, None],
        )  # fmt: skip
        # Whether logits are read depends on the target, so it is there before its row's turn.
        target, logsumexp, scale, counts = _row_statistics(
            targets, logsumexps, gradients, row + ROWS, row + ROWS < end, columns, gradient_stride, ignore_index
        )
        sums += tl.sum(rounded(value, out.dtype.element_ty), axis=0)
    tl.store(partials + tl.program_id(1).to(tl.int64) * columns + column, sums, mask=in_columns)


def _as_rows(matrix: Tensor) -> Tensor:
    """``matrix``, or a copy if its rows do not lie element by element."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _operands(
    logits: Tensor, targets: Tensor, logsumexps: Tensor, addend: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    """The operands of a backward pass as its kernels read them, and how far apart the addend's rows lie."""
    logits, targets, logsumexps = _as_rows(logits), targets.contiguous(), logsumexps.contiguous()
    if addend is None:
        return logits, targets, logsumexps, None, logits.shape[1]
    addend = _as_rows(addend)
    return logits, targets, logsumexps, addend, addend.stride(0)


def cross_entropy_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, walk: Walk = FORWARD
) -> tuple[Tensor, Tensor]:
    """losses and logsumexp, as te_compile/ops/cross_entropy.py has them, of logits: [N, V], N > 0 and V > 0."""
    logits, targets = _as_rows(logits), targets.contiguous()
    rows, columns = logits.shape
    vector = VECTOR_BYTES // logits.itemsize
    with on_device_of(logits):
        losses, logsumexps = (buffers.empty(logits, (rows,), torch.float32) for _ in range(2))
        launch(
            _cross_entropy_forward_kernel, rows,
            logits, targets, losses, logsumexps, columns, logits.stride(0), ignore_index,
            EVEN=columns % vector == 0 and logits.stride(0) % vector == 0,
            VECTOR=vector, VECTORS=walk.vectors, STAGES=walk.stages, num_warps=walk.warps,
        )  # fmt: skip
    return losses, logsumexps


def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    logsumexps: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    walk: Walk = BACKWARD,
    out: Tensor | None = None,
) -> Tensor:
    """dlogits, as te_compile/ops/cross_entropy.py has it, of logits: [N, V], N > 0 and V > 0; in ``out`` if given."""
    logits, targets, logsumexps, addend, addend_stride = _operands(logits, targets, logsumexps, addend)
    rows, columns = logits.shape
    vector = VECTOR_BYTES // logits.itemsize
    with on_device_of(logits):
        out = buffers.empty(logits, (rows, columns), logits.dtype) if out is None else out
        launch(
            _cross_entropy_backward_kernel, rows,
            logits, targets, logsumexps, gradients, addend, out,
            columns, logits.stride(0), gradients.stride(0), addend_stride, ignore_index,
            EVEN=columns % vector == 0,
            LOGITS_ALIKE=(logits.stride(0) - columns) % vector == 0,
            ADDEND_ALIKE=(addend_stride - columns) % vector == 0,
            VECTOR=vector, VECTORS=walk.vectors, STAGES=walk.stages, num_warps=walk.warps,
        )  # fmt: skip
    return out


def _height(rows: int, columns: int, descent: Descent) -> int:
    """How many rows a program walks down, a multiple of a step. See :class:`Descent`."""
    across = triton.cdiv(columns, descent.columns)
    height = min(descent.height, max(LEAST_HEIGHT, rows * across // ENOUGH_PROGRAMS))
    most = max(1, min(MOST_PARTIALS, MOST_PARTIAL_BYTES // (4 * columns)))
    return triton.cdiv(max(height, triton.cdiv(rows, most)), descent.rows) * descent.rows


def cross_entropy_backward_with_sums(
    logits: Tensor,
    targets: Tensor,
    logsumexps: Tensor,
    gradients: Tensor,
    ignore_index: int,
    addend: Tensor | None,
    sums_dtype: torch.dtype,
    descent: Descent = SUMMING,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dlogits, in ``out`` if given, and its sums over rows, as te_compile/ops/cross_entropy.py has them, of logits:
    [N, V], N > 0, V > 0."""
    logits, targets, logsumexps, addend, addend_stride = _operands(logits, targets, logsumexps, addend)
    rows, columns = logits.shape
    unit = gcd(VECTOR_BYTES // logits.itemsize, columns, logits.stride(0), addend_stride)
    height = _height(rows, columns, descent)
    programs = triton.cdiv(columns, descent.columns), triton.cdiv(rows, height)
    with on_device_of(logits):
        out = buffers.empty(logits, (rows, columns), logits.dtype) if out is None else out
        partials = buffers.empty(logits, (programs[1], columns), torch.float32)
        launch(
            _cross_entropy_backward_with_sums_kernel, programs,
            logits, targets, logsumexps, gradients, addend, out, partials,
            rows, columns // unit, logits.stride(0) // unit, gradients.stride(0), addend_stride // unit,
            ignore_index, height,
            UNIT=unit, ROWS=descent.rows, COLUMNS=descent.columns, num_warps=descent.warps,
        )  # fmt: skip
        (sums,) = added_up([partials], [sums_dtype])
    return out, sums
