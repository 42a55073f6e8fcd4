"""The first training step of a state: each of its calls is measured, not only the first.

A state that has seen nothing has a scale of 0, so its first call casts by its own amax, and leaves a scale. A step may
have further calls of the same parameters: behind a graph break, of a block that is compiled by itself and used again,
of a model that is shown two views of an image. Cast by what the first call has seen, all that is larger would be cut
off, and the first may have seen little: an identity matrix, an image of noise. So until a backward pass has run through
one of these calls, the next one finds no scale either. Its amax enters the history as any does: from the second step on
the scale is one for them all.

Weights are the same for all calls, and gradients of a step are cast by scales from before its forward passes, which are
0 for all of them. That leaves x, row 0 of the forward state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.ops.scaling import SCALE

MOST_CALLS = 64  # of a first step: an evaluation that forgets no_grad has no backward pass, and measuring takes time

_X = 0  # its row in a forward state, [2, 2 + L]

_calls: dict[int, int] = {}  # of the first steps that go on, by the number of the forward state
_over: set[int] = set()


def is_on(numbers: Sequence[int]) -> bool:
    """Has the first step of one of these forward states begun, and is it not over?"""
    return bool(_calls) and any(number in _calls for number in numbers)


@contextmanager
def counted_call(numbers: Sequence[int], states: Sequence[Tensor], lacking: Sequence[int]) -> Iterator[None]:
    """In here a call that trains reads ``states``: in their first steps it finds no scale of x.

    numbers: of the forward states, fp32 [2, 2 + L] each, which come first in ``states``. lacking: those of them that
    may have no scale yet, whose first step begins with this call if it has not begun.
    """
    again = [state[_X, SCALE] for number, state in zip(numbers, states, strict=False) if number in _calls]
    for number in numbers:
        if number in _calls or (number in lacking and number not in _over):
            _calls[number] = _calls.get(number, 0) + 1
    with _none_in(again) if again else nullcontext():
        yield
    end([number for number in numbers if _calls.get(number) == MOST_CALLS])


@contextmanager
def _none_in(scales: list[Tensor]) -> Iterator[None]:
    """In here ``scales``, fp32 [] each, are 0. Who finds no new one, as from zeros or infinities, or fails, leaves the
    one from before."""
    with _silently():
        before = torch.stack(scales)
        torch._foreach_zero_(scales)
    try:
        yield
    finally:
        with _silently():
            now = torch.stack(scales)
            torch._foreach_copy_(scales, list(torch.where(now == 0, before, now)))


@contextmanager
def _silently() -> Iterator[None]:
    """Neither autograd nor a mode has a part in it: a checkpoint that selects what it saves counts operators."""
    with torch.no_grad(), _disable_current_modes():
        yield


def end(numbers: Sequence[int]) -> int:
    """A backward pass of these forward states has run, or none will. Returns how many calls their first steps had; 0 if
    these were over."""
    calls = max((_calls.pop(number, 0) for number in numbers), default=0)
    _over.update(numbers)
    return calls


def forget(number: int) -> None:
    """The state is gone, or what it knows is of another training."""
    _calls.pop(number, None)
    _over.discard(number)
