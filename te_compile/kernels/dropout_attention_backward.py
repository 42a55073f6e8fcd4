"""The backward pass of attention with dropout; dropout_attention.py has the design, and what it takes."""

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
from te_compile.kernels.dropout_attention import LOG2_E
from te_compile.kernels.dropout_bits import keeps, keeps_across
from te_compile.kernels.launch import launch
from te_compile.ops.dropout_bits import kept_share

_LOG2_E = tl.constexpr(LOG2_E)
SHIFTS = 64  # queries a program


@triton.jit
def _shifts_kernel(
    grad, out, shifts, grad_batch, grad_row, grad_head, heads, queries,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Σ dout · out of every query."""
    tile_m, head = place(queries, M, False)
    row = heads * WIDTH
    dout = rows_of(head_of(grad, grad_batch, grad_head, heads, head), grad_row, tile_m, M, queries, WIDTH, D, EVEN)
    result = rows_of(head_of(out, queries * row, WIDTH, heads, head), row, tile_m, M, queries, WIDTH, D, EVEN)
    m = tile_m + tl.arange(0, M)
    at = shifts + head * queries + m
    tl.store(at, tl.sum(dout.to(tl.float32) * result.to(tl.float32), 1), mask=m < queries)


@triton.jit
def _of_queries(x, tile, M: tl.constexpr, queries, OTHER: tl.constexpr, EVEN: tl.constexpr):
    m = tile + tl.arange(0, M)
    return tl.load(x + m) if EVEN else tl.load(x + m, mask=m < queries, other=OTHER)


@triton.jit
def _gather_for_keys(
    dk, dv, k_here, v_here, grad, q, bits, logsumexp, shifts, first, last, tile_n, queries, keys,
    grad_row, q_row, nothing,
    SCALE: tl.constexpr, GROWTH: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys after the queries from ``first`` to ``last``, without their factors."""
    n = tile_n + tl.arange(0, N)
    for tile_m in tl.range(first, last, M, num_stages=STAGES):
        q_here = rows_of(q, q_row, tile_m, M, queries, WIDTH, D, EVEN)
        kept = keeps_across(bits, tile_m, tile_n, queries, keys, M, N, EVEN)
        scores = tl.dot(k_here, tl.trans(q_here))
        # Past the last query a sum without end makes every weight 0.
        sums = _of_queries(logsumexp, tile_m, M, queries, float("inf"), EVEN)
        weights = tl.exp2(scores * SCALE - (sums * _LOG2_E)[None, :])
        if MASKED:
            weights = tl.where(n[:, None] <= (tile_m + tl.arange(0, M))[None, :], weights, 0.0)
        dout = rows_of(grad, grad_row, tile_m, M, queries, WIDTH, D, EVEN)
        upstream = tl.where(kept, tl.dot(v_here, tl.trans(dout)) * GROWTH, nothing)
        dv = tl.dot(tl.where(kept, weights, nothing).to(dout.dtype), dout, dv)
        shift = _of_queries(shifts, tile_m, M, queries, 0.0, EVEN)
        dk = tl.dot((weights * (upstream - shift[None, :])).to(q_here.dtype), q_here, dk)
    return dk, dv


@triton.jit
def _keys_kernel(
    grad, q, k, v, bits, logsumexp, shifts, dk, dv, grad_batch, grad_row, grad_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, heads, queries, keys, zero,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys."""
    tile_n, head = place(keys, N, False)
    nothing = zero.to(tl.float32)
    grad, q = head_of(grad, grad_batch, grad_head, heads, head), head_of(q, q_batch, q_head, heads, head)
    bits = bits_of_head(bits, queries, keys, head)
    logsumexp, shifts = logsumexp + head * queries, shifts + head * queries
    k_here = rows_of(head_of(k, k_batch, k_head, heads, head), k_row, tile_n, N, keys, WIDTH, D, EVEN)
    v_here = rows_of(head_of(v, v_batch, v_head, heads, head), v_row, tile_n, N, keys, WIDTH, D, EVEN)
    dk_sum, dv_sum = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    first, last = 0, queries
    if CAUSAL:
        first = tile_n // M * M
    if APART:  # the queries that do not see every key of the tile
        last = tl.minimum(tl.cdiv(tile_n + N - 1, M) * M, queries)
    tl.assume(first < last)
    dk_sum, dv_sum = _gather_for_keys(
        dk_sum, dv_sum, k_here, v_here, grad, q, bits, logsumexp, shifts, first, last, tile_n, queries, keys,
        grad_row, q_row, nothing, SCALE, GROWTH, CAUSAL, WIDTH, D, M, N, EVEN, STAGES,
    )  # fmt: skip
    if APART:
        dk_sum, dv_sum = _gather_for_keys(
            dk_sum, dv_sum, k_here, v_here, grad, q, bits, logsumexp, shifts, last, queries, tile_n, queries, keys,
            grad_row, q_row, nothing, SCALE, GROWTH, False, WIDTH, D, M, N, EVEN, STAGES,
        )  # fmt: skip
    row = heads * WIDTH
    write_rows(head_of(dk, keys * row, WIDTH, heads, head), dk_sum * FACTOR, row, tile_n, N, keys, WIDTH, D)
    write_rows(head_of(dv, keys * row, WIDTH, heads, head), dv_sum * GROWTH, row, tile_n, N, keys, WIDTH, D)


@triton.jit
def _gather_for_queries(
    dq, q_here, dout, sums, shift, k, v, bits, first, last, tile_m, queries, keys, k_row, v_row, nothing,
    SCALE: tl.constexpr, GROWTH: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries after the keys from ``first`` to ``last``, without its factor."""
    m = tile_m + tl.arange(0, M)
    for tile_n in tl.range(first, last, N, num_stages=STAGES):
        keys_here = rows_of(k, k_row, tile_n, N, keys, WIDTH, D, EVEN)
        kept = keeps(bits, tile_m, tile_n, queries, keys, M, N, EVEN)
        weights = tl.exp2(tl.dot(q_here, tl.trans(keys_here)) * SCALE - sums[:, None])
        n = tile_n + tl.arange(0, N)
        if MASKED:
            weights = tl.where(n[None, :] <= m[:, None], weights, 0.0)
        if not EVEN:  # where there is no key its score is 0, which may be far above all others
            weights = tl.where((n < keys)[None, :], weights, 0.0)
        values_here = rows_of(v, v_row, tile_n, N, keys, WIDTH, D, EVEN)
        upstream = tl.where(kept, tl.dot(dout, tl.trans(values_here)) * GROWTH, nothing)
        dq = tl.dot((weights * (upstream - shift[:, None])).to(keys_here.dtype), keys_here, dq)
    return dq


@triton.jit
def _queries_kernel(
    grad, q, k, v, bits, logsumexp, shifts, dq, grad_batch, grad_row, grad_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, heads, queries, keys, zero,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of M queries."""
    tile_m, head = place(queries, M, CAUSAL)
    nothing = zero.to(tl.float32)
    k, v = head_of(k, k_batch, k_head, heads, head), head_of(v, v_batch, v_head, heads, head)
    bits = bits_of_head(bits, queries, keys, head)
    q_here = rows_of(head_of(q, q_batch, q_head, heads, head), q_row, tile_m, M, queries, WIDTH, D, EVEN)
    dout = rows_of(head_of(grad, grad_batch, grad_head, heads, head), grad_row, tile_m, M, queries, WIDTH, D, EVEN)
    sums = _of_queries(logsumexp + head * queries, tile_m, M, queries, float("inf"), EVEN) * _LOG2_E
    shift = _of_queries(shifts + head * queries, tile_m, M, queries, 0.0, EVEN)
    dq_sum = tl.zeros((M, D), tl.float32)
    first, last = keys_to_walk(tile_m, keys, M, N, CAUSAL, APART)
    tl.assume(first < last)
    dq_sum = _gather_for_queries(
        dq_sum, q_here, dout, sums, shift, k, v, bits, first, last, tile_m, queries, keys, k_row, v_row, nothing,
        SCALE, GROWTH, CAUSAL, WIDTH, D, M, N, EVEN, STAGES,
    )  # fmt: skip
    if APART:
        dq_sum = _gather_for_queries(
            dq_sum, q_here, dout, sums, shift, k, v, bits, 0, first, tile_m, queries, keys, k_row, v_row, nothing,
            SCALE, GROWTH, False, WIDTH, D, M, N, EVEN, STAGES,
        )  # fmt: skip
    row = heads * WIDTH
    write_rows(head_of(dq, queries * row, WIDTH, heads, head), dq_sum * FACTOR, row, tile_m, M, queries, WIDTH, D)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, logsumexp: Tensor,
    probability: float, causal: bool, scale: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``dropout_attention_backward_reference`` in ops/dropout_attention.py."""
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    grad, q, k, v = map(as_rows, (grad, q, k, v))
    tiles = tiles or tiles_for(width)
    factors = {"FACTOR": scale, "SCALE": scale * LOG2_E, "GROWTH": 65536 / kept_share(probability)}
    with on_device_of(q):
        shifts = buffers.empty(q, (batch, heads, queries), torch.float32)
        dq, dk, dv = (buffers.empty(q, tuple(x.shape), x.dtype) for x in (q, k, v))
        launch(
            _shifts_kernel, triton.cdiv(queries, SHIFTS) * batch * heads,
            grad, out, shifts, *strides(grad), heads, queries,
            WIDTH=width, D=max(16, triton.next_power_of_2(width)), M=SHIFTS, EVEN=queries % SHIFTS == 0, num_warps=4,
        )  # fmt: skip
        operands = (grad, q, k, v, bits, logsumexp, shifts)
        sizes = (*strides(grad), *strides(q), *strides(k), *strides(v), heads, queries, keys, 0)
        launch(
            _keys_kernel, triton.cdiv(keys, tiles.keys.keys) * batch * heads, *operands, dk, dv, *sizes,
            **factors, **constants(tiles.keys, queries, keys, width, causal),
        )  # fmt: skip
        launch(
            _queries_kernel, triton.cdiv(queries, tiles.queries.queries) * batch * heads, *operands, dq, *sizes,
            **factors, **constants(tiles.queries, queries, keys, width, causal),
        )  # fmt: skip
    return dq, dk, dv
