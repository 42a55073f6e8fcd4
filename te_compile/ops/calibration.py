"""May a kernel that is launched now meet an FP8 scale of 0?

A state that has seen no data has scale 0, and every quantize that reads it must look at its data first: a second pass.
That is right for the first step and a waste for all later ones. The device knows which scale is 0, the host does not,
and asking would stall it. So the host notes which states have been seen to have their scales (te_compile/state.py), and
for as long as a call runs that reads one of the others, or a backward pass may come of such a call, this flag is up:
kernels launch the measuring pass, which exits at once on the device where the scale is known. Calls of other graphs at
other times know nothing of it: a state may lack its scale for good, as those of a model that only ever infers.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from te_compile.kernels.recording import here

_waiting: set[int] = set()
_moments = itertools.count()


class _Thread(threading.local):
    is_later_step = False


_thread = _Thread()


def pending() -> bool:
    """Must kernels be ready to meet a scale of zero?"""
    return bool(_waiting)


def expect(moment: int) -> None:
    """From now on a scale may be zero."""
    _waiting.add(moment)


def settle(moment: int) -> None:
    """No longer on this account. Naming one that was never expected is harmless."""
    _waiting.discard(moment)


@contextmanager
def expected() -> Iterator[None]:
    """In here a scale may be zero."""
    moment = next(_moments)
    expect(moment)
    try:
        yield
    finally:
        settle(moment)


def moment_of(anchor: object) -> int:
    """What to :func:`expect` if a scale may be zero as long as ``anchor`` is there. It is settled when that is gone."""
    moment = next(_moments)
    weakref.finalize(anchor, settle, moment).atexit = False
    return moment


def must_measure(scale: Tensor | None) -> bool:
    """Must a kernel that casts by ``scale`` be ready to find the scale itself?"""
    if scale is None or _thread.is_later_step:
        return scale is None
    looking = here.rehearsal or here.recorder  # which know what it is to be; another call may end meanwhile
    return pending() if looking is None else looking.missing


@contextmanager
def as_in_later_steps() -> Iterator[None]:
    """In here this thread's kernels trust the scales that they are given, whatever states still lack: for measurements.
    A tensor that is a scale must have one."""
    before, _thread.is_later_step = _thread.is_later_step, True
    try:
        yield
    finally:
        _thread.is_later_step = before
