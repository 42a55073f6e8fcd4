"""Tiles of attention: how large they are, which of them a program walks over, and how they are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from te_compile.ops.dropout_bits import words_of
from te_compile.ops.reach import MOST_WORDS, near


@triton.jit
def rows_of(x, stride, tile, ROWS: tl.constexpr, length, WIDTH: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr):
    """Rows of one head, [ROWS, D]; 0 past its length and its WIDTH."""
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    at = x + tl.cast(tile, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    if EVEN and WIDTH == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=(tile + row < length)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def write_rows(x, value, stride, tile, ROWS: tl.constexpr, length, WIDTH: tl.constexpr, D: tl.constexpr):
    """Write [ROWS, D] to rows of one head, up to its length and its WIDTH."""
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (tile + row < length)[:, None] & (d < WIDTH)[None, :]
    at = x + tl.cast(tile, tl.int64) * stride + (row[:, None] * stride + d[None, :])
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def place(length, TILE: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Where this program's tile begins, and which of all heads it is of. A grid's other dimensions end at 65535."""
    tiles, index = tl.cdiv(length, TILE), tl.program_id(0)
    tile = index % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile * TILE, (index // tiles).to(tl.int64)


@triton.jit
def keys_to_walk(tile_m, keys, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, APART: tl.constexpr):
    """Those that a query of the tile sees, or of them, if the others stand apart, those that not every query sees."""
    first, last = 0, keys
    if CAUSAL:
        last = tl.minimum(tile_m + M, keys)
    if APART:
        first = (tile_m + 1) // N * N
    return first, last


@triton.jit
def head_of(x, stride_batch, stride_head, heads, index):
    """Where one of all heads begins."""
    return x + index // heads * stride_batch + index % heads * stride_head


@triton.jit
def bits_of_head(bits, queries, keys, index):
    """Where the bits of one of all heads begin."""
    return bits + index * queries * (2 * tl.cdiv(keys, 64))


@dataclass(frozen=True)
class AttentionTile:
    """What a program takes at a time: queries, keys, warps, and how many steps are under way.

    apart: in causal attention a loop for what needs a mask and one for what needs none. It spares the others the mask
    and fills the pipeline twice.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    apart: bool = False


@dataclass(frozen=True)
class Tiles:
    """Those of the forward pass, of the programs for keys and of the programs for queries."""

    forward: AttentionTile
    keys: AttentionTile
    queries: AttentionTile


# For heads of up to 64 features and for wider ones: of five or more tiles that were tried for each on an H200, those
# that take the least for full and causal attention together, or within 3% of that, with 1024 and 2048 positions.
NARROW = Tiles(AttentionTile(128, 64, 4, 3, True), AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 3))
WIDE = Tiles(AttentionTile(64, 64, 4, 3, True), AttentionTile(64, 128, 8, 3, True), AttentionTile(128, 64, 8, 3, True))


def tiles_for(width: int) -> Tiles:
    """How heads of so many features are worked on."""
    return NARROW if width <= 64 else WIDE


def strides(x: Tensor) -> tuple[int, int, int]:
    """Those of batch, row and head, of [B, S, H, D]."""
    return x.stride(0), x.stride(1), x.stride(2)


def as_rows(x: Tensor) -> Tensor:
    """``x``, or a copy if the features of a head do not lie side by side, or rows out of a tile's reach."""
    return near(x if x.stride(3) == 1 else x.contiguous(), 1)


def _is_even(tile: AttentionTile, queries: int, keys: int) -> bool:
    return queries % tile.queries == 0 and keys % tile.keys == 0


def constants(tile: AttentionTile, queries: int, keys: int, width: int, causal: bool) -> dict[str, Any]:
    """The kernels' constants."""
    if words_of(keys) * queries > MOST_WORDS:
        raise ValueError(f"the bits of {queries} × {keys} weights are beyond what offsets of 32 bits reach")
    return {
        "CAUSAL": causal, "APART": causal and tile.apart, "WIDTH": width, "D": max(16, triton.next_power_of_2(width)),
        "M": tile.queries, "N": tile.keys, "EVEN": _is_even(tile, queries, keys), "STAGES": tile.stages,
        "num_warps": tile.warps,
    }  # fmt: skip
