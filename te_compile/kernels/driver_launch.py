"""A launch of a compiled Triton kernel in the words of the CUDA driver, for the C++ core to make it without Python.

Triton's own launcher (triton/backends/nvidia/driver.py, and the C source that it writes or brings) hands the driver a
pointer to each parameter: those of the kernel's signature that are no constants, in their order, then two for scratch
memory, null where a kernel wants none. It runs 32 · num_warps threads a program. The same is done here where that is
all that it does. A kernel that wants more (scratch memory, clusters, a cooperative grid, programmatic launches,
descriptors, instrumentation), a type that is not known here and a Triton that nobody has looked at are left to
Triton's launcher.

A wrong layout would corrupt memory, so the parameters are also held against what the compiled kernel itself declares.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

LOOKED_AT = ((3, 6), (3, 9))  # the first and last version of Triton whose launcher tests/programs was compared with
_THREADS_PER_WARP = 32
_MOST_SHARED_BYTES = 228 << 10  # beyond it a launch says so in an attribute
_MOST_PROGRAMS = 2**31 - 1  # beyond which Triton's launcher counts them wrong
_INTEGERS = {  # bytes, signed
    "i1": (1, True), "i8": (1, True), "i16": (2, True), "i32": (4, True), "i64": (8, True),
    "u1": (1, False), "u8": (1, False), "u16": (2, False), "u32": (4, False), "u64": (8, False),
}  # fmt: skip
_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}
_POINTER_BYTES = 8
_SCRATCH = 2  # pointers that follow all parameters: global, and the profiler's
_DECLARED = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](?P<bits>\d+)\s+"  # type
    r"(?:\.ptr\s+[^,)\[]*?)?\w+(?P<array>\[\d+\])?\s*(?=[,)])"  # what a pointer points to; name
)


@dataclass(frozen=True)
class DriverLaunch:
    """``words``: a parameter each, the value in the low bytes, 0 where an address is to come. ``word_of``: which word
    belongs to which argument of the kernel."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    words: tuple[int, ...]
    word_of: dict[int, int]


def driver_launch(compiled: Any, grid: Sequence[int], arguments: Sequence[Any]) -> DriverLaunch | None:
    """How to launch ``compiled``; None if only Triton's launcher can.

    arguments: all parameters in the order of the kernel's definition, constants too; a tensor stands for an address.
    """
    if not (_is_known_triton() and _is_plain(compiled) and _is_grid(grid)):
        return None
    warps, _, shared_bytes = compiled.packed_metadata
    types = list(compiled.src.signature.items())
    if [name for name, _ in types] != list(compiled.src.fn.arg_names) or len(types) != len(arguments):
        return None
    words: list[int] = []
    widths: list[int] = []
    word_of: dict[int, int] = {}
    for place, ((_, kind), argument) in enumerate(zip(types, arguments, strict=True)):
        if kind == "constexpr":
            continue
        found = _word(kind, argument)
        if found is None:
            return None
        word_of[place] = len(words)
        words.append(found[0])
        widths.append(found[1])
    words += [0] * _SCRATCH
    widths += [_POINTER_BYTES] * _SCRATCH
    if declared_widths(compiled.asm.get("ptx", ""), compiled.metadata.name) != widths or not compiled.function:
        return None
    x, y, z = grid
    threads = _THREADS_PER_WARP * warps
    return DriverLaunch(compiled.function, (x, y, z), threads, shared_bytes, tuple(words), word_of)


def _is_known_triton() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2] if part.isdigit())
    return LOOKED_AT[0] <= version <= LOOKED_AT[1]


def _is_plain(compiled: Any) -> bool:
    """Does Triton's launcher do nothing for this kernel but launch it?"""
    run = compiled.run
    if (type(run).__module__, type(run).__name__) != ("triton.backends.nvidia.driver", "CudaLauncher"):
        return False
    wants = (
        run.global_scratch_size, run.profile_scratch_size, run.launch_cooperative_grid, run.launch_pdl,
        getattr(run, "gsan_enabled", False),
    )  # fmt: skip
    metadata = compiled.packed_metadata
    if any(wants) or not isinstance(metadata, tuple) or len(metadata) != 3:
        return False
    warps, clustered, shared_bytes = metadata
    return clustered == 1 and 1 <= warps <= 32 and 0 <= shared_bytes <= _MOST_SHARED_BYTES


def _is_grid(grid: Sequence[int]) -> bool:
    return len(grid) == 3 and min(grid) >= 1 and math.prod(grid) <= _MOST_PROGRAMS


def _word(kind: Any, argument: Any) -> tuple[int, int] | None:
    """The low bytes of a parameter of this type, and how many they are. None: unknown, or it does not fit."""
    if not isinstance(kind, str):
        return None
    if kind.startswith("*"):
        if argument is None or isinstance(argument, Tensor):
            return 0, _POINTER_BYTES
        return _integer(argument, _POINTER_BYTES, False)
    if kind in _INTEGERS:
        return _integer(argument, *_INTEGERS[kind])
    if kind in _FLOATS and isinstance(argument, (int, float)):
        try:
            packed = struct.pack(_FLOATS[kind], argument)
        except OverflowError:  # beyond fp32, where a cast in C gives an infinity
            return None
        return int.from_bytes(packed, "little"), len(packed)
    return None


def _integer(value: Any, width: int, signed: bool) -> tuple[int, int] | None:
    if not isinstance(value, int):
        return None
    try:
        return int.from_bytes(int(value).to_bytes(width, "little", signed=signed and width > 1), "little"), width
    except OverflowError:
        return None


def declared_widths(ptx: str, name: str) -> list[int] | None:
    """The bytes of each parameter that a kernel's assembly declares; None if that does not read as expected."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        return None
    body = entry[1].strip()
    found = list(_DECLARED.finditer(body + ")"))
    if len(found) != (body.count(",") + 1 if body else 0) or any(match["array"] for match in found):
        return None
    return [int(match["bits"]) // 8 for match in found]
