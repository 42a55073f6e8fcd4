"""Inputs of producers that come in parts [A, S, G, D]: how their kernels find rows and columns in them.

ops/pointwise.py says what parts are. A tile lies within one run of one part, so that its addresses are those of a
matrix; what that takes is here.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from te_compile.kernels.recording import address_of
from te_compile.ops.pointwise import Spec, grouped, joined

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
        for part, columns in zip(tensors, given.parts, strict=False):
            usable = len(heads) == 1 and part.stride(3) == 1 and part.shape[:2] == tensors[0].shape[:2]
            width = math.gcd(width, columns, part.shape[3]) if usable else 1
    return width & -width


def parts_of(spec: Spec, inputs: list[Tensor]) -> list[Tensor]:
    """All parts [A, S, G, D] of all inputs that come in parts."""
    return [part for given, tensors in grouped(spec, inputs) if given.parts for part in tensors]


def folding(spec: Spec, inputs: list[Tensor], tile_rows: int, flat: bool) -> tuple[dict[str, int | bool], int]:
    """What the kernels find rows and columns of parts by, as constants: see ``corner``, ``part_at`` and ``read_part``.
    And the third dimension of their grid."""
    parts = parts_of(spec, inputs)
    if not parts:
        return {"WHOLE": False, "ALIGNED": False, "HEAD": 0, "HEADS": False}, 1
    widths = {width for given in spec.inputs for width in given.parts}
    turns, length, _, head = parts[0].shape
    alike = all(part.shape[:2] == parts[0].shape[:2] for part in parts)
    whole = alike and not flat and turns <= MOST_TURNS and (turns == 1 or length % tile_rows == 0)
    aligned = all(address_of(part) % LINE == 0 and all(n % LINE == 0 for n in part.stride()[:3]) for part in parts)
    constants = {"WHOLE": whole, "ALIGNED": aligned, "HEAD": head, "HEADS": widths == {head}}
    return constants, turns if whole else 1


def with_parts_joined(spec: Spec, inputs: list[Tensor]) -> tuple[Spec, list[Tensor]]:
    """The same producer, of whole matrices."""
    whole = tuple(dataclasses.replace(given, parts=()) for given in spec.inputs)
    return dataclasses.replace(spec, inputs=whole), [joined(*each) for each in grouped(spec, inputs)]
