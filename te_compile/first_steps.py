"""The first training step of a state: each of its calls is measured, not only the first.

A state that has seen nothing has a scale of 0, so its first call casts by its own amax, and leaves a scale. A step may
have further calls of the same parameters: behind a graph break, of a block that is compiled by itself and used again,
of a model that is shown two views of an image. Cast by what the first call has seen, all that is larger would be cut
off, and the first may have seen little: an identity matrix, an image of noise. So until a backward pass has run through
one of these calls, the next one finds no scale either. Its amax enters the history as any does: from the second step on
the scale is one for them all.

The host learns late which states have a scale. So while it does not know, each step might be the first, and notes on
the device, in its first call, whether a scale was missing: only then there is none for the others.

Weights are the same for all calls, and gradients of a step are cast by scales from before its forward passes, which are
0 for all of them. That leaves x, row 0 of the forward state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from te_compile.ops.scaling import SCALE

MOST_CALLS = 64  # of a first step: an evaluation that forgets no_grad has no backward pass, and measuring takes time

_X = 0  # its row in a forward state, [2, 2 + L]


@dataclass
class _Step:
    """One that goes on. missing: bool [], was there no scale of x when it began?"""

    missing: Tensor
    calls: int = 0


_steps: dict[int, _Step] = {}  # by the number of the forward state
_without_backward: set[int] = set()  # states of which a step had too many calls: until a backward pass has come


def is_on(numbers: Sequence[int]) -> bool:
    """Does a step go on that may be the first one of one of these forward states?"""
    return bool(_steps) and any(number in _steps for number in numbers)


@contextmanager
def counted_call(numbers: Sequence[int], states: Sequence[Tensor], lacking: Sequence[int]) -> Iterator[None]:
    """In here a call that trains reads ``states``: it finds no scale of x if it is a further one of a first step.

    numbers: of the forward states, fp32 [2, 2 + L] each, which come first in ``states``. lacking: those of them that
    may have no scale yet: if no step of theirs goes on, one begins with this call.
    """
    scales = {number: state[_X, SCALE] for number, state in zip(numbers, states, strict=False)}
    further = [(number, step) for number in numbers if (step := _steps.get(number)) is not None]
    going_on = {number for number, _ in further}
    first = [each for each in lacking if each not in going_on and each not in _without_backward]
    _begin({number: scales[number] for number in first})
    try:
        with _none_in([scales[number] for number, _ in further], [step.missing for _, step in further]):
            yield
    finally:
        _count([*going_on, *first])


def _begin(scales: dict[int, Tensor]) -> None:
    """Steps of these states; ``scales``: those of x, fp32 []."""
    if scales:
        with _silently():
            missing = torch.stack(list(scales.values())) == 0
        _steps.update({number: _Step(each) for number, each in zip(scales, missing.unbind(), strict=True)})


def _count(numbers: Sequence[int]) -> None:
    for number in numbers:
        step = _steps.get(number)  # which another thread may have ended
        if step is not None:
            step.calls += 1
            if step.calls >= MOST_CALLS:
                del _steps[number]
                _without_backward.add(number)


@contextmanager
def _none_in(scales: list[Tensor], missing: list[Tensor]) -> Iterator[None]:
    """In here ``scales``, fp32 [] each, are 0 where they were ``missing``. Who finds no new one, as from zeros or
    infinities, or fails, leaves the one from before."""
    if not scales:
        yield
        return
    with _silently():
        before = torch.stack(scales)
        torch._foreach_copy_(scales, list(torch.where(torch.stack(missing), 0.0, before)))
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
    """A backward pass of these forward states has run. Returns how many calls their steps had, as far as that was
    counted; 0 if none went on."""
    calls = 0
    for number in numbers:
        step = _steps.pop(number, None)
        if step is not None:
            calls = max(calls, step.calls)
        elif number in _without_backward:
            _without_backward.discard(number)
            calls = max(calls, MOST_CALLS)
    return calls


def forget(number: int) -> None:
    """The state is gone, or what it knows is of another training."""
    _steps.pop(number, None)
    _without_backward.discard(number)
