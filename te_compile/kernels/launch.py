"""Launching Triton kernels at little cost to the host.

``kernel[grid](…)`` binds, specialises and looks up all its arguments in Python each time: 94 µs a launch under a
profiler, on average of a training step's, where this took 64; a GPU that waits for the first kernels of a step spends
them idle. A step makes the same launches again and again, so the compiled kernel is kept here, under all that Triton
would tell apart: the constants, and of each argument its dtype, its alignment, or for an integer whether it is 1, a
multiple of 16, or beyond 32 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}


def _form(argument: Any) -> Any:
    """What a kernel may have been specialised for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if isinstance(argument, int):
        return argument == 1, argument & 15 == 0, -0x80000000 <= argument < 0x80000000, argument < 1 << 63
    return type(argument)


def launch(kernel: Any, grid: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run ``grid`` programs, or a rectangle of them, of a ``triton.jit`` kernel on the current device and stream.

    arguments: all parameters that are not constants, in their order; constants: the others, and num_warps.
    """
    programs = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)
    if triton.knobs.runtime.interpret:
        kernel[programs](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    key = (id(kernel), device, *constants.items(), *map(_form, arguments))
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[programs](*arguments, **constants)
        rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[key] = compiled, rest, kernel  # the kernel too: while it lives no other has its id
        return
    compiled, rest, _ = found
    compiled[programs](*arguments, *rest, stream=torch._C._cuda_getCurrentRawStream(device))
