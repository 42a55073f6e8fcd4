"""The gradient of a gather along rows whose indices many matrices share, as products (ops/gather_backward.py).

A program owns a few columns r of row i of 64 matrices, and walks over j: a tile of dy [64, j] times the tile [j, r] of
what is 1 where index[i, j] is r, made in registers. Indices of relative positions rise or fall along a row, so most
tiles of 64 of them have none of the program's columns, and are passed over before dy is read.

For dy [256, 256, 256] and 1024 columns in bf16 that writes 134 MB and reads 34: 40 µs at an H200's bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch

MATRICES, PLACES, COLUMNS, WARPS = 64, 64, 128, 4
MOST_PROGRAMS = 65535
"""Along the second and third dimension of a launch."""


@triton.jit
def _gather_backward_kernel(
    dy, index, dx, batch, rows, places, columns, dy_b, dy_i, dy_j, index_i, index_j,
    MATRICES: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * COLUMNS
    row = tl.program_id(1).to(tl.int64)
    b = (tl.program_id(2) * MATRICES + tl.arange(0, MATRICES)).to(tl.int64)
    r = first + tl.arange(0, COLUMNS)
    sums = tl.zeros((MATRICES, COLUMNS), tl.float32)
    for start in range(0, places, PLACES):
        j = (start + tl.arange(0, PLACES)).to(tl.int64)
        ids = tl.load(index + row * index_i + j * index_j, mask=j < places, other=-1).to(tl.int32)
        hits = (ids >= first) & (ids < first + COLUMNS)
        if tl.max(hits.to(tl.int32), axis=0) > 0:
            at = b[:, None] * dy_b + row * dy_i + j[None, :] * dy_j
            x = tl.load(dy + at, mask=(b < batch)[:, None] & (j < places)[None, :], other=0.0)
            sums = tl.dot(x, (ids[:, None] == r[None, :]).to(x.dtype), sums)
    inside = (b < batch)[:, None] & (r < columns)[None, :]
    tl.store(dx + (b[:, None] * rows + row) * columns + r[None, :], sums.to(dx.dtype.element_ty), mask=inside)


def gather_backward(dy: Tensor, index: Tensor, columns: int) -> Tensor:
    """dx [B, I, columns]. dy: [B, I, J] of 16 bits, not empty; index: [I, J]; see ops/gather_backward.py."""
    batch, rows, places = dy.shape
    dx = buffers.empty(dy, (batch, rows, columns), dy.dtype)
    programs = triton.cdiv(columns, COLUMNS), rows, triton.cdiv(batch, MATRICES)
    with on_device_of(dy):
        launch(
            _gather_backward_kernel, programs, dy, index, dx, batch, rows, places, columns,
            *dy.stride(), *index.stride(), MATRICES=MATRICES, PLACES=PLACES, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return dx
