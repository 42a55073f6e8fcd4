"""Inputs of a producer whose columns are moved within a head.

A rotary embedding adds to each column of a head another one, half a head away. In the text of a spec such an input says
where each column of a head comes from (te_compile.ops.pointwise has the rest of the language)::

    x0: bfloat16[M, K of a[32:64] + a[0:32]]     in each 64 columns of z: columns 32 to 63 of a head, then 0 to 31
    x1: bfloat16[M, D of b[0:32] + 32 unread]    the same for every head; the last 32 columns nobody looks at, here 0
    x2: bool[columns 0:32 of 64]                 true in the first 32 of each 64 columns; it is given no tensor
    x3: bfloat16[M, K of a[0:64]]                the first tensor again, where its columns are; it is given once

The tensors a, b, … are [A, S, G, D] with any strides, M = A · S rows and G heads; how wide their heads are is theirs to
say. Of what is the same for every head, A, S and G may also be 1: cos and sin are [1, S, 1, D]. Each is given once, in
the order of their names, which is that of the inputs.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TENSORS = 26
_PIECE = re.compile(r"([a-z])\[(\d+):(\d+)\]|(\d+) unread")


@dataclass(frozen=True)
class Piece:
    """Some columns of a head of z: columns ``start`` and following of a tensor, by its number; unread if None."""

    tensor: int | None
    start: int
    width: int

    def text(self) -> str:
        """``a[32:64]``."""
        if self.tensor is None:
            return f"{self.width} unread"
        return f"{letter_of(self.tensor)}[{self.start}:{self.start + self.width}]"


@dataclass(frozen=True)
class Span:
    """Columns ``start`` to ``stop`` of each ``period`` columns."""

    start: int
    stop: int
    period: int

    def text(self) -> str:
        """``columns 0:32 of 64``."""
        return f"columns {self.start}:{self.stop} of {self.period}"


def letter_of(tensor: int) -> str:
    """What a tensor is called, by its number."""
    return string.ascii_lowercase[tensor]


def parsed_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces that are written ``a[32:64] + a[0:32]``; ValueError if none are."""
    found = []
    for each in text.split(" + "):
        match = _PIECE.fullmatch(each)
        if match is None:
            raise ValueError(f"{each!r} is no piece of a head")
        if match[4]:
            found.append(Piece(None, 0, int(match[4])))
        else:
            start, stop = int(match[2]), int(match[3])
            found.append(Piece(string.ascii_lowercase.index(match[1]), start, stop - start))
    return tuple(found)


def tensors_of(pieces: Sequence[Piece]) -> list[int]:
    """The numbers of the tensors that pieces are of, in order."""
    return list(dict.fromkeys(piece.tensor for piece in pieces if piece.tensor is not None))


def wrong_pieces(pieces: Sequence[Piece], known: int) -> str:
    """What is wrong with ``pieces``, where so many tensors are ``known``; "" if nothing is."""
    if min(piece.width for piece in pieces) < 1:
        return "a piece has one column or more"
    new = [tensor for tensor in tensors_of(pieces) if tensor >= known]
    if not tensors_of(pieces) or new != list(range(known, known + len(new))) or known + len(new) > MOST_TENSORS:
        return f"the tensors of pieces are called a, b, … in their order, {MOST_TENSORS} at most"
    return ""


def period_of(pieces: Sequence[Piece]) -> int:
    """How many columns of z the pieces make up together."""
    return sum(piece.width for piece in pieces)


def rows_of(tensor: Tensor, rows: int) -> tuple[int, int]:
    """A and S of the ``rows`` of z, as far as a tensor [A or 1, S or 1, G or 1, D] tells; 1 where it does not."""
    a, s = tensor.shape[:2]
    if a * s == rows:
        return a, s
    return (a, rows // max(a, 1)) if a != 1 else (rows // max(s, 1), s)


def assembled(pieces: Sequence[Piece], tensors: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    """The matrix [rows, columns] that pieces of ``tensors``, those of ``tensors_of``, make; 0 where nothing is read."""
    heads = columns // period_of(pieces)
    named = dict(zip(tensors_of(pieces), tensors, strict=True))
    found = []
    for piece in pieces:
        shape = (rows, heads, piece.width)
        if piece.tensor is None:
            found.append(tensors[0].new_zeros(shape))
            continue
        columns_of_head = named[piece.tensor].narrow(3, piece.start, piece.width)
        a, s = rows_of(columns_of_head, rows)
        found.append(columns_of_head.expand(a, s, heads, piece.width).reshape(shape))
    return torch.cat(found, 2).reshape(rows, columns)
