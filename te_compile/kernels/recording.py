"""Where a kernel's memory and its launches are noted instead of, or beside, being made: two ways to look at a call.

*Recording* (replay.py): a call runs, and what it does is noted so that it can be done again. Whoever makes memory
(buffers.py), launches a Triton kernel (launch.py) or calls the C++ core (native.py) says so to ``here.recorder``, if
there is one; else a note costs one look.

*Rehearsing* (ahead.py): a call's code runs on fake tensors to find out which kernels it will launch, and launches none.
Memory is fake then, and addresses are those that tensors have if their storages begin where allocators begin them.

Both belong to a thread: a backward may run beside the forward of another model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

STREAM = object()
"""Stands among the arguments of a call for the stream that is current when it is made."""


class Step(NamedTuple):
    """A function, its arguments, and where among these go addresses: (argument, tensor, bytes into it). The stream is
    tensor -1. kernel: the Triton kernel that it launches, if it does."""

    function: Callable[..., Any]
    template: list[Any]
    places: list[tuple[int, int, int]]
    kernel: Any = None


class Recorder(Protocol):
    """What wants to know. ``missing``: is this how it goes while a scale may be missing?"""

    missing: bool

    def made(self, tensor: Tensor, make: Callable[[int, int], Tensor]) -> None:
        """``tensor`` is fresh memory; ``make(device, stream)`` makes the like of it again."""

    def found(self, table: Tensor) -> None:
        """``table`` is what every call of this kind reads."""

    def called(self, function: Callable[..., Any], arguments: Sequence[Any], kernel: Any = None) -> None:
        """``function`` was called with these, but with addresses for tensors and the stream for ``STREAM``.

        kernel: the compiled Triton kernel whose launcher the function is.
        """


class Rehearsal(Protocol):
    """What is told of launches that are not made. ``missing``: is this how it goes while a scale may be missing?"""

    missing: bool

    def launched(self, kernel: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        """The kernel would have been launched with these."""


class _Here(threading.local):
    recorder: Recorder | None = None
    rehearsal: Rehearsal | None = None


here = _Here()


@contextmanager
def unrecorded() -> Iterator[None]:
    """What happens in here belongs to no call: stock is taken in."""
    before, here.recorder = here.recorder, None
    try:
        yield
    finally:
        here.recorder = before


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """In here this thread launches nothing and makes no memory; all tensors must be fake, in a mode that is on."""
    before, here.rehearsal = here.rehearsal, rehearsal
    try:
        yield
    finally:
        here.rehearsal = before


def address_of(tensor: Tensor) -> int:
    """Where ``tensor`` begins; in a rehearsal how far into its storage, which is aligned as that is."""
    if here.rehearsal is None:
        return tensor.data_ptr()
    return int(tensor.storage_offset()) * tensor.element_size()
