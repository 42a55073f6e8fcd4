"""Inputs of producers whose columns are moved within a head: how their kernels find them.

ops/pieces.py says what pieces are. A tile lies within one head of one tensor, so which tensor it reads, and where that
starts, is said once for all of it. Which column of the head comes from where is said once as well if the tile lies
within one piece, as tiles of 64 columns do for heads of 128. Otherwise each column has its own answer, and vectors
of eight columns, 16 bytes of bf16, still have one in common.

Bytes, for a rotation z [M, K] of two-byte elements: 2·M·K read, and M·K written for each of q and qᵀ, as for any
activation (kernels/pointwise.py): 134 MB for 8192 × 4096, 31 µs on an H200. Each element is read twice, at two columns
of one head, and cos and sin once for each head, but programs of one head and of neighbouring ones run side by side: the
second read, and all but the first of a table, are the L2's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from te_compile.kernels.pointwise_functions import part_rows, read
from te_compile.ops.pieces import Piece, Span, letter_of, period_of, rows_of


def piece_parameters(tensor: int) -> list[str]:
    """The names by which kernels get a tensor that comes in pieces: see ``piece_arguments``."""
    return [f"of_{letter_of(tensor)}{end}" for end in ("", "_a", "_s", "_g", "_length")]


def piece_arguments(tensor: Tensor, rows: int) -> list[Tensor | int]:
    """A tensor [A or 1, S or 1, G or 1, D], its strides over A, S and G, and S.

    What has no such dimension is found in one place, with stride 0.
    """
    strides = [stride if size != 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [tensor, *strides[:3], rows_of(tensor, rows)[1]]


def runs_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where the columns of one tensor begin after those of another, and which tensor begins there."""
    runs: list[tuple[int, int]] = []
    start = 0
    for piece in pieces:
        if piece.tensor is not None and (not runs or runs[-1][1] != piece.tensor):
            runs.append((start if runs else 0, piece.tensor))
        start += piece.width
    return runs


def widest_tile(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> int:
    """The most columns that divide a head and what is read of each tensor in it; 1 if columns do not lie side by
    side."""
    if any(tensor.stride(3) != 1 for tensor in tensors):
        return 1
    return math.gcd(period_of(pieces), *(start for start, _ in runs_of(pieces)))


def piece_text(x: str, pieces: Sequence[Piece], of_heads: bool) -> list[str]:
    """The statements that find a tile: where its heads are, which columns it reads of them and which are wanted."""
    period = period_of(pieces)
    lines = [f"{x}_turn, {x}_column = tile_k.to(tl.int32) // {period}, tile_k.to(tl.int32) % {period}"]
    runs = runs_of(pieces)
    for name, end in (("at", ""), *((end, f"_{end}") for end in ("a", "s", "length", *"g" * of_heads))):
        values = [(start, f"of_{letter_of(tensor)}{end}") for start, tensor in runs]
        lines.append(f"{x}_{name} = {_chosen(f'{x}_column', values)}")
    if of_heads:
        lines.append(f"{x}_at += {x}_turn.to(tl.int64) * {x}_g")
    finest, moves, wanted = _moves(pieces)
    lines.append(f"{x}_place = in_head({x}_column, k, {finest}, COLUMNS)")
    lines.append(f"{x}_columns = columns_from({x}_column + {_chosen(f'{x}_place', moves)}, k, {finest})")
    if len(wanted) > 1:
        lines.append(f"{x}_wanted = {_chosen(f'{x}_place', wanted)}")
    return lines


def _moves(pieces: Sequence[Piece]) -> tuple[int, list[tuple[int, str]], list[tuple[int, str]]]:
    """What all beginnings of pieces, and what is added to columns, are multiples of; what is added from which column
    of z on, and from which on columns are wanted."""
    moves: list[tuple[int, str]] = []
    wanted: list[tuple[int, str]] = []
    finest, start = period_of(pieces), 0
    for piece in pieces:
        finest = math.gcd(finest, start)
        if piece.tensor is not None:
            move = piece.start - start
            finest = math.gcd(finest, move)
            if not moves or moves[-1][1] != str(move):
                moves.append((start if moves else 0, str(move)))
        if not wanted or wanted[-1][1] != str(piece.tensor is not None):
            wanted.append((start, str(piece.tensor is not None)))
        start += piece.width
    return finest, moves, wanted


def _chosen(column: str, values: list[tuple[int, str]]) -> str:
    """The last of ``values`` that begins at ``column`` or before."""
    text = values[0][1]
    for start, value in values[1:]:
        text = f"tl.where({column} < {start}, {text}, {value})"
    return text


def read_text(x: str, pieces: Sequence[Piece]) -> str:
    """The expression that reads a tile, after the statements of ``piece_text``."""
    wanted = f"{x}_wanted" if any(piece.tensor is None for piece in pieces) else None
    rows = f"{x}_a, {x}_s, {x}_length, tile_m, tile_a, tile_s, m"
    return f"read_pieces({x}_at, {rows}, {x}_columns, {wanted}, in_rows, EVEN, WHOLE, ALIGNED)"


def span_text(span: Span) -> str:
    """The truth of a span."""
    return f"in_span(tile_k, k, {span.start}, {span.stop}, {span.period}, COLUMNS)"


@triton.jit
def in_head(column, k, FINEST: tl.constexpr, COLUMNS: tl.constexpr):
    """Which column of the head each is, or, where all columns of a tile share the answer, the first."""
    if FINEST % COLUMNS == 0:
        return column
    else:
        return columns_from(column, k, FINEST)


@triton.jit
def columns_from(first, k, FINEST: tl.constexpr):
    """Columns ``first`` + ``k``, of which each vector lies side by side. Triton has to be told, up to 3.6 where masks
    follow as well, and where the sum is made: of a function's argument it forgets it."""
    columns = first + k
    if FINEST % 8 == 0:
        columns = tl.max_contiguous(tl.multiple_of(columns, 8), 8)
    return columns


@triton.jit
def in_span(tile_k, k, START: tl.constexpr, STOP: tl.constexpr, PERIOD: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether the columns of a tile lie in a span: one truth for the tile if there is one, or [1, COLUMNS]."""
    if START % COLUMNS == 0 and STOP % COLUMNS == 0 and PERIOD % COLUMNS == 0:
        column = tile_k.to(tl.int32) % PERIOD
        return (column >= START) & (column < STOP)
    else:
        columns = (tile_k.to(tl.int32) + k) % PERIOD
        return ((columns >= START) & (columns < STOP))[None, :]


@triton.jit
def read_pieces(
    x, stride_a, stride_s, length, tile_m, tile_a, tile_s, m, columns, wanted, in_rows,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of the head that starts at ``x``: its ``columns``, where they are ``wanted``, else 0. None: all are.

    All columns are inside of the matrix: a tile is never wider than a head.
    """
    rows = part_rows(x, stride_a, stride_s, length, tile_m, tile_a, tile_s, m, WHOLE, ALIGNED)
    at, inside = rows[:, None] + columns[None, :], in_rows[:, None]
    if wanted is None:
        return read(at, inside, EVEN)
    else:
        wanted = tl.broadcast_to(wanted, columns.shape)[None, :]
        if not EVEN:
            wanted &= inside
        return tl.load(at, mask=wanted, other=0)
