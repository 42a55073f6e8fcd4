"""Attention with dropout, forward and backward: flash attention that reads which weights to keep as bits.

Kernels that draw as they go draw twice, in the forward and again in the backward pass. Here a launch of its own draws
every bit once (dropout_bits.py), and the others read them, one bit for each pair of query and key: 67 MB for 4 × 32
heads of 2048 positions.

The backward pass is two launches, one of programs for keys (dk, dv) and one for queries (dq). Each computes the weights
anew, seven products in place of five, and nothing is added up by atomics: the same bits in every run. Of the layer with
4 × 32 heads, 2048 positions and 128 features, on an H200, in microseconds by ``triton.testing.do_bench``, beside
PyTorch's kernels with a dropout:

                 full                                causal
                 bits   forward   backward           bits   forward   backward
    these        125      650       1760              92      388       1091
    flash                1011       2514                      589       1572
    cuDNN                 956       1724                      527        998

Three things are written as they are for the machine code that comes of them (``tests/kernels/test_wgmma_code.py``):

- ``nothing`` is a 0 that the compiler does not know. It would move the select of a constant past the cast to 16 bits,
  and take the pairs apart that the cast makes.
- Each kernel has one loop. Where causal attention had one for the keys that all queries see and one for the others,
  ptxas let no product run beside anything.
- Nor does it in the forward pass without a mask, unless something that differs by rows is added to the scores: 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.dropout_bits import keeps, keeps_across
from te_compile.kernels.launch import launch
from te_compile.ops.dropout_bits import kept_share

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
_LOG2_E, _LN_2 = tl.constexpr(LOG2_E), tl.constexpr(LN_2)


# --- what all of them read ------------------------------------------------------------------------------------------


@triton.jit
def _rows(x, stride, tile, ROWS: tl.constexpr, length, WIDTH: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of one head, [ROWS, D]; 0 past its length and its WIDTH."""
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    at = x + tl.cast(tile, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if EVEN and WIDTH == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(tile + row < length)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _write_rows(x, value, stride, tile, ROWS: tl.constexpr, length, WIDTH: tl.constexpr, D: tl.constexpr):
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (tile + row < length)[:, None] & (d < WIDTH)[None, :]
    at = x + tl.cast(tile, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _place(length, TILE: tl.constexpr):
    """Where this program's tile begins, and which of all heads it is of. A grid's other dimensions end at 65535."""
    tiles, index = tl.cdiv(length, TILE), tl.program_id(0)
    return index % tiles * TILE, (index // tiles).to(tl.int64)


@triton.jit
def _head(x, stride_batch, stride_head, heads, index):
    """Where one of all heads begins."""
    return x + index // heads * stride_batch + index % heads * stride_head


@triton.jit
def _bits_of_head(bits, queries, keys, index):
    return bits + index * queries * (2 * tl.cdiv(keys, 64))


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def _forward_kernel(
    q, k, v, bits, out, logsumexp, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    heads, queries, keys, zero,
    SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile_m, head = _place(queries, M)
    nothing = zero.to(tl.float32)
    m = tile_m + tl.arange(0, M)
    k, v = _head(k, k_batch, k_head, heads, head), _head(v, v_batch, v_head, heads, head)
    bits = _bits_of_head(bits, queries, keys, head)
    q_here = _rows(_head(q, q_batch, q_head, heads, head), q_row, tile_m, M, queries, WIDTH, D, EVEN)
    acc, total = tl.zeros((M, D), tl.float32), tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    end = tl.minimum(tile_m + M, keys) if CAUSAL else keys
    for tile_n in tl.range(0, end, N, num_stages=STAGES):
        keys_here = _rows(k, k_row, tile_n, N, keys, WIDTH, D, EVEN)
        kept = keeps(bits, tile_m, tile_n, queries, M, N, EVEN)
        scores = tl.dot(q_here, tl.trans(keys_here))
        n = tile_n + tl.arange(0, N)
        if CAUSAL:
            scores = tl.where(n[None, :] <= m[:, None], scores, float("-inf"))
        else:
            scores += (m * nothing)[:, None]
        if not EVEN:
            scores = tl.where((n < keys)[None, :], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        top = new
        weights = tl.where(kept, weights, nothing)
        acc = acc * shrink[:, None]
        values_here = _rows(v, v_row, tile_n, N, keys, WIDTH, D, EVEN)
        acc = tl.dot(weights.to(values_here.dtype), values_here, acc)
    row = heads * WIDTH
    acc *= (GROWTH / total)[:, None]
    _write_rows(_head(out, queries * row, WIDTH, heads, head), acc, row, tile_m, M, queries, WIDTH, D)
    at = logsumexp + head * queries + m
    tl.store(at, (top + tl.log2(total)) * _LN_2, mask=m < queries)


# --- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def _shifts_kernel(
    grad, out, shifts, grad_batch, grad_row, grad_head, heads, queries,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Σ dout · out of every query."""
    tile_m, head = _place(queries, M)
    row = heads * WIDTH
    dout = _rows(_head(grad, grad_batch, grad_head, heads, head), grad_row, tile_m, M, queries, WIDTH, D, EVEN)
    result = _rows(_head(out, queries * row, WIDTH, heads, head), row, tile_m, M, queries, WIDTH, D, EVEN)
    m = tile_m + tl.arange(0, M)
    at = shifts + head * queries + m
    tl.store(at, tl.sum(dout.to(tl.float32) * result.to(tl.float32), 1), mask=m < queries)


@triton.jit
def _of_queries(x, tile, M: tl.constexpr, queries, OTHER: tl.constexpr, EVEN: tl.constexpr):
    m = tile + tl.arange(0, M)
    return tl.load(x + m) if EVEN else tl.load(x + m, mask=m < queries, other=OTHER)


@triton.jit
def _keys_kernel(
    grad, q, k, v, bits, logsumexp, shifts, dk, dv, grad_batch, grad_row, grad_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, heads, queries, keys, zero,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys."""
    tile_n, head = _place(keys, N)
    nothing = zero.to(tl.float32)
    n = tile_n + tl.arange(0, N)
    grad, q = _head(grad, grad_batch, grad_head, heads, head), _head(q, q_batch, q_head, heads, head)
    bits = _bits_of_head(bits, queries, keys, head)
    logsumexp, shifts = logsumexp + head * queries, shifts + head * queries
    k_here = _rows(_head(k, k_batch, k_head, heads, head), k_row, tile_n, N, keys, WIDTH, D, EVEN)
    v_here = _rows(_head(v, v_batch, v_head, heads, head), v_row, tile_n, N, keys, WIDTH, D, EVEN)
    dk_sum, dv_sum = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    begin = tile_n // M * M if CAUSAL else 0
    for tile_m in tl.range(begin, queries, M, num_stages=STAGES):
        q_here = _rows(q, q_row, tile_m, M, queries, WIDTH, D, EVEN)
        kept = keeps_across(bits, tile_m, tile_n, queries, M, N, EVEN)
        scores = tl.dot(k_here, tl.trans(q_here))
        # Past the last query a sum without end makes every weight 0.
        sums = _of_queries(logsumexp, tile_m, M, queries, float("inf"), EVEN)
        weights = tl.exp2(scores * SCALE - (sums * _LOG2_E)[None, :])
        if CAUSAL:
            weights = tl.where(n[:, None] <= (tile_m + tl.arange(0, M))[None, :], weights, 0.0)
        dout = _rows(grad, grad_row, tile_m, M, queries, WIDTH, D, EVEN)
        upstream = tl.where(kept, tl.dot(v_here, tl.trans(dout)) * GROWTH, nothing)
        dv_sum = tl.dot(tl.where(kept, weights, nothing).to(dout.dtype), dout, dv_sum)
        shift = _of_queries(shifts, tile_m, M, queries, 0.0, EVEN)
        dk_sum = tl.dot((weights * (upstream - shift[None, :])).to(q_here.dtype), q_here, dk_sum)
    row = heads * WIDTH
    _write_rows(_head(dk, keys * row, WIDTH, heads, head), dk_sum * FACTOR, row, tile_n, N, keys, WIDTH, D)
    _write_rows(_head(dv, keys * row, WIDTH, heads, head), dv_sum * GROWTH, row, tile_n, N, keys, WIDTH, D)


@triton.jit
def _queries_kernel(
    grad, q, k, v, bits, logsumexp, shifts, dq, grad_batch, grad_row, grad_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, heads, queries, keys, zero,
    FACTOR: tl.constexpr, SCALE: tl.constexpr, GROWTH: tl.constexpr, CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of M queries."""
    tile_m, head = _place(queries, M)
    nothing = zero.to(tl.float32)
    m = tile_m + tl.arange(0, M)
    k, v = _head(k, k_batch, k_head, heads, head), _head(v, v_batch, v_head, heads, head)
    bits = _bits_of_head(bits, queries, keys, head)
    q_here = _rows(_head(q, q_batch, q_head, heads, head), q_row, tile_m, M, queries, WIDTH, D, EVEN)
    dout = _rows(_head(grad, grad_batch, grad_head, heads, head), grad_row, tile_m, M, queries, WIDTH, D, EVEN)
    sums = _of_queries(logsumexp + head * queries, tile_m, M, queries, float("inf"), EVEN) * _LOG2_E
    shift = _of_queries(shifts + head * queries, tile_m, M, queries, 0.0, EVEN)
    dq_sum = tl.zeros((M, D), tl.float32)
    end = tl.minimum(tile_m + M, keys) if CAUSAL else keys
    for tile_n in tl.range(0, end, N, num_stages=STAGES):
        keys_here = _rows(k, k_row, tile_n, N, keys, WIDTH, D, EVEN)
        kept = keeps(bits, tile_m, tile_n, queries, M, N, EVEN)
        weights = tl.exp2(tl.dot(q_here, tl.trans(keys_here)) * SCALE - sums[:, None])
        n = tile_n + tl.arange(0, N)
        if CAUSAL:
            weights = tl.where(n[None, :] <= m[:, None], weights, 0.0)
        if not EVEN:  # where there is no key its score is 0, which may be far above all others
            weights = tl.where((n < keys)[None, :], weights, 0.0)
        values_here = _rows(v, v_row, tile_n, N, keys, WIDTH, D, EVEN)
        upstream = tl.where(kept, tl.dot(dout, tl.trans(values_here)) * GROWTH, nothing)
        dq_sum = tl.dot((weights * (upstream - shift[:, None])).to(keys_here.dtype), keys_here, dq_sum)
    row = heads * WIDTH
    _write_rows(_head(dq, queries * row, WIDTH, heads, head), dq_sum * FACTOR, row, tile_m, M, queries, WIDTH, D)


# --- from Python ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionTile:
    """What a program takes at a time: queries, keys, warps, and how many steps are under way."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Those of the forward pass, of the programs for keys and of the programs for queries."""

    forward: AttentionTile
    keys: AttentionTile
    queries: AttentionTile


# For heads of up to 64 features and for wider ones: on an H200 the best of three or four, or within 3%, for 128 to 2048
# positions, causal or not.
NARROW = Tiles(AttentionTile(128, 64, 8, 3), AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 3))
WIDE = Tiles(AttentionTile(64, 64, 4, 3), AttentionTile(64, 128, 8, 3), AttentionTile(128, 64, 8, 3))
SHIFTS = 64  # queries a program


def tiles_for(width: int) -> Tiles:
    """How heads of so many features are worked on."""
    return NARROW if width <= 64 else WIDE


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _as_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _is_even(tile: AttentionTile, queries: int, keys: int) -> bool:
    return queries % tile.queries == 0 and keys % tile.keys == 0


def _constants(tile: AttentionTile, queries: int, keys: int, width: int, causal: bool) -> dict[str, Any]:
    return {
        "CAUSAL": causal, "WIDTH": width, "D": max(16, triton.next_power_of_2(width)), "M": tile.queries,
        "N": tile.keys, "EVEN": _is_even(tile, queries, keys), "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, probability: float, causal: bool, scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``dropout_attention_reference`` in ops/dropout_attention.py. There is at least one query and one key."""
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    q, k, v = map(_as_rows, (q, k, v))
    tile = (tiles or tiles_for(width)).forward
    with on_device_of(q):
        out = buffers.empty(q, (batch, queries, heads, width), q.dtype)
        logsumexp = buffers.empty(q, (batch, heads, queries), torch.float32)
        launch(
            _forward_kernel, triton.cdiv(queries, tile.queries) * batch * heads,
            q, k, v, bits, out, logsumexp, *_strides(q), *_strides(k), *_strides(v), heads, queries, keys, 0,
            SCALE=scale * LOG2_E, GROWTH=65536 / kept_share(probability),
            **_constants(tile, queries, keys, width, causal),
        )  # fmt: skip
    return out, logsumexp


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, logsumexp: Tensor,
    probability: float, causal: bool, scale: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``dropout_attention_backward_reference`` in ops/dropout_attention.py."""
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    grad, q, k, v = map(_as_rows, (grad, q, k, v))
    tiles = tiles or tiles_for(width)
    factors = {"FACTOR": scale, "SCALE": scale * LOG2_E, "GROWTH": 65536 / kept_share(probability)}
    with on_device_of(q):
        shifts = buffers.empty(q, (batch, heads, queries), torch.float32)
        dq, dk, dv = (buffers.empty(q, tuple(x.shape), x.dtype) for x in (q, k, v))
        launch(
            _shifts_kernel, triton.cdiv(queries, SHIFTS) * batch * heads,
            grad, out, shifts, *_strides(grad), heads, queries,
            WIDTH=width, D=max(16, triton.next_power_of_2(width)), M=SHIFTS, EVEN=queries % SHIFTS == 0, num_warps=4,
        )  # fmt: skip
        operands = (grad, q, k, v, bits, logsumexp, shifts)
        sizes = (*_strides(grad), *_strides(q), *_strides(k), *_strides(v), heads, queries, keys, 0)
        launch(
            _keys_kernel, triton.cdiv(keys, tiles.keys.keys) * batch * heads, *operands, dk, dv, *sizes,
            **factors, **_constants(tiles.keys, queries, keys, width, causal),
        )  # fmt: skip
        launch(
            _queries_kernel, triton.cdiv(queries, tiles.queries.queries) * batch * heads, *operands, dq, *sizes,
            **factors, **_constants(tiles.queries, queries, keys, width, causal),
        )  # fmt: skip
    return dq, dk, dv
