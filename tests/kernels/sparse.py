"""Tensors of more elements than memory has, and a few of the programs that a launch on them has.

Memory that nobody touches costs nothing, so tensors of 2^32 elements and strides of 2^26 can be had on any machine; and
where a kernel's offsets no longer fit into 32 bits shows in its first and its last programs. The interpreter computes
with the integers that a GPU computes with, and tests/kernels/addresses.py sees where that leads.
"""

from __future__ import annotations

import builtins
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from te_compile.kernels import buffers

UNRESERVED = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, a name that Python has from 3.13 on
MANY = 4096  # programs along one dimension of a grid, of which the first and the last one run


def sparse(size: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor of zeros; pages of it become memory when they are written to."""
    if strides is None:
        strides = buffers.contiguous_strides(tuple(size))
    last = sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED
    try:
        memory = mmap.mmap(-1, (last + 1) * torch.empty((), dtype=dtype).element_size(), flags=kind)
    except OSError as error:
        pytest.skip(f"this machine promises no memory that it has not: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(size, strides)


def run_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large grids the interpreter runs the corners; what kernels write to is sparse, and nothing of it is copied."""

    def corners(*limits: int) -> Iterable[int]:
        return (0, limits[0] - 1) if len(limits) == 1 and limits[0] > MANY else builtins.range(*limits)

    def empty(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return sparse(size, dtype) if math.prod(size) > MANY else torch.empty(tuple(size), dtype=dtype)

    def left_alone(self: Any, *arguments: Any) -> None:
        """Tensors of the CPU are those that the kernel wrote to."""

    monkeypatch.setattr(interpreter, "range", corners, raising=False)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", left_alone)
    monkeypatch.setattr(buffers, "empty", empty)
