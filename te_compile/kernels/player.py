"""Tapes (replay.py) that the C++ core plays: the same memory, launches and results, without Python in between.

On an H200's host a call that Python replays takes 22 µs with one product or one kernel in it (``python -m
benchmarks.host``). Part of that is arguments read from Python objects, lists and dictionaries, none of which differs
from one call to the next. What it comes to is therefore worked out here, once for each tape and each place in generated
code, and csrc/python/ does it:

    memory    PyTorch's function with its arguments ready; amaxes from stock (buffers.py); workspace lent for the call
    steps     a Triton kernel as a launch by the driver (driver_launch.py), a product as one that cuBLASLt was prepared
              for, a norm of the core's as the request that it is, anything else as the call of Python's that it was
    a place   where among the arguments the tensors are, and how their addresses must be aligned

What must be asked at each call is asked each time, of the same functions and flags as in Python. Without the core,
or without its CUDA part, Python plays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from te_compile.kernels import buffers, native
from te_compile.kernels.driver_launch import driver_launch
from te_compile.kernels.recording import Step
from te_compile.ops import calibration

if TYPE_CHECKING:
    from te_compile.kernels.replay import Binding, Tape

LOG = logging.getLogger("te_compile")
_by_python = {"wanted": False}
lookers = {"count": 0}  # who wants to see all calls of places: see replay.looking
_STREAM, _FIRST = 3, 9  # of a launcher's arguments, after the programs; the first one that is the kernel's own


def core() -> ModuleType | None:
    """What plays; None where Python must."""
    if _by_python["wanted"] or native.missing(cuda=True) or not hasattr(torch._C, "_cuda_getDevice"):
        return None
    return native.module()


@contextmanager
def by_python() -> Iterator[None]:
    """In here tapes and places are made that Python plays: to compare, and to measure."""
    before, _by_python["wanted"] = _by_python["wanted"], True
    try:
        yield
    finally:
        _by_python["wanted"] = before


# --- a tape -----------------------------------------------------------------------------------------------------------


def played(tape: Tape, given: int) -> Callable[..., Any]:
    """What does as ``tape`` does and is called like it. given: the number of tensors of the call's own."""
    plays = core()
    if plays is None:
        return tape
    return _player(plays, tape, given) or tape


def _player(plays: ModuleType, tape: Tape | _Launches, given: int) -> Callable[..., Any] | None:
    kept = (tape.kept, [step.kernel for step in tape.steps])  # a kernel's code is unloaded with it
    try:
        makes, steps = list(map(_made, tape.makes)), _steps(tape.steps, plays)
        player: Callable[..., Any] = plays.player(given, makes, steps, tape.results, kept)
    except (TypeError, ValueError, RuntimeError) as error:  # arguments of a kind that nobody has thought of
        LOG.warning("a call is replayed by Python, for the C++ core cannot: %s", error)
        return None
    return player


def _made(make: Callable[[int, int], Tensor]) -> tuple[Any, ...]:
    """Memory as the core makes it: how, the function to call, and what it finds in stock."""
    if isinstance(make, buffers.Workspace):
        return "borrowed", make, buffers.lent_workspaces, make.bytes
    if isinstance(make, buffers.Fresh):
        return "fresh", buffers._empty_on_current_device, (make.size, make.strides, make.dtype)
    if isinstance(make, buffers.FromStock):
        return "stock", buffers._next, buffers._cleared, make.kind
    return "called", make


def _steps(steps: Sequence[Step], plays: ModuleType) -> list[tuple[Any, ...]]:
    launches = not plays.driver_missing()
    return [_step(step, plays, launches) for step in steps]


def _step(step: Step, plays: ModuleType, launches: bool) -> tuple[Any, ...]:
    called = (step.function, step.template, step.places)
    if step.kernel is not None and launches:
        return _launch(step) or called
    kinds = {plays.cublaslt_gemm: "product", plays.cuda_norm_quantize: "norm"}
    if step.function in kinds and launches:
        arguments = [0 if argument is None else argument for argument in step.template]
        return (*called, kinds[step.function], (arguments, step.places))
    return called


def _launch(step: Step) -> tuple[Any, ...] | None:
    """A launch by the driver; None if it takes Triton's launcher."""
    grid, arguments = step.template[:_STREAM], step.template[_FIRST:]
    places = [place for place in step.places if place[0] != _STREAM]
    found = driver_launch(step.kernel, grid, arguments)
    if found is None or any(at < _FIRST for at, _, _ in places):
        return None
    try:
        words = [(found.word_of[at - _FIRST], tensor, offset) for at, tensor, offset in places]
    except KeyError:  # an address for what the kernel takes to be a constant
        return None
    launch = (found.function, found.grid, found.threads, found.shared_bytes, found.words, words)
    return (step.function, step.template, step.places, "launch", launch)


# --- a place in generated code ----------------------------------------------------------------------------------------


def questions(makes_memory: bool = True) -> dict[str, Any]:
    """What the core asks at each call, whoever it asks: see ``Questions`` in csrc/python/place.cpp.

    makes_memory: is memory made as well, which is played in the ways that buffers has where nobody uses CUDA graphs?
    """
    ways = [(buffers._lending, "stopped"), (vars(buffers), "_lent")] if makes_memory else []
    return {
        "tensor_type": Tensor,
        "profiler_enabled": torch._C._autograd._profiler_enabled,
        "device_of": Tensor.get_device,
        "current_device": torch._C._cuda_getDevice,
        "is_capturing": torch._C._cuda_isCurrentStreamCapturing,
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "flags": [*ways, (lookers, "count")],
        "closed": [torch._C._get_deterministic_algorithms],
        "pending": (vars(calibration), "_waiting"),
        "runtime": (vars(triton.knobs), "runtime"),
        "hooks": ["launch_enter_hook", "launch_exit_hook"],
    }


def place(unbound: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """What generated code calls at one place; None where Python plays. unbound: what to do with a call until, or
    unless, there is something to play."""
    plays = core()
    return None if plays is None else plays.place(unbound, questions())


def bind(place: Any, binding: Binding | None, positional: int, named: int) -> None:
    """Have calls of so many arguments played as ``binding`` says; None: no longer."""
    plays = native.module()
    if binding is None or not isinstance(binding.tape, plays.Player):
        plays.unbind(place)
        return
    bits = binding.address_bits
    aligned = [alignment & (2**64 - 1) for alignment in binding.alignments]
    plays.bind(place, binding.tape, binding.paths, positional, named, bits, aligned, binding.device, binding.pending)


# --- launches alone ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launches:
    """A tape of launches alone."""

    steps: Sequence[Step]
    makes: tuple[()] = ()
    results: tuple[()] = ()
    kept: tuple[()] = ()


def launches(steps: Sequence[Step]) -> Callable[[list[Tensor], list[int], int, int], Any] | None:
    """What makes these launches, of no tensors of the call's own. None where Python must."""
    plays = core()
    return None if plays is None else _player(plays, _Launches(steps), 0)
