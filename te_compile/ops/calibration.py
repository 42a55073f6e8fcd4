"""Does any live FP8 state still lack a scale?

A state that has seen no data has scale 0, and every quantize that reads it must look at its data first: a second pass.
That is right for the first step and a waste for all later ones. The device knows which scale is 0, the host does not,
and asking would stall it. So the host keeps this one flag: while it is up, kernels launch the measuring pass, which
exits at once on the device where the scale is known; once every state has a scale, nobody launches it again. But a
forward that ran before has handed its backward the scales of then: for as long as such a backward may come, the flag
stays up, too.
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
_moments = itertools.count(-1, -1)  # names of what is no state's


class _Thread(threading.local):
    is_later_step = False


_thread = _Thread()


def expect(state: int) -> None:
    """A state, named by any unique number from 0 on, has no scale yet."""
    _waiting.add(state)


def settle(state: int) -> None:
    """The state has a scale now, or is gone. Naming one that was never expected is harmless."""
    _waiting.discard(state)


def pending() -> bool:
    """Must kernels be ready to meet a scale of zero?"""
    return bool(_waiting)


def awaits_states() -> bool:
    """Does a state still lack its scale? Else what is pending is what forwards that ran before have left behind."""
    return any(name >= 0 for name in _waiting)


def expect_while_alive(anchor: object) -> int:
    """A scale may be zero as long as ``anchor`` is there, whatever the states have by then, or until what is returned
    is settled."""
    moment = next(_moments)
    expect(moment)
    weakref.finalize(anchor, settle, moment).atexit = False
    return moment


def must_measure(scale: Tensor | None) -> bool:
    """Must a kernel that casts by ``scale`` be ready to find the scale itself?"""
    rehearsal = here.rehearsal
    if scale is None or _thread.is_later_step:
        return scale is None
    return pending() if rehearsal is None else rehearsal.missing


@contextmanager
def as_in_later_steps() -> Iterator[None]:
    """In here this thread's kernels trust the scales that they are given, whatever states still lack: for measurements.
    A tensor that is a scale must have one."""
    before, _thread.is_later_step = _thread.is_later_step, True
    try:
        yield
    finally:
        _thread.is_later_step = before
