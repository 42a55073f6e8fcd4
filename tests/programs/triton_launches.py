"""Launches of our kernels as Triton's own launcher makes them and as the C++ core does, on a pretended driver.

    python -m tests.programs.triton_launches FOLDER

Run without Triton's interpreter. Kernels are compiled for an H200; the pretended libcuda.so.1, built in FOLDER, notes
what it is told to launch. Prints JSON, a row for each launch: kernel, widths of its parameters, and what the driver was
told by triton and by the core.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.nvidia import driver as nvidia

from te_compile.kernels import ahead, driver_launch, native, norm, norm_backward, quantize
from te_compile.kernels.compile_worker import Pointer, source_of, target_of
from te_compile.kernels.driver_launch import declared_widths
from te_compile.kernels.pointwise import fused_quantize
from te_compile.kernels.recording import rehearsing
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Spec
from te_compile.recipe import ScaleRule
from tests.csrc.conftest import PRETEND

CAPABILITY = (9, 0)
SPEC = "x0: bfloat16[M, K]; t0 = relu(x0); quantize t0; emit t0: bfloat16; sum t0: float32"


class Launch(ctypes.Structure):
    """As tests/csrc/pretend/driver.c has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("attributes", ctypes.c_uint), ("function", ctypes.c_void_p), ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_uint8 * 8 * 64), ("launches", ctypes.c_int),
    )  # fmt: skip


@triton.jit
def _of_all_kinds(p, flag, small, wide, huge, x, one, nothing, LENGTH: tl.constexpr):
    """A parameter of each type that a call can give."""
    value = x + small + wide + huge + one
    if flag:
        tl.store(p + tl.arange(0, LENGTH), value)
    if nothing is not None:
        tl.store(nothing, value)


def build_driver(folder: Path) -> ctypes.CDLL:
    """The pretended driver, loaded; Triton's modules find no other."""
    source = Path(nvidia.__file__).with_name("driver.c").read_text() + Path(nvidia.__file__).read_text()
    ours = (PRETEND / "driver.c").read_text()
    named = set(re.findall(r"\b(cu[A-Z]\w+)\b", source)) - set(re.findall(r"\bcu[A-Z]\w+\b", ours))
    (folder / "others.h").write_text("\n".join(f"NOTHING({name})" for name in sorted(named)))
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-I{folder}", str(PRETEND / "driver.c"), "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.seen.restype = ctypes.POINTER(Launch)
    return loaded


def launches() -> list[ahead.Launch]:
    """Of our kernels, as rehearsals tell of them, and one with arguments of all kinds."""
    norm_backward._device_limits = lambda index: (132, 227 << 10)
    notes = ahead.Notes(missing=True)
    with FakeTensorMode(), rehearsing(notes):
        x, weight = matrix(64, 256), torch.empty(256, dtype=torch.bfloat16, device="cuda")
        scale, e4m3, rule = torch.empty((), device="cuda"), torch.float8_e4m3fn, ScaleRule()
        quantize.quantize(x, scale, e4m3, True, True, rule, True)
        norm.norm_quantize(x, Norm(weight, None, 1e-5, "rms"), Wanted(scale, e4m3, True, True, True, rule), True)
        rstd = torch.empty(64, 1, device="cuda")
        norm_backward.norm_backward(x, x, weight, rstd, rstd, x, "rms", True, True, None)
        fused_quantize([x], scale, Spec.parse(SPEC), e4m3, True, True, rule, True)
    found = list({launch.form: launch for launch in notes.launches}.values())
    pointer = Pointer(torch.float32, True)
    for arguments in (
        (pointer, True, 5, 2**40, 2**63 + 8, 0.1, 1, None),
        (pointer, False, -7, -(2**40), 2**63 + 1, -1e-40, 1, pointer),
        (pointer, True, 48, 2**31, 3, float("inf"), 1, None),
    ):
        found.append(ahead.rehearsed(_of_all_kinds, arguments, {"LENGTH": 64, "num_warps": 2}))
    return found


def matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")


def row_of(launch: ahead.Launch, driver: ctypes.CDLL) -> dict[str, Any]:
    source, options = source_of(launch.kernel, launch.arguments, launch.constants, CAPABILITY)
    compiled = triton.compile(source, target=target_of(CAPABILITY), options=options)
    run = compiled._run = nvidia.CudaLauncher(source, compiled.metadata)
    function = compiled.function = random.randrange(16, 2**47, 16)
    grid = tuple(random.randrange(1, most) for most in (2**15, 2**8, 2**8))
    stream = random.randrange(16, 2**47, 16)
    addresses = [random.randrange(16, 2**47, 16) for each in launch.arguments if isinstance(each, Pointer)]
    left = iter(addresses)
    is_address = [isinstance(each, Pointer) for each in launch.arguments]
    rest = [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
    given = [*(next(left) if at else each for at, each in zip(is_address, launch.arguments, strict=True)), *rest]
    unknown = [*(None if at else each for at, each in zip(is_address, launch.arguments, strict=True)), *rest]
    widths = declared_widths(compiled.asm["ptx"], compiled.metadata.name)
    found = driver_launch.driver_launch(compiled, grid, unknown)
    assert widths is not None and found is not None
    metadata = compiled.packed_metadata
    by_triton = noted(driver, widths, lambda: run(*grid, stream, function, metadata, None, None, None, *given))
    places = [place for place, at in enumerate(is_address) if at]
    spots = [(found.word_of[place], tensor, 0) for tensor, place in enumerate(places)]
    step = (
        print,
        [],
        [],
        "launch",
        (found.function, found.grid, found.threads, found.shared_bytes, found.words, spots),
    )
    player = native.module().player(len(places), [], [step], [], None)
    by_core = noted(driver, widths, lambda: player([None] * len(places), addresses, 0, stream))
    return {"kernel": compiled.metadata.name, "widths": widths, "triton": by_triton, "core": by_core}


def noted(driver: ctypes.CDLL, widths: list[int], run: Any) -> dict[str, Any]:
    """What the driver is told while ``run`` runs."""
    driver.expect(len(widths), (ctypes.c_uint * len(widths))(*widths))
    run()
    seen = driver.seen().contents
    words = [bytes(seen.parameters[at]).hex() for at in range(len(widths))]
    numbers = {name: getattr(seen, name) for name in ("shared_bytes", "attributes", "function", "stream", "launches")}
    return {**numbers, "grid": list(seen.grid), "block": list(seen.block), "parameters": words}


def main(folder: Path) -> None:
    driver = build_driver(folder)
    utils = nvidia.CudaUtils()
    target = target_of(CAPABILITY)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0, get_current_target=lambda: target)
    triton.runtime.driver.set_active(active)
    print(json.dumps([row_of(launch, driver) for launch in launches()]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
