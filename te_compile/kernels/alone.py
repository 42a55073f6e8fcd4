"""A matrix of few rows in one program, which finds the amax of all of it, the scale, and the codes in one launch.

A step of few tokens, as in decoding, is all launches. Where no scale is known a matrix takes three, one that clears the
amax, one that measures and one that casts, because programs cannot wait for each other. A program alone need not wait:
it holds what it measured. How much it can hold before its one multiprocessor takes longer: kernels/tiles.py.

What is cast or computed element by element has the codes of kernels of many programs, to the last bit. A norm adds its
rows up in an order of its own, so it runs here whether its scale is known or not (kernels/norm_alone.py).
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
    INFINITY_BITS,
    fp8_codes,
    largest_of,
    magnitude,
    rule_constants,
    scale_from_amax,
    scaled,
)
from te_compile.kernels.tiles import Tile
from te_compile.ops.reach import near
from te_compile.recipe import ScaleRule


@triton.jit
def scale_of_all(
    bits, scale, amax, scale_inv, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr
):  # fmt: skip
    """The scale to cast with for the one program of a launch: the given one, or that of the magnitude ``bits`` where
    none is given or the given one is 0. Leaves the amax and 1 / scale."""
    largest = tl.minimum(bits, INFINITY_BITS).to(tl.float32, bitcast=True)
    tl.store(amax, largest)
    used = scale_from_amax(largest, TARGET, EPSILON, POWER_2)
    if scale is not None:
        given = tl.load(scale)
        used = tl.where(given > 0, given, used)
    tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), used))
    return used


@triton.jit(do_not_specialize_on_alignment=["scale", "amax"])
def _quantize_alone_kernel(
    x, scale, q, amax, scale_inv, rows, columns, stride_m, stride_k,
    TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr,
    E5M2: tl.constexpr, ROWWISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    let_next_begin(NEXT)
    m, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (m < rows)[:, None] & (k < columns)[None, :]
    value = tl.load(x + m[:, None] * stride_m + k[None, :] * stride_k, mask=inside, other=0.0).to(tl.float32)
    used = scale_of_all(largest_of(magnitude(value)), scale, amax, scale_inv, TARGET, EPSILON, POWER_2)
    if ROWWISE:
        tl.store(q + m[:, None] * columns + k[None, :], fp8_codes(scaled(value, used), E5M2), mask=inside)


def quantize_alone(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, rowwise: bool, rule: ScaleRule, tile: Tile
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, qᵀ (which is empty), amax and 1 / scale of x [M, K], any strides, of which ``tile`` holds all."""
    rows, columns = x.shape
    x = near(x, 0, 1)
    target, epsilon, power_2 = rule_constants(rule, dtype)
    with on_device_of(x):
        q, qt, amax, scale_inv = buffers.quantized(x, rows, columns, dtype, rowwise, False, cleared=False)
        launch(
            _quantize_alone_kernel, 1, x, scale, q.view(torch.uint8), amax, scale_inv, rows, columns, *x.stride(),
            TARGET=target, EPSILON=epsilon, POWER_2=power_2, E5M2=dtype == torch.float8_e5m2, ROWWISE=rowwise,
            ROWS=tile.rows, COLUMNS=tile.columns, NEXT=may_next_begin(x, rows), num_warps=tile.warps,
        )  # fmt: skip
    return q, qt, amax, scale_inv
