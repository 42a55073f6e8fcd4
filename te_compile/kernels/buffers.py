"""Device memory for kernels at little cost to the host and the GPU.

A step at small sizes is as long as the host takes to launch it, and a GPU waits for the first kernels of any step, so
what surrounds a launch counts. On an H200's host ``Tensor.new_empty`` takes 2.5 µs where Inductor's own allocation
takes 0.9, and ``new_zeros`` 6.9 µs, besides a kernel that costs the GPU 2 µs, for one amax that must start at 0.
Amaxes are therefore cleared some hundreds at a time and handed out one by one, and so is the memory of 1 / scale.
Numbers cleared together share a storage, and no two results of an operator may (PyTorch warns of it, and in its own CI
refuses it), so each kind of result has a stock of its own.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_compile.kernels.recording import here, unrecorded
from te_compile.ops.quantize import padded

# Of PyTorch's own, but every graph of Inductor's relies on it.
_empty_on_current_device: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

NUMBERS = 256  # cleared together
_STRIDE = 4  # fp32 elements from one number to the next: all are aligned alike, so kernels are compiled once

_cleared: dict[tuple[int, int, str], list[Tensor]] = {}  # by device, stream and kind
_lending = {"stopped": False}
_keeping = {"stopped": False}
_lent: list[Tensor] = []  # for a measurement that is going on
_HERE: AbstractContextManager[object] = nullcontext()

lent_workspaces: dict[tuple[int, int, int], list[Tensor]] = {}
"""Workspaces that no call is using, by device, stream and bytes. Only the C++ core takes from here, and puts back: see
:class:`Workspace`."""


@dataclass(frozen=True)
class Fresh:
    """Makes uninitialised memory on the current device."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, device: int, stream: int) -> Tensor:
        """A new tensor."""
        made: Tensor = _empty_on_current_device(self.size, self.strides, self.dtype)
        return made


@dataclass(frozen=True)
class FromStock:
    """Takes one of the cleared numbers."""

    kind: str

    def __call__(self, device: int, stream: int) -> Tensor:
        """The next one."""
        return _next(device, stream, self.kind)


@dataclass(frozen=True)
class Workspace:
    """Makes memory that serves one call and is nobody's result.

    Calls on one stream come one after the other there, so they can share it as soon as their launches are made. Not
    before: those of two threads mix. So the core takes a workspace out of ``lent_workspaces`` for as long as a call
    lasts and makes another where none is left, which gives each stream of each device as many as threads ever launched
    on it at once, and the least is what PyTorch's own products keep. A CUDA graph has its own: none of this is replayed
    while one is captured, nor in a process that compiles for them, whose pools must own no memory that outlives them.
    """

    bytes: int

    def __call__(self, device: int, stream: int) -> Tensor:
        """New memory, aligned as PyTorch's allocator aligns."""
        made: Tensor = _empty_on_current_device((self.bytes,), (1,), torch.uint8)
        return made


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels run on the current device; make that the one that holds ``x``, at no cost if it is already."""
    if not x.is_cuda or here.rehearsal is not None or x.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


def empty(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor on the device of ``like``, which must be the current one if CUDA."""
    # Under deterministic algorithms PyTorch's own fills what is empty, so that whoever reads it shows.
    is_plain = _empty_on_current_device is None or not like.is_cuda or here.rehearsal is not None
    if is_plain or torch.are_deterministic_algorithms_enabled():
        return torch.empty(size, dtype=dtype, device=like.device)
    size = tuple(size)
    strides = contiguous_strides(size)
    made: Tensor = _empty_on_current_device(size, strides, dtype)
    if here.recorder is not None:
        here.recorder.made(made, Fresh(size, strides, dtype))
    return made


def workspace(like: Tensor, count: int) -> Tensor:
    """uint8 [count], uninitialised, on the device of ``like``, for kernels that are done before the caller's next."""
    with unrecorded():
        made = empty(like, (count,), torch.uint8)
    if here.recorder is not None:
        how = Fresh((count,), (1,), torch.uint8) if _keeping["stopped"] else Workspace(count)
        here.recorder.made(made, how)
    return made


