"""How much of a matrix one program of a kernel works on, and who decides it.

A launcher names a tile of its own for each kind of work, a good one on the GPUs that it was tried on, and others that
may be better for some shapes or elsewhere. Which it takes never changes a bit of its results, so tiles may be
chosen by time. They are where somebody asks for it: passes/time_tiles.py tries them when a graph is compiled, and
tile_choices.py keeps what it finds. A launch then looks here; where nobody ever asked, that is one look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one program works on, with how many warps, and the most registers of a thread if the compiler is told."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None


MOST_ALONE = 32768
"""Elements, rows and columns filled up to powers of two, that one program is to hold. In microseconds on an H200, by
many programs and by one, a norm whose scale may be missing, and a cast:

    1 × 4096    6.0, 2.2    4.7, 1.6        8 × 4096     6.2, 5.6    4.8, 3.3
    4 × 4096    6.3, 3.7    4.8, 2.4        16 × 4096    6.3, 14.9   4.9, 6.2
"""
_NARROWEST, _OF_A_WARP, _MOST_WARPS = 64, 1024, 16


def alone(rows: int, columns: int) -> Tile | None:
    """The tile of a program that holds a matrix of this size whole, as one of few rows in decoding; None if that is too
    large, or empty."""
    height, width = _power_of_2(rows), max(_NARROWEST, _power_of_2(columns))
    if not rows or not columns or height * width > MOST_ALONE:
        return None
    return Tile(height, width, min(_MOST_WARPS, max(1, height * width // _OF_A_WARP)))


def _power_of_2(number: int) -> int:
    """The first one that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True)
class Question:
    """Which of its ``tiles`` a launcher is to take for a kind of work; the first one is its own answer."""

    device: int
    kind: str
    tiles: tuple[Tile, ...]


class Work(NamedTuple):
    """What a launcher is about to do: on which tensors, all else that may decide which tile is the fastest, and the
    tiles that it could take instead of its own."""

    inputs: Sequence[Tensor]
    what: tuple[object, ...]
    others: Sequence[Tile]

    def question(self, own: Tile) -> Question:
        """The question to a launcher whose own tile is ``own``."""
        kind = " ".join((*map(str, self.what), *map(_form_of, self.inputs)))
        return Question(self.inputs[0].get_device(), kind, tuple(dict.fromkeys((own, *self.others))))


def _form_of(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}{tuple(x.stride())}".replace(" ", "")


@dataclass
class Trial:
    """In a trial launchers take ``tile``, or their own if it is None, and leave what they asked."""

    tile: Tile | None = None
    asked: Question | None = None


class _Here(threading.local):
    trial: Trial | None = None


_here = _Here()
chosen: dict[tuple[int, str], Tile] = {}
"""The fastest, by device and kind of work; the launcher's own too, where it was found to be that."""


def choose(own: Tile, work: Callable[[], Work]) -> Tile:
    """The tile for this work: the fastest one, where that was found out, or the launcher's ``own``."""
    trial = _here.trial
    if trial is None and not chosen:
        return own
    question = work().question(own)
    if trial is not None:
        trial.asked = question
        return trial.tile or own
    found = chosen.get((question.device, question.kind), own)
    return found if found in question.tiles else own


@contextmanager
def trying(tile: Tile | None = None) -> Iterator[Trial]:
    """In here this thread's launchers are on trial."""
    before, _here.trial = _here.trial, Trial(tile)
    try:
        yield _here.trial
    finally:
        _here.trial = before
