"""Attention's forward pass with both products in FP8: ops/fp8_attention.py on tensor cores.

Work, for B · H heads of S queries and keys with D features: 4 · B · H · S² · D operations, half of that if causal. For
B = 4, H = 32, S = 2048, D = 128 that is

    275 GFLOP     0.21 ms at 1300 TFLOP/s of FP8          B · H · S² = 537 M exponentials     0.15 ms

of which the second counts 16 exponentials a cycle and multiprocessor; it hides behind the first in part.
``benchmarks/attention.py`` measures it beside PyTorch's own kernels.

A program takes a tile of queries of one head and walks over the keys it sees, in blocks, with a running maximum of the
scores. The maximum is rounded up to a whole number of powers of two, which makes every rescaling exact and the codes
those of the reference (its module says why). Blocks that all queries of the tile see need no mask; those on the
diagonal and the ragged end come last, with one. Tiles with most keys start first.

FP8 tensor cores of Hopper read both operands along the contraction: k is [keys, D] and its product contracts over D,
while that of the values contracts over keys, so they come transposed. The second product promotes its partial sums
to fp32 after each block, for the accumulator inside the tensor core keeps some 14 bits.

Wide loads of the transposed values want the number of keys to be a multiple of 16; with others they are narrow.

On an H200 it takes 0.30 ms for that causal work, and 0.47 without a mask; cuDNN's in bf16 0.27 and 0.42, flash
attention 0.48 and 0.83. The tiles are first choices: others have not been compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.attention_tiles import AttentionTile
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.ops.reach import near

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))
P_EXPONENT = tl.constexpr(8)
NARROWEST = 32  # features: the shortest contraction of FP8 that Triton knows; the rest of a narrower head is zeros


WIDE = AttentionTile(128, 128, 8, 3)
FEW_QUERIES = AttentionTile(64, 128, 4, 3)
SMALL_MEMORY = AttentionTile(128, 64, 8, 2)
WIDE_NEEDS = 120 << 10  # bytes of shared memory, rounded up: Hopper has 227 KB, Ada 99


def tile_for(queries: int, device: torch.device) -> AttentionTile:
    """The tile for so many queries."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        if properties.shared_memory_per_block_optin < WIDE_NEEDS:
            return SMALL_MEMORY
    return FEW_QUERIES if queries <= FEW_QUERIES.queries else WIDE


@triton.jit
def _attended(
    acc, total, largest, codes, k, vt, first, last, row, d, keys, factor, k_row, vt_row,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Result, sum and maximum after the keys from ``first`` to ``last``; ``factor`` makes of scores powers of 2."""
    place = first + tl.arange(0, BLOCK_N)
    k_at = k + place[:, None].to(tl.int64) * k_row + d[None, :]
    vt_at = vt + d[:, None].to(tl.int64) * vt_row + place[None, :]
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            keyed = tl.load(k_at, mask=(n < keys)[:, None] & (d < WIDTH)[None, :], other=0.0)
            values = tl.load(vt_at, mask=(d < WIDTH)[:, None] & (n < keys)[None, :], other=0.0)
        elif WHOLE:
            keyed, values = tl.load(k_at), tl.load(vt_at)
        else:
            keyed = tl.load(k_at, mask=(d < WIDTH)[None, :], other=0.0)
            values = tl.load(vt_at, mask=(d < WIDTH)[:, None], other=0.0)
        scores = tl.dot(codes, tl.trans(keyed)) * factor
        if MASKED:
            seen = (n < keys)[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= row[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(largest, tl.ceil(tl.max(scores, axis=1)))
        p = tl.exp2(scores - (top - P_EXPONENT)[:, None])
        shrunk = tl.exp2(largest - top)
        total = total * shrunk + tl.sum(p, axis=1)
        # A product of its own, added in fp32: as the start of the product, acc would be read in the middle of it, and
        # ptxas then runs all products one after the other. The bound keeps Triton from joining the two again.
        added = tl.dot(p.to(tl.float8e4nv), tl.trans(values), max_num_imprecise_acc=BLOCK_N)
        acc = acc * shrunk[:, None] + added
        largest = top
        k_at += BLOCK_N * k_row
        vt_at += BLOCK_N
    return acc, total, largest


@triton.jit
def _fp8_attention_kernel(
    q, k, vt, q_scale_inv, k_scale_inv, v_scale_inv, out, logsumexp,
    queries, keys, heads, group,
    q_batch, q_row, q_head, k_batch, k_row, k_head, vt_row,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, index = tl.cdiv(queries, BLOCK_M), tl.program_id(0)  # one dimension: a grid's others end at 65535
    tile_m = (tiles - 1 - index % tiles) * BLOCK_M
    batch, head = (index // tiles // heads).to(tl.int64), (index // tiles % heads).to(tl.int64)
    row, d = tile_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + (head // group) * k_head
    vt += (head // group) * WIDTH * vt_row + batch * keys
    within = (row < queries)[:, None] & (d < WIDTH)[None, :]
    codes = tl.load(q + row[:, None].to(tl.int64) * q_row + d[None, :], mask=within, other=0.0)
    factor = tl.load(q_scale_inv) * tl.load(k_scale_inv) * SCALE
    last, clear = keys, keys
    if CAUSAL:
        last, clear = tl.minimum(keys, tile_m + BLOCK_M), tl.minimum(keys, tile_m + 1)
    clear = clear // BLOCK_N * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, total, largest = _attended(
        acc, total, largest, codes, k, vt, 0, clear, row, d, keys, factor, k_row, vt_row,
        False, CAUSAL, WIDTH, BLOCK_N, WIDTH == BLOCK_D,
    )  # fmt: skip
    acc, total, largest = _attended(
        acc, total, largest, codes, k, vt, clear, last, row, d, keys, factor, k_row, vt_row,
        True, CAUSAL, WIDTH, BLOCK_N, WIDTH == BLOCK_D,
    )  # fmt: skip
    result = acc / total[:, None] * tl.load(v_scale_inv)
    out += (batch * queries * heads + head) * WIDTH
    out_at = out + row[:, None].to(tl.int64) * (heads * WIDTH) + d[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=within)
    sums = LN_2 * (largest - P_EXPONENT + tl.log2(total))
    tl.store(logsumexp + (batch * heads + head) * queries + row, sums, mask=row < queries)


def fp8_attention(
    q: Tensor,
    k: Tensor,
    vt: Tensor,
    q_scale_inv: Tensor,
    k_scale_inv: Tensor,
    v_scale_inv: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
    tile: AttentionTile | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, D] and logsumexp [B, H, Sq] of q: [B, Sq, H, D], k: [B, Sk, Hk, D] and vt: [Hk · D, B · Sk …].

    The last dimension of each has stride 1; there is at least one query and one key.
    """
    (batch, queries, heads, width), (_, keys, shared, _) = q.shape, k.shape
    tile, k = tile or tile_for(queries, q.device), near(k, 1)
    with on_device_of(q):
        out = buffers.empty(q, (batch, queries, heads, width), out_dtype)
        logsumexp = buffers.empty(q, (batch, heads, queries), torch.float32)
        launch(
            _fp8_attention_kernel, triton.cdiv(queries, tile.queries) * batch * heads,
            q, k, vt, q_scale_inv, k_scale_inv, v_scale_inv, out, logsumexp,
            queries, keys, heads, heads // shared,
            *q.stride()[:3], *k.stride()[:3], vt.stride(0),
            SCALE=scale * LOG2_E, CAUSAL=causal, WIDTH=width, BLOCK_D=max(NARROWEST, triton.next_power_of_2(width)),
            BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, logsumexp
