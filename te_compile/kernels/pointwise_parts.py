"""Inputs of producers that come in parts [A, S, G, D]: how their kernels find rows and columns in them.

ops/pointwise.py says what parts are. A tile lies within one run of one part, so that its addresses are those of a
matrix; what that takes is here.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from te_compile.kernels.pointwise_pieces import widest_tile
from te_compile.kernels.recording import address_of
from te_compile.ops.pieces import rows_of
from te_compile.ops.pointwise import Input, Place, Spec, extent, grouped, joined

MOST_TURNS = 65535  # the third dimension of a grid
LINE = 16  # bytes that are loaded at once


def part_text(x: str, widths: tuple[int, ...]) -> list[str]:
    """Which part a tile's columns are of, and where they start in it: a tile is never of two.

    Every program does all of it before its first load, so it divides by constants alone, in 32 bits.
    """
    lines = [f"{x}_turn, {x}_column = tile_k.to(tl.int32) // {sum(widths)}, tile_k.to(tl.int32) % {sum(widths)}"]
    start = 0
    for part, width in enumerate(widths):
        p = f"{x}p{part}"
        of_part = {
            "at": p,
            **{end: f"{p}_{end}" for end in "asg"},
            "first": f"{x}_column - {start}",
            "within": f"{x}_turn * {width} + {x}_column - {start}",
        }
        for name, value in of_part.items():
            chosen = f"tl.where({x}_column < {start}, {x}_{name}, {value})" if part else value
            lines.append(f"{x}_{name} = {chosen}")
        start += width
    return [*lines, f"{x}_at = part_at({x}_at, {x}_g, {x}_turn, {x}_first, {x}_within, HEAD, HEADS)"]


def common_width(spec: Spec, inputs: list[Tensor]) -> int:
    """The most columns that a tile may have, so that it lies within one run of each part; 0 for no limit, and 1 where
    parts cannot be read as they lie: they must agree on D for all."""
    width, heads = 0, {part.shape[3] for part in parts_of(spec, inputs)}
    for given, tensors in grouped(spec, inputs):
        if given.pieces:
            width = math.gcd(width, widest_tile(given.pieces, tensors))
        for part, columns in zip(tensors, given.parts, strict=False):
            usable = len(heads) == 1 and part.stride(3) == 1 and part.shape[:2] == tensors[0].shape[:2]
            width = math.gcd(width, columns, part.shape[3]) if usable else 1
    return width & -width


def with_equal_heads(spec: Spec, inputs: list[Tensor]) -> list[Tensor]:
    """``inputs`` with parts seen as heads of one width, as far as they can be: a part that one tensor after another is
    written by may be one wide head, or narrow ones side by side, beside others that permute theirs. It is the same
    memory."""
    parts = parts_of(spec, inputs)
    width = math.gcd(*(part.shape[3] for part in parts))
    if all(part.shape[3] == width for part in parts):
        return inputs
    seen = {id(part): _in_heads(part, width) for part in parts}
    return [seen.get(id(x), x) for x in inputs]


def _in_heads(part: Tensor, width: int) -> Tensor:
    """[A, S, G, D] as [A, S, G · D / width, width], if its heads lie side by side, or are one."""
    a, s, heads, wide = part.shape
    together = part.stride(3) == 1 and (heads == 1 or part.stride(2) == wide)
    if wide == width or not together:
        return part
    strides = (*part.stride()[:2], width, 1)
    return part.as_strided((a, s, heads * (wide // width), width), strides)


def parts_of(spec: Spec, inputs: list[Tensor]) -> list[Tensor]:
    """All parts [A, S, G, D] of all inputs that come in parts."""
    return [part for given, tensors in grouped(spec, inputs) if given.parts for part in tensors]


def _by_heads(spec: Spec, inputs: list[Tensor]) -> list[Tensor]:
    """All tensors [A, S, G, D], of inputs in parts and in pieces; A, S and G of the latter may be 1."""
    return [x for given, tensors in grouped(spec, inputs) if given.parts or given.pieces for x in tensors]


def folding(spec: Spec, inputs: list[Tensor], tile_rows: int, flat: bool) -> tuple[dict[str, int | bool], int]:
    """What the kernels find rows and columns of parts by, as constants: see ``corner``, ``part_at`` and ``read_part``.
    And the third dimension of their grid."""
    by_heads = _by_heads(spec, inputs)
    if not by_heads:
        return {"WHOLE": False, "ALIGNED": False, "HEAD": 0, "HEADS": False}, 1
    widths = {width for given in spec.inputs for width in given.parts}
    head = next((part.shape[3] for part in parts_of(spec, inputs)), 0)
    rows, _ = extent(spec, inputs)
    folds = {rows_of(x, rows) for x in by_heads if x.shape[0] * x.shape[1] != 1}
    turns, length = min(folds, default=(1, rows))
    whole = len(folds) <= 1 and not flat and turns <= MOST_TURNS and (turns == 1 or length % tile_rows == 0)
    constants = {"WHOLE": whole, "ALIGNED": all(map(_is_aligned, by_heads)), "HEAD": head, "HEADS": widths == {head}}
    return constants, turns if whole else 1


def _is_aligned(x: Tensor) -> bool:
    """Does each row of each head start on a multiple of 16 bytes? Strides over a single index are no matter."""
    return address_of(x) % LINE == 0 and all(
        n % LINE == 0 for size, n in zip(x.shape[:3], x.stride(), strict=False) if size != 1
    )


def with_parts_joined(spec: Spec, inputs: list[Tensor]) -> tuple[Spec, list[Tensor]]:
    """The same producer, of whole matrices."""
    found = grouped(spec, inputs)
    whole = [given if given.span else Input(given.dtype, _joined_place(given)) for given, _ in found]
    made = [joined(*each, *extent(spec, inputs)) for each in found if not each[0].span]
    return dataclasses.replace(spec, inputs=tuple(whole)), made


def _joined_place(given: Input) -> Place:
    return Place.FULL if given.pieces else given.place
