"""Packing a mask into bits, in both directions, and listing the tiles that attention has to visit.

Two launches. A program of the first reads 64 queries × 128 keys of the mask once, writes their bits along keys and
along queries, and notes whether it saw nothing, something or all. A program of the second makes one list of those
notes. For 4 × 2048 × 2048 booleans, 17 MB, of which 4 MB are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.launch import launch
from te_compile.ops.mask_tiles import KEYS, QUERIES, STEP, sizes_of, tiles_of

_KEYS, _STEP = tl.constexpr(KEYS), tl.constexpr(STEP)


@triton.jit
def _words(bits, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """int32 [ROWS, COUNT / 32] of 0 and 1 [ROWS, COUNT]: each is another bit of its word, so their sum is the word."""
    apart = tl.reshape(bits, (ROWS, COUNT // 32, 32))
    return tl.sum(apart << tl.arange(0, 32)[None, None, :], axis=2)


@triton.jit
def _pack_kernel(
    mask, rows, columns, kinds, queries, keys, batch_stride, query_stride, key_stride, tiles, steps, BOTH: tl.constexpr
):  # fmt: skip
    tile, step, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query, key = step * _STEP + tl.arange(0, _STEP), tile * _KEYS + tl.arange(0, _KEYS)
    is_query, is_key = query < queries, key < keys
    at = query.to(tl.int64)[:, None] * query_stride + key.to(tl.int64)[None, :] * key_stride
    inside = is_query[:, None] & is_key[None, :]
    seen = (tl.load(mask + batch * batch_stride + at, mask=inside, other=0) != 0).to(tl.int32)
    some = tl.max(tl.max(seen, axis=1), axis=0)
    whole = tl.min(tl.where(is_query, tl.min(seen, axis=1), 1), axis=0)
    tl.store(kinds + (batch * steps + step) * tiles + tile, some + whole)
    word = tile * (_KEYS // 32) + tl.arange(0, _KEYS // 32)
    to = (batch * queries + query)[:, None] * (tiles * (_KEYS // 32)) + word[None, :]
    tl.store(rows + to, _words(seen, _STEP, _KEYS), mask=is_query[:, None] & (word >= 0)[None, :])
    if BOTH:
        word = step * (_STEP // 32) + tl.arange(0, _STEP // 32)
        to = (batch * keys + key)[:, None] * (steps * (_STEP // 32)) + word[None, :]
        tl.store(columns + to, _words(tl.trans(seen), _KEYS, _STEP), mask=is_key[:, None] & (word >= 0)[None, :])


@triton.jit
def _store_list(to, kind, tile, count, place, total):
    """One list: entries at their places, zeros behind, and if nothing is seen tile 0 with its bits."""
    seen = kind > 0
    tl.store(to + 1 + tile, tl.zeros_like(tile), mask=(tile < count) & (tile >= tl.maximum(total, 1)))
    tl.store(to + 1 + place, 2 * tile + (kind != 2).to(tl.int32), mask=seen)
    tl.store(to, tl.maximum(total, 1))
    if total == 0:
        tl.store(to + 1, 1)


@triton.jit
def _list_keys(kinds, to, which, tiles, steps, TILES: tl.constexpr):
    """The tiles of keys of 128 queries, the last first."""
    tile = tl.arange(0, TILES)
    kind = tl.load(kinds + 2 * which * tiles + tile, mask=tile < tiles, other=0)
    more_tiles = tl.where(2 * which + 1 < steps, tiles, 0)
    more = tl.load(kinds + (2 * which + 1) * tiles + tile, mask=tile < more_tiles, other=0)
    # Nothing of both is 0, all of both 2, and whatever lies between is 1.
    kind = tl.where((kind == more) | (tile >= more_tiles), kind, 1)
    seen = (kind > 0).to(tl.int32)
    total = tl.sum(seen, axis=0)
    _store_list(to, kind, tile, tiles, total - tl.cumsum(seen, axis=0), total)


@triton.jit
def _list_steps(kinds, to, which, tiles, steps, STEPS: tl.constexpr):
    """The steps of 64 queries of a tile of keys, the first first."""
    step = tl.arange(0, STEPS)
    kind = tl.load(kinds + step * tiles + which, mask=step < steps, other=0)
    seen = (kind > 0).to(tl.int32)
    _store_list(to, kind, step, steps, tl.cumsum(seen, axis=0) - 1, tl.sum(seen, axis=0))


@triton.jit
def _list_kernel(
    kinds, row_tiles, column_tiles, tiles, steps, row_lists, TILES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    which, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kinds += batch * steps * tiles
    if which < row_lists:
        _list_keys(kinds, row_tiles + (batch * row_lists + which) * (tiles + 1), which, tiles, steps, TILES)
    else:
        which -= row_lists
        _list_steps(kinds, column_tiles + (batch * tiles + which) * (steps + 1), which, tiles, steps, STEPS)


def mask_tiles(mask: Tensor, both: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``mask_tiles_reference`` in ops/mask_tiles.py."""
    batch, queries, keys = mask.shape
    tiles, steps, lists = tiles_of(keys, KEYS), tiles_of(queries, STEP), tiles_of(queries, QUERIES)
    with on_device_of(mask):
        rows, row_tiles, columns, column_tiles = (
            buffers.empty(mask, size, torch.int32) for size in sizes_of(mask, both)
        )
        kinds = buffers.empty(mask, (batch, steps, tiles), torch.int32)
        launch(
            _pack_kernel, (tiles, steps, batch), mask, rows, columns, kinds, queries, keys, *mask.stride(), tiles,
            steps, BOTH=both, num_warps=4,
        )  # fmt: skip
        launch(
            _list_kernel, (lists + (tiles if both else 0), batch), kinds, row_tiles, column_tiles, tiles, steps, lists,
            TILES=triton.next_power_of_2(tiles), STEPS=triton.next_power_of_2(steps), num_warps=4,
        )  # fmt: skip
    return rows, row_tiles, columns, column_tiles
