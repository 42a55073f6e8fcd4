"""Producers: a Triton kernel written from a spec (pointwise_source.py), which computes z, casts it and never stores it.

Bytes, for z [M, K] from n inputs [M, K] of two-byte elements: 2·n·M·K read, M·K written for q, M·K for qᵀ, and 2·M·K
for a value that is emitted. An H200 copies 4.27 TB/s (read and written bytes together), which allows

                          activation (n = 1)       its backward, a gate (n = 2)      gate backward (n = 3)
    8192 × 4096           134 MB     31 µs         201 MB     47 µs                  268 MB     63 µs
    8192 × 16384          537 MB    126 µs         805 MB    189 µs                 1074 MB    252 µs

That is about 28 instructions an element for n = 1: less than an accurate tanh or erf costs, hence the forms of
pointwise_functions.py and spellings.py, which are as accurate as fp32 in bulk needs (a few units in the last place) and
no more. ``python -m benchmarks.instructions`` counts them.

Column sums leave the kernel as one partial row per tile and are added up afterwards in a fixed order, so they are the
same in every run.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
import triton
from torch import Tensor

from te_compile.kernels import buffers
from te_compile.kernels.buffers import on_device_of
from te_compile.kernels.column_sums import added_up
from te_compile.kernels.launch import launch
from te_compile.kernels.pointwise_parts import common_width, folding, with_equal_heads, with_parts_joined
from te_compile.kernels.pointwise_pieces import piece_arguments
from te_compile.kernels.pointwise_source import kernels
from te_compile.kernels.programmatic import may_next_begin
from te_compile.kernels.quantize import rule_constants
from te_compile.kernels.tiles import Tile, Work, alone, choose
from te_compile.ops.partial_sums import ROWS
from te_compile.ops.pieces import period_of, tensors_of
from te_compile.ops.pointwise import Place, Spec, extent, grouped
from te_compile.ops.quantize import padded
from te_compile.ops.reach import MOST_COLUMNS, MOST_ROWS, is_within_reach, near
from te_compile.recipe import ScaleRule

# 32 elements a thread, and runs of 64 bytes in qᵀ; with twice as many elements the chains run out of registers. Held to
# 64 of these a multiprocessor has room for 32 warps. On an H200 the best of nine, or within 1%, for activations and for
# gates, at 90% of a copy's bandwidth for GELU of 8192 × 16384 and 96% for SwiGLU.
TILE = Tile(64, 128, 8, registers=64)
# Where more is read or columns are summed: a sum ends in an exchange between all warps of a program. On an H200 the
# best of fourteen, or within 1%: the backward of GELU with its bias gradient takes 210 µs for 8192 × 16384, and 217
# with the 72 registers that it would like; a cast with sums 157, and by tiles of 32 × 64 with two warps 188.
DENSE = Tile(64, 64, 4, registers=64)
# Where two values are quantised, which are twice as many codes to hold.
PAIRED = Tile(64, 64, 8)


# What may be faster elsewhere.
OTHERS = (
    *(TILE, DENSE, PAIRED),
    *(Tile(64, 64, 4), Tile(64, 64, 2), Tile(64, 128, 8), Tile(64, 64, 8, registers=64), Tile(64, 128, 4)),
    *(Tile(32, 64, 2), Tile(32, 128, 4), Tile(128, 64, 8)),
)


def tile_for(spec: Spec) -> Tile:
    """How much a program does."""
    if spec.second:
        return PAIRED
    if spec.tensors_in_pieces and not spec.sums and _fits_heads(spec, TILE.columns):
        return TILE  # a head of 128 is read twice, the second time out of the L1: 5 µs less for 8192 × 4096 on an H200
    matrices = sum(given.place is Place.FULL for given in spec.inputs)
    return DENSE if spec.sums or matrices > 1 else TILE


def _fits_heads(spec: Spec, columns: int) -> bool:
    """Does a tile never reach across heads?"""
    return all(period_of(given.pieces) % columns == 0 for given in spec.inputs if given.pieces)


def _adds_alike(tile: Tile, other: Tile) -> bool:
    """Are columns added up in the same order? Which rows a thread adds, and in which order threads and warps exchange
    their sums, follows from all that a tile says but its registers."""
    return dataclasses.replace(tile, registers=None) == dataclasses.replace(other, registers=None)


def _work(
    inputs: list[Tensor], spec: Spec, dtype: torch.dtype, layouts: list[tuple[bool, bool]], unknown: bool
) -> Work:
    """What a launch does, for who chooses its tile; ``unknown``: does it find a scale itself?"""
    others = [tile for tile in OTHERS if not spec.sums or _adds_alike(tile, tile_for(spec))]
    return Work(inputs, (spec.text(), dtype, layouts, unknown), others)


Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, qᵀ, amax and 1 / scale of a matrix."""

MOST_ROWS_OF_PROGRAMS = 65535  # that one launch may have

NARROWEST = 32  # columns of a tile: below it, parts are joined before


