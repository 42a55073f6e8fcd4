"""Attention with dropout, forward and backward: flash attention that reads which weights to keep as bits.

Kernels that draw as they go draw twice, in the forward and again in the backward pass. Here a launch of its own draws
every bit once (dropout_bits.py), and the others read them, one bit for each pair of query and key: 67 MB for 4 × 32
heads of 2048 positions.

The backward pass is two launches, one of programs for keys (dk, dv) and one for queries (dq). Each computes the weights
anew, seven products in place of five, and nothing is added up by atomics: the same bits in every run. With 4 × 32
heads, 2048 positions and 128 features, on an H200, in milliseconds, the drawing of bits included, beside PyTorch's
kernels with a dropout (``python -m benchmarks.dropout_attention``):

                 full                                       causal
                 forward   forward and backward             forward   forward and backward
    these          0.73          2.61                         0.47          1.66
    flash          1.01          3.51                         0.60          2.16
    cuDNN          0.95          2.70                         0.54          1.53

Five products, with dsᵀ written for a product of its own to make dq, save a tenth of the backward here and lose a tenth
and more with narrower heads or a causal mask: what is written passes through shared memory once more. Where the C++
core is built, most heads are its own on Hopper (native_dropout_attention.py): five products in one kernel.

Two things are written as they are for the machine code that comes of them (``tests/kernels/test_wgmma_code.py``):

- ``nothing`` is a 0 that the compiler does not know. It would move the select of a constant past the cast to 16 bits,
  and take the pairs apart that the cast makes.
- Of each kernel's first loop the compiler knows that it runs (``tl.assume``). A way around it would set the sums to 0
  once more, and ptxas, which sees writes to them, may then let no product run beside anything. So causal attention
  begins on the diagonal, and what needs no mask, which may be nothing, comes second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.attention_tiles import (
    Tiles,
    as_rows,
    bits_of_head,
    constants,
    head_of,
    keys_to_walk,
    place,
    rows_of,
    strides,
    tiles_for,
    write_rows,
)
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.dropout_bits import keeps
from te_compile.kernels.launch import launch
from te_compile.ops.dropout_bits import kept_share

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
_LN_2 = tl.constexpr(LN_2)


@triton.jit
def _attend(
    acc, total, top, q_here, k, v, bits, first, last, tile_m, queries, keys, k_row, v_row, nothing,
    SCALE: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Result, sum and maximum of a tile of queries after the keys from ``first`` to ``last``."""
    m = tile_m + tl.arange(0, M)
    for tile_n in tl.range(first, last, N, num_stages=STAGES):
        keys_here = rows_of(k, k_row, tile_n, N, keys, WIDTH, D, EVEN)
        kept = keeps(bits, tile_m, tile_n, queries, keys, M, N, EVEN)
        scores = tl.dot(q_here, tl.trans(keys_here))
        n = tile_n + tl.arange(0, N)
        if MASKED:
            scores = tl.where(n[None, :] <= m[:, None], scores, float("-inf"))
        if not EVEN:
            scores = tl.where((n < keys)[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        top = new
        weights = tl.where(kept, weights, nothing)
        acc = acc * shrink[:, None]
        values_here = rows_of(v, v_row, tile_n, N, keys, WIDTH, D, EVEN)
        acc = tl.dot(weights.to(values_here.dtype), values_here, acc)
    return acc, total, top


@triton.jit
def _forward_kernel(
    q, k, v, bits, out, logsumexp, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    heads, queries, keys, zero,
    SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile_m, head = place(queries, M, CAUSAL)
    nothing = zero.to(tl.float32)
    k, v = head_of(k, k_batch, k_head, heads, head), head_of(v, v_batch, v_head, heads, head)
    bits = bits_of_head(bits, queries, keys, head)
    q_here = rows_of(head_of(q, q_batch, q_head, heads, head), q_row, tile_m, M, queries, WIDTH, D, EVEN)
    acc, total = tl.zeros((M, D), tl.float32), tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    first, last = keys_to_walk(tile_m, keys, M, N, CAUSAL, APART)
    tl.assume(first < last)
    acc, total, top = _attend(
        acc, total, top, q_here, k, v, bits, first, last, tile_m, queries, keys, k_row, v_row, nothing,
        SCALE, CAUSAL, WIDTH, D, M, N, EVEN, STAGES,
    )  # fmt: skip
    if APART:
        acc, total, top = _attend(
            acc, total, top, q_here, k, v, bits, 0, first, tile_m, queries, keys, k_row, v_row, nothing,
            SCALE, False, WIDTH, D, M, N, EVEN, STAGES,
        )  # fmt: skip
    row = heads * WIDTH
    acc *= (GROWTH / total)[:, None]
    write_rows(head_of(out, queries * row, WIDTH, heads, head), acc, row, tile_m, M, queries, WIDTH, D)
    m = tile_m + tl.arange(0, M)
    at = logsumexp + head * queries + m
    tl.store(at, (top + tl.log2(total)) * _LN_2, mask=m < queries)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``dropout_attention_reference`` in ops/dropout_attention.py. There is at least one query and one key."""
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    q, k, v = map(as_rows, (q, k, v))
    tile = (tiles or tiles_for(width)).forward
    with on_device_of(q):
        out = buffers.empty(q, (batch, queries, heads, width), q.dtype)
        logsumexp = buffers.empty(q, (batch, heads, queries), torch.float32)
        launch(
            _forward_kernel, triton.cdiv(queries, tile.queries) * batch * heads,
            q, k, v, bits, out, logsumexp, *strides(q), *strides(k), *strides(v), heads, queries, keys, 0,
            SCALE=scale * LOG2_E, GROWTH=65536 / kept_share(probability),
            **constants(tile, queries, keys, width, causal),
        )  # fmt: skip
    return out, logsumexp