@lru_cache(maxsize=1024)
def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """From one element to the next along each dimension, in elements."""
    lengths = (max(length, 1) for length in reversed(size[1:]))
    return tuple(itertools.accumulate(lengths, operator.mul, initial=1))[::-1] if size else ()


def quantized(
    like: Tensor,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    which: int = 0,
    cleared: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for q, qᵀ, amax and 1 / scale of a matrix [rows, columns]; see :func:`empty`. ``cleared``: the amax is 0.

    An operator that quantises several matrices says ``which`` of them this is.
    """
    q = empty(like, (rows, columns) if rowwise else (0,), dtype)
    qt = empty(like, (columns, padded(rows)) if columnwise else (0,), dtype)
    largest = amax(like, which) if cleared else number(like, f"amax{which}")
    return q, qt, largest, number(like, f"scale_inv{which}")


def number(like: Tensor, kind: str) -> Tensor:
    """One uninitialised fp32 number [] on the device of ``like``; numbers of two kinds never share a storage."""
    found = _from_stock(like, kind)
    return empty(like, (), torch.float32) if found is None else found


def amax(like: Tensor, which: int = 0) -> Tensor:
    """One fp32 number [] that is 0 when the current stream of the current device gets to it, on the device of ``like``.

    A CUDA graph must clear its own each time that it runs, and what its memory pool must not own may not be made within
    it, so there each one is cleared by itself.
    """
    if _lent and here.rehearsal is None:
        return _lent.pop()
    number = _from_stock(like, f"amax{which}")
    return like.new_zeros((), dtype=torch.float32) if number is None else number


def _from_stock(like: Tensor, kind: str) -> Tensor | None:
    """One of the cleared numbers; None where each must be made by itself."""
    if here.rehearsal is not None or not like.is_cuda or _lending["stopped"]:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    device = like.get_device()
    number = _next(device, torch._C._cuda_getCurrentRawStream(device), kind)
    if here.recorder is not None:
        here.recorder.made(number, FromStock(kind))
    return number


def _next(device: int, stream: int, kind: str) -> Tensor:
    """The next cleared number of this kind; nobody else gets it."""
    while True:
        try:
            return _cleared[device, stream, kind].pop()  # without a look first: another thread may take the last one
        except (KeyError, IndexError):
            stock = _cleared.setdefault((device, stream, kind), [])
            stock.extend(_clear(NUMBERS, torch.device("cuda", device)))


def _clear(count: int, device: torch.device) -> tuple[Tensor, ...]:
    with unrecorded(), torch.inference_mode(False), torch.no_grad():
        return torch.zeros(count, _STRIDE, dtype=torch.float32, device=device)[:, 0].unbind()


def lends() -> bool:
    """Is memory for kernels made as it is here, by PyTorch's fast way and from stock?"""
    return (
        _empty_on_current_device is not None
        and not _lending["stopped"]
        and not _lent
        and not torch.are_deterministic_algorithms_enabled()
    )


def stop_lending() -> None:
    """From now on each amax is cleared by itself: graphs are being compiled that become CUDA graphs, whose memory pool
    is asked about every tensor that outlives them."""
    _lending["stopped"] = True
    _cleared.clear()
    lent_workspaces.clear()


def stop_keeping_workspaces() -> None:
    """From now on each call makes its own, which costs the host a microsecond. What is kept between calls is memory
    that nothing else can have where memory is tightest."""
    _keeping["stopped"] = True
    lent_workspaces.clear()


@contextmanager
def lent_while_capturing(count: int, device: torch.device | str) -> Iterator[None]:
    """For measurements: a graph captured in here finds ``count`` amaxes cleared, as calls outside of graphs do. It may
    be replayed on the same data only."""
    _lent.extend(_clear(count, torch.device(device)))
    try:
        yield
    finally:
        _lent.clear()
