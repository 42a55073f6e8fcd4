"""Launching Triton kernels at little cost to the host.

``kernel[grid](…)`` binds, specialises and looks up all its arguments in Python each time: 94 µs a launch under a
profiler, on average of a training step's, where this took 64; a GPU that waits for the first kernels of a step spends
them idle. A step makes the same launches again and again, so the compiled kernel is kept here, under all that Triton
would tell apart: the constants, and of each argument its dtype, its alignment, or for an integer whether it is 1, a
multiple of 16, or beyond 32 bits. Tensors are handed over as addresses, which spares the driver a question for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from te_compile.kernels import ahead, player
from te_compile.kernels.kernel_hashes import hash_from_below
from te_compile.kernels.recording import STREAM, Step, here

Programs = tuple[int, int, int]

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}
_ONE, _SIXTEENS, _SMALL, _WIDE = range(4)


def launch(kernel: Any, grid: int | tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run ``grid`` programs, in up to three dimensions, of a ``triton.jit`` kernel on the current device and stream.

    arguments: all parameters that are not constants, in their order, a tensor of the current device among them;
    constants: the others, and num_warps.
    """
    if here.rehearsal is not None:
        here.rehearsal.launched(kernel, arguments, constants)
        return
    width, height, depth = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    programs = (width, height, depth)
    if triton.knobs.runtime.interpret:
        kernel[programs](*arguments, **constants)
        return
    key, values, device = _read(kernel, arguments, constants)
    found = _compiled.get(key)
    compiled, rest, _ = found or _compile(key, kernel, programs, arguments, constants)
    if found is not None:
        _run(compiled, programs, device, values + rest)
    if here.recorder is not None:
        run = (compiled.function, compiled.packed_metadata, None, None, None)
        here.recorder.called(compiled.run, (*programs, STREAM, *run, *arguments, *rest), compiled)


class Repeated:
    """A launch that is made again and again with the very same arguments: what is decided is decided once.

    The tensors among them are kept alive. It must be called with their device current.
    """

    def __init__(self, kernel: Any, grid: int, *arguments: Any, **constants: Any) -> None:
        self.kernel, self.programs = kernel, (grid, 1, 1)
        self.arguments, self.constants = arguments, constants
        self.bound: tuple[Any, Programs, int, tuple[Any, ...]] | None = None

    def __call__(self) -> None:
        """Launch on the current stream."""
        if self.bound is not None:
            _run(*self.bound)
        elif here.rehearsal is not None:
            here.rehearsal.launched(self.kernel, self.arguments, self.constants)
        elif triton.knobs.runtime.interpret:
            self.kernel[self.programs](*self.arguments, **self.constants)
        else:
            self._first()

    def _first(self) -> None:
        key, values, device = _read(self.kernel, self.arguments, self.constants)
        is_new = key not in _compiled
        if is_new:
            _compile(key, self.kernel, self.programs, self.arguments, self.constants)
        compiled, rest, _ = _compiled[key]
        self.bound = compiled, self.programs, device, values + rest
        if not is_new:
            self()


class Launches:
    """Launches on one device that are made one after the other again and again, by the C++ core where there is one."""

    def __init__(self, each: Sequence[Repeated]) -> None:
        self.each, self.device = each, -1
        self.play: Callable[[list[Tensor], list[int], int, int], Any] | None = None
        self.is_settled = False  # is it known who makes them from now on?

    def __call__(self) -> None:
        """Launch all on the current stream; their device must be the current one."""
        if self.play is not None and here.rehearsal is None and not is_watched():
            self.play([], [], self.device, torch._C._cuda_getCurrentRawStream(self.device))
            return
        for launch in self.each:
            launch()
        if not self.is_settled:
            self._settle()

    def played(self) -> Callable[[], object] | None:
        """What makes them as the core does, on the stream that is current now, for callers who have asked what this
        class asks. None if the core does not."""
        if self.play is None:
            return None
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        return partial(self.play, [], [], self.device, stream)

    def _settle(self) -> None:
        bound = [launch.bound for launch in self.each if launch.bound is not None]
        self.is_settled = len(bound) == len(self.each)
        if bound and self.is_settled and player.core() is not None:
            self.device = bound[0][2]
            self.play = player.launches([_step(compiled, programs, values) for compiled, programs, _, values in bound])


def _step(compiled: Any, programs: Programs, values: tuple[Any, ...]) -> Step:
    """The launch as replays know it."""
    run = (compiled.function, compiled.packed_metadata, None, None, None)
    return Step(compiled.run, [*programs, None, *run, *values], [(len(programs), -1, 0)], compiled)


def _read(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """The key of the compiled kernel, the arguments as it takes them, and the device of the tensors among them."""
    values: list[Any] = []
    forms: list[Any] = []
    device = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            device = argument.get_device()
            forms += (argument.dtype, address & 15 == 0)
            values.append(address)
        else:
            forms.append(_form_of(argument) if isinstance(argument, int) else type(argument))
            values.append(argument)
    return (id(kernel), device, tuple(constants), tuple(constants.values()), tuple(forms)), tuple(values), device


def _form_of(number: int) -> int:
    """What a kernel may have been specialised for, by Triton's rules for integers."""
    if number == 1:
        return _ONE
    if not -0x80000000 <= number < 0x80000000:
        return _WIDE + (number & 15 == 0) + 2 * (number >= 1 << 63)
    return _SMALL if number & 15 else _SIXTEENS


def _compile(
    key: tuple[Any, ...], kernel: Any, programs: Programs, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], Any]:
    """Compile the kernel, or load what was compiled ahead, which runs it, and keep it under ``key``."""
    hash_from_below(kernel)
    expected = ahead.awaited(kernel, arguments, constants)
    compiled = kernel[programs](*arguments, **constants)
    ahead.note_use(expected, compiled)
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    found = _compiled[key] = compiled, rest, kernel  # the kernel too: while it lives no other has its id
    return found


def _run(compiled: Any, programs: Programs, device: int, values: tuple[Any, ...]) -> None:
    """Run a compiled kernel on the current stream of the device."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    if is_watched():
        compiled[programs](*values, stream=stream)
    else:  # what the line above does where nobody has asked to be told of launches
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(*programs, stream, function, metadata, None, None, None, *values)


def is_watched() -> bool:
    """Has a profiler asked Triton to tell it of launches?"""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
