"""Where a kernel's memory and its launches are noted while a call is recorded (replay.py); else a note costs one look.

Whoever makes memory (buffers.py), launches a Triton kernel (launch.py) or calls the C++ core (native.py) says so to
``here.recorder``, if there is one. It belongs to a thread: a backward may run beside the forward of another model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

STREAM = object()
"""Stands among the arguments of a call for the stream that is current when it is made."""


class Recorder(Protocol):
    """What wants to know."""

    def made(self, tensor: Tensor, make: Callable[[int, int], Tensor]) -> None:
        """``tensor`` is fresh memory; ``make(device, stream)`` makes the like of it again."""

    def called(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """``function`` was called with these, but with addresses for tensors and the stream for ``STREAM``."""


class _Here(threading.local):
    recorder: Recorder | None = None


here = _Here()


@contextmanager
def unrecorded() -> Iterator[None]:
    """What happens in here belongs to no call: stock is taken in."""
    before, here.recorder = here.recorder, None
    try:
        yield
    finally:
        here.recorder = before
