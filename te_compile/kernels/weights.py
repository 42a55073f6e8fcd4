"""All weights of a model to FP8 in one launch: q, qᵀ, amax and dequantisation multiplier of each.

Bytes, for N two-byte elements in all: 2·N read, N written for the row-major codes, N for the transposed ones. An H200
copies 4.27 TB/s (read and written bytes together), which allows

    the 201 M weights of a layer of hidden 4096, ffn 16384      805 MB      189 µs
    the 6.7 G of a whole 7B model                               27 GB       6.3 ms

Without scales (or with some still 0) a first launch finds the amaxes and reads 2·N more.

A program takes one tile of one weight. Which one, it reads from a map of tiles; where that weight lies and goes, from
tables of addresses and shapes. Those of shapes are kept (device_tables.py). Addresses of a few weights are parameters
of the launch that clears the amaxes, which writes the table: weights that are gathered for each use (FSDP) lie
elsewhere each time, and so do those of the blocks that share a graph. Loads stay 16 bytes wide because the launcher
checks once that all addresses and row lengths allow it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.device_tables import address_table, table_of_shapes
from te_compile.kernels.launch import launch
from te_compile.kernels.quantize import (
    TRITON_DTYPES,
    fp8_words,
    largest_of_four,
    load_tile,
    record_amax,
    rule_constants,
    scale_from_amax,
    scaled,
    store_tile,
    store_words,
)
from te_compile.kernels.recording import address_of
from te_compile.kernels.tiles import Tile
from te_compile.ops.quantize import padded
from te_compile.ops.weights import SCALE_STRIDE
from te_compile.recipe import ScaleRule

TILE = Tile(128, 128, 8)
# Of a weight's geometry: rows, columns, rows of qᵀ's padding, first tile, where q and qᵀ start, rows and columns of q.
FIELDS = tl.constexpr(8)
NOT_WANTED = -1  # in place of a start
CLEARED = 1024  # amaxes, by a program
FEW = 16  # weights whose addresses are parameters


@triton.jit
def place_of(
    addresses, geometry, index, tile,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Weight ``index``: where it lies, its rows and columns, and the first row and column of its tile ``tile``."""
    weight = tl.load(addresses + index).to(tl.pointer_type(ELEMENT))
    rows = tl.load(geometry + index * FIELDS).to(tl.int32)
    columns = tl.load(geometry + index * FIELDS + 1).to(tl.int32)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        columns = tl.multiple_of(columns, 16)
    across = tl.maximum(tl.cdiv(columns, TILE_COLUMNS), 1)
    return weight, rows, columns, (tile // across) * TILE_ROWS, (tile % across) * TILE_COLUMNS


@triton.jit
def measure_tile(
    program, addresses, geometry, index, amax,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Raise the amax of weight ``index`` to the largest magnitude in tile ``program``."""
    tile = program - tl.load(geometry + index * FIELDS + 3).to(tl.int32)
    weight, rows, columns, tile_m, tile_k = place_of(
        addresses, geometry, index, tile, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS
    )
    word, k = tl.arange(0, TILE_ROWS // 4), tl.arange(0, TILE_COLUMNS)
    first, second, third, fourth = load_tile(weight, tile_m, tile_k, word, k, rows, columns, columns, 1)
    record_amax(amax + index, largest_of_four(first, second, third, fourth))


@triton.jit
def quantize_tile(
    tile, addresses, geometry, index, used, q, qt, scale_inv,
    E5M2: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The codes of tile ``tile`` of weight ``index`` under the scale ``used``; returns its largest magnitude's bits."""
    padded_rows = tl.multiple_of(tl.load(geometry + index * FIELDS + 2).to(tl.int32), 16)
    q_start = tl.load(geometry + index * FIELDS + 4)
    qt_start = tl.load(geometry + index * FIELDS + 5)
    q_rows = tl.load(geometry + index * FIELDS + 6).to(tl.int32)
    q_columns = tl.load(geometry + index * FIELDS + 7).to(tl.int32)
    if ALIGNED:
        q_columns = tl.multiple_of(q_columns, 16)
    if tile == 0:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), used)
        tl.store(scale_inv + 4 * index + tl.arange(0, 4), tl.broadcast_to(inverse, (4,)))
    weight, rows, columns, tile_m, tile_k = place_of(
        addresses, geometry, index, tile, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS
    )
    word, k = tl.arange(0, TILE_ROWS // 4), tl.arange(0, TILE_COLUMNS)
    first, second, third, fourth = load_tile(weight, tile_m, tile_k, word, k, rows, columns, columns, 1)
    largest = largest_of_four(first, second, third, fourth)
    first, second, third, fourth = scaled(first, used), scaled(second, used), scaled(third, used), scaled(fourth, used)
    if q_start >= 0:
        codes = q + tl.multiple_of(q_start, 16)
        store_tile(codes, first, second, third, fourth, tile_m, tile_k, word, k, q_rows, q_columns, E5M2)
    if qt_start >= 0:
        words = fp8_words(first, second, third, fourth, E5M2)
        store_words(qt + tl.multiple_of(qt_start, 16), words, tile_m, tile_k, word, k, q_columns, padded_rows)
    return largest


@triton.jit
def _measure_kernel(
    addresses, geometry, tiles, scales, amax,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(tiles + program)
    given = 0.0
    if scales is not None:
        given = tl.load(scales + index)
    if given <= 0:
        measure_tile(program, addresses, geometry, index, amax, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS)


@triton.jit
def _quantize_kernel(
    addresses, geometry, tiles, scales, q, qt, amax, scale_inv,
    MEASURED: tl.constexpr, TARGET: tl.constexpr, EPSILON: tl.constexpr, POWER_2: tl.constexpr, E5M2: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    index = tl.load(tiles + program)
    tile = program - tl.load(geometry + index * FIELDS + 3).to(tl.int32)
    if scales is None:
        used = scale_from_amax(tl.load(amax + index), TARGET, EPSILON, POWER_2)
    else:
        used = tl.load(scales + index)
        if MEASURED:
            used = tl.where(used > 0, used, scale_from_amax(tl.load(amax + index), TARGET, EPSILON, POWER_2))
    largest = quantize_tile(
        tile, addresses, geometry, index, used, q, qt, scale_inv, E5M2, ELEMENT, ALIGNED, TILE_ROWS, TILE_COLUMNS
    )
    record_amax(amax + index, largest)


@triton.jit
def _clear_kernel(amax, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(amax + place, tl.zeros((BLOCK,), tl.float32), mask=place < count)


@triton.jit(do_not_specialize_on_alignment=[f"weight{at}" for at in range(FEW)])
def _begin_kernel(
    weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7, weight8, weight9, weight10, weight11,
    weight12, weight13, weight14, weight15,
    table, amax, count,
):  # fmt: skip
    weights = (
        weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7, weight8, weight9, weight10, weight11,
        weight12, weight13, weight14, weight15,
    )  # fmt: skip
    for at in tl.static_range(len(weights)):
        if at < count:
            tl.store(table + at, weights[at].to(tl.int64))
            tl.store(amax + at, 0.0)


def _begin(weights: Sequence[Tensor], amax: Tensor) -> Tensor:
    """Clear ``amax``, fp32 [n]; returns int64 [n], the addresses of the weights."""
    count = len(weights)
    if count > FEW:
        launch(_clear_kernel, triton.cdiv(count, CLEARED), amax, count, BLOCK=CLEARED, num_warps=4)
        return address_table(tuple(map(address_of, weights)), amax.device)
    table = buffers.empty(amax, (count,), torch.int64)
    given = [*weights, *[weights[0]] * (FEW - count)]
    launch(_begin_kernel, 1, *given, table, amax, count, num_warps=1)
    return table


def _tile_counts(shapes: Sequence[tuple[int, int]], tile: Tile) -> list[int]:
    """How many programs each weight gets; an empty one gets one, which writes its multiplier."""
    return [max(1, triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)) for rows, columns in shapes]


def geometry_of(
    shapes: Sequence[tuple[int, int]],
    row_starts: Sequence[int],
    column_starts: Sequence[int],
    tile: Tile,
    copies: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """int64 [n, FIELDS]: what the kernels know about each weight besides its address.

    copies: the shapes of the row-major codes, where these are padded up to multiples of 16 and ``shapes`` are not; the
    same tiles cover both.
    """
    lines, first_tile = [], 0
    for (rows, columns), row_start, column_start, count, copy in zip(
        shapes, row_starts, column_starts, _tile_counts(shapes, tile), copies or shapes, strict=True
    ):
        lines.append((rows, columns, padded(rows), first_tile, row_start, column_start, *copy))
        first_tile += count
    return torch.tensor(lines, dtype=torch.int64, device="cpu")


def tile_map(shapes: Sequence[tuple[int, int]], tile: Tile) -> Tensor:
    """int32 [programs]: the weight that each program works on."""
    counts = torch.tensor(_tile_counts(shapes, tile), device="cpu")
    return torch.repeat_interleave(torch.arange(len(shapes), dtype=torch.int32, device="cpu"), counts)


def quantize_weights(
    weights: Sequence[Tensor],
    scales: Tensor | None,
    dtype: torch.dtype,
    row_starts: Sequence[int],
    column_starts: Sequence[int],
    row_length: int,
    column_length: int,
    rule: ScaleRule,
    measure: bool,
    tile: Tile = TILE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FP8 codes of ``weights``, contiguous matrices of one dtype; amax: fp32 [n]; 1 / scale: fp32 [n, 4], see the op.

    The row-major codes of weight i go to ``row_starts[i]`` of a flat tensor of ``row_length``, its transposed codes,
    rows padded to 16, to ``column_starts[i]`` of one of ``column_length``; ``NOT_WANTED`` for neither. Starts are
    multiples of 16, and gaps between weights are not written. scales: fp32 [n] or None; ``measure``: they may be absent
    or 0.
    """
    like, count = weights[0], len(weights)
    device = like.device
    target, epsilon, power_2 = rule_constants(rule, dtype)
    shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
    places = (shapes, tuple(row_starts), tuple(column_starts), tile)
    aligned = all(address_of(weight) % 16 == 0 for weight in weights)
    constants = {
        "ELEMENT": TRITON_DTYPES[like.dtype],
        "ALIGNED": aligned and all(columns % 16 == 0 for _, columns in shapes),
        "TILE_ROWS": tile.rows,
        "TILE_COLUMNS": tile.columns,
        "num_warps": tile.warps,
    }
    with on_device_of(like):
        q = buffers.empty(like, (row_length,), dtype)
        qt = buffers.empty(like, (column_length,), dtype)
        amax = buffers.empty(like, (count,), torch.float32)
        scale_inv = buffers.empty(like, (count, SCALE_STRIDE), torch.float32)
        geometry = table_of_shapes(("geometry", *places), lambda: geometry_of(*places), device)
        tiles = table_of_shapes(("tiles", shapes, tile), lambda: tile_map(shapes, tile), device)
        grid = tiles.numel()
        table = _begin(weights, amax)
        if measure:
            launch(_measure_kernel, grid, table, geometry, tiles, scales, amax, **constants)
        launch(
            _quantize_kernel, grid,
            table, geometry, tiles, scales, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv,
            MEASURED=measure, TARGET=target, EPSILON=epsilon, POWER_2=power_2, E5M2=dtype == torch.float8_e5m2,
            **constants,
        )  # fmt: skip
    return q, qt, amax, scale_inv
