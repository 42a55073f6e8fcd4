"""Does any live FP8 state still lack a scale?

A state that has seen no data has scale 0, and every quantize that reads it must look at its data first: a second pass.
That is right for the first step and a waste for all later ones. The device knows which scale is 0, the host does not,
and asking would stall it. So the host keeps this one flag: while it is up, kernels launch the measuring pass, which
exits at once on the device where the scale is known; once every state has a scale, nobody launches it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from te_compile.kernels.recording import here

_waiting: set[int] = set()
_moments = itertools.count(-1, -1)  # names of what is no state's


def expect(state: int) -> None:
    """A state, named by any unique number, has no scale yet."""
    _waiting.add(state)


def settle(state: int) -> None:
    """The state has a scale now, or is gone. Naming one that was never expected is harmless."""
    _waiting.discard(state)


def pending() -> bool:
    """Must kernels be ready to meet a scale of zero?"""
    return bool(_waiting)


@contextmanager
def expected(missing: bool) -> Iterator[None]:
    """While this lasts a scale may be zero, if ``missing``, whatever is known of the live states."""
    if not missing:
        yield
        return
    moment = next(_moments)
    expect(moment)
    try:
        yield
    finally:
        settle(moment)


def must_measure(scale: Tensor | None) -> bool:
    """Must a kernel that casts by ``scale`` be ready to find the scale itself?"""
    rehearsal = here.rehearsal
    return scale is None or (pending() if rehearsal is None else rehearsal.missing)