def _kernel_arguments(spec: Spec, inputs: list[Tensor], rows: int) -> list[Tensor | int]:
    """Each input as pointer, stride over rows, stride over columns, 0 where it does not vary.

    An input in parts [A, S, G, D]: of each part pointer and strides over A, S and G; then S. The tensors that come in
    pieces stand behind all others.
    """
    arguments: list[Tensor | int] = []
    in_pieces: dict[int, Tensor] = {}
    for given, tensors in grouped(spec, inputs):
        in_pieces.update(zip(tensors_of(given.pieces), tensors, strict=False))
        if given.pieces or given.span:
            continue
        x = tensors[0]
        if given.parts:
            for part in tensors:
                arguments += [_bytes(part), *part.stride()[:3]]
            arguments.append(x.shape[1])
        else:
            stride_m = x.stride(0) if given.place in (Place.FULL, Place.COLUMN) else 0
            stride_k = x.stride(-1) if given.place in (Place.FULL, Place.ROW) else 0
            arguments += [_bytes(x), stride_m, stride_k]
    for x in in_pieces.values():
        arguments += piece_arguments(_bytes(x), rows)
    return arguments


def _bytes(x: Tensor) -> Tensor:
    """``x`` as Triton takes it, which knows truths as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _near(x: Tensor) -> Tensor:
    """``x``, or a copy if its rows or columns are out of a tile's reach. Of [A, S, G, D] a tile has several of S and D
    alone, and those of D lie together where it reads them in place."""
    return near(x, *{2: (0, 1), 4: (1,)}.get(x.dim(), ()))


def _programs(across: int, down: int, flat: bool, turns: int) -> int | tuple[int, ...]:
    """The programs of a launch, one a tile. turns: the third dimension of their grid."""
    if flat:
        return max(1, across * down)
    return (max(1, across), max(1, down)) if turns == 1 else (across, down // turns, turns)


def fused_quantize(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
    partial_sums: bool = False,
) -> list[Tensor]:
    """[q, qᵀ, amax, 1 / scale, emitted …, sums …] of ``spec``. ``measure``: the scale may be absent or 0.

    inputs: on one device, shaped and typed as the spec declares them, any strides.
    """
    return _produced(inputs, [scale], spec, dtype, [(rowwise, columnwise)], rule, measure, tile, partial_sums)


def fused_quantize_pair(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: list[tuple[bool, bool]],
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
) -> list[Tensor]:
    """[q, qᵀ, amax, 1 / scale] of the first value of ``spec`` and then of the second. ``measure``: a scale may be
    absent or 0. layouts: of each value, whether q and qᵀ are wanted. See :func:`fused_quantize` for the rest."""
    return _produced(inputs, scales, spec, dtype, layouts, rule, measure, tile)


def fused_quantize_cat(
    inputs: list[Tensor],
    scale: Tensor | None,
    spec: Spec,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None = None,
) -> list[Tensor]:
    """[q, qᵀ, amax, 1 / scale, sums …] of the two values of ``spec`` beside each other, as one matrix. ``measure``: the
    scale may be absent or 0. See :func:`fused_quantize` for the rest."""
    layouts = [(rowwise, columnwise)] * 2
    return _produced(inputs, [scale, scale], spec, dtype, layouts, rule, measure, tile, beside=True)


def _produced(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: list[tuple[bool, bool]],
    rule: ScaleRule,
    measure: bool,
    tile: Tile | None,
    partial_sums: bool = False,
    beside: bool = False,
) -> list[Tensor]:
    rows, columns = extent(spec, inputs)
    wide = columns * (1 + beside)
    if not is_within_reach(rows, wide):
        raise ValueError(f"a producer's matrix is {rows} x {wide}, not at most {MOST_ROWS} x {MOST_COLUMNS}")
    inputs = with_equal_heads(spec, list(map(_near, inputs)))
    if measure and not tile and not beside and (whole := _alone(spec, layouts, rows, columns)):
        return _produced_alone(inputs, scales, spec, dtype, layouts, rule, whole)
    tile = tile or choose(tile_for(spec), lambda: _work(inputs, spec, dtype, layouts, None in scales))
    if partial_sums:
        tile = dataclasses.replace(tile, rows=ROWS)
    common = common_width(spec, inputs)
    if 0 < common < NARROWEST:
        spec, inputs = with_parts_joined(spec, inputs)
    elif 0 < common < tile.columns:
        tile = dataclasses.replace(tile, columns=common)
    x, module = inputs[0], kernels(spec)
    tiles_m, across = max(1, triton.cdiv(rows, tile.rows)), triton.cdiv(columns, tile.columns)
    target, epsilon, power_2 = rule_constants(rule, dtype)
    even = rows % tile.rows == 0 and columns % tile.columns == 0
    # Of a rectangle of programs each knows its tile without dividing, but it may not be deeper than that.
    flat = tiles_m > MOST_ROWS_OF_PROGRAMS
    constants, turns = folding(spec, inputs, tile.rows, flat)
    programs = _programs(across, tiles_m, flat, turns)
    shape = {"EVEN": even, **constants, "FLAT": flat, "ROWS": tile.rows, "COLUMNS": tile.columns}
    shape["num_warps"] = tile.warps
    if tile.registers is not None:
        shape["maxnreg"] = tile.registers
    arguments = _kernel_arguments(spec, inputs, rows)
    flags: dict[str, int] = dict(
        zip(("ROWWISE", "COLUMNWISE", "ROWWISE2", "COLUMNWISE2"), itertools.chain(*layouts), strict=False)
    )
    if spec.second:
        flags["BESIDE"] = 2 if beside else 1
    with on_device_of(x):
        together = layouts[:1] if beside else layouts
        made = [buffers.quantized(x, rows, wide, dtype, *wanted, n) for n, wanted in enumerate(together)]
        quantized = _halves(*made[0], columns) if beside else made
        emitted = [buffers.empty(x, (rows, columns), result.dtype) for result in spec.emitted]
        partials = [buffers.empty(x, (tiles_m, columns), torch.float32) for _ in spec.sums]
        if measure:
            amaxes = itertools.chain(*((scale, of[2]) for scale, of in zip(scales, quantized, strict=True)))
            launch(module.measure, programs, *arguments, *amaxes, rows, columns, **shape)
        written: list[Tensor | None] = []
        for scale, (q, qt, amax, scale_inv) in zip(scales, quantized, strict=True):
            written += (scale, q.view(torch.uint8), qt.view(torch.uint8), amax, scale_inv)
        launch(
            module.produce, programs, *arguments, *emitted, *partials,
            *written, rows, columns, padded(rows) // 4,
            MEASURED=measure, TARGET=target, EPSILON=epsilon, POWER_2=power_2,
            E5M2=dtype == torch.float8_e5m2, **flags, **shape, NEXT=may_next_begin(x, rows),
        )  # fmt: skip
        if partial_sums:
            return [*itertools.chain(*made), *emitted, *partials]
        sums = [added_up([partial], [given.dtype])[0] for partial, given in zip(partials, spec.sums, strict=True)]
    return [*itertools.chain(*made), *emitted, *sums]


def _halves(q: Tensor, qt: Tensor, amax: Tensor, scale_inv: Tensor, columns: int) -> list[Quantized]:
    """The memory of each of two matrices of so many columns that lie beside each other, of one amax and scale."""

    def half(x: Tensor, dim: int, first: int) -> Tensor:  # an index would ask for a device, which a rehearsal has not
        return x.narrow(dim, first, columns) if x.dim() == 2 else x

    return [(half(q, 1, first), half(qt, 0, first), amax, scale_inv) for first in (0, columns)]


def _alone(spec: Spec, layouts: list[tuple[bool, bool]], rows: int, columns: int) -> Tile | None:
    """The tile of a program that computes all of it; None where that is too much, or wants what only tiles have."""
    in_runs = any(given.parts or given.pieces or given.span for given in spec.inputs)
    return None if in_runs or spec.sums or any(columnwise for _, columnwise in layouts) else alone(rows, columns)


def _produced_alone(
    inputs: list[Tensor],
    scales: list[Tensor | None],
    spec: Spec,
    dtype: torch.dtype,
    layouts: list[tuple[bool, bool]],
    rule: ScaleRule,
    tile: Tile,
) -> list[Tensor]:
    """What ``_produced`` returns, by one program (kernels/alone.py)."""
    rows, columns = extent(spec, inputs)
    target, epsilon, power_2 = rule_constants(rule, dtype)
    flags = dict(zip(("ROWWISE", "ROWWISE2"), (rowwise for rowwise, _ in layouts), strict=False))
    constants, _ = folding(spec, inputs, tile.rows, False)
    x = inputs[0]
    with on_device_of(x):
        quantized = [
            buffers.quantized(x, rows, columns, dtype, *wanted, n, cleared=False) for n, wanted in enumerate(layouts)
        ]
        emitted = [buffers.empty(x, (rows, columns), result.dtype) for result in spec.emitted]
        written: list[Tensor | None] = []
        for scale, (q, _, amax, scale_inv) in zip(scales, quantized, strict=True):
            written += (scale, q.view(torch.uint8), amax, scale_inv)
        launch(
            kernels(spec).alone, 1, *_kernel_arguments(spec, inputs, rows), *emitted, *written, rows, columns,
            TARGET=target, EPSILON=epsilon, POWER_2=power_2, E5M2=dtype == torch.float8_e5m2, **flags,
            EVEN=(rows, columns) == (tile.rows, tile.columns), **constants, FLAT=False,
            ROWS=tile.rows, COLUMNS=tile.columns, NEXT=may_next_begin(x, rows), num_warps=tile.warps,
        )  # fmt: skip
    return [*itertools.chain(*quantized), *emitted]
