"""Kernels of few rows say that the next one may begin, where GPU and number of rows are such; tests/gpu runs them.

What they say is looked for in code that is compiled for an H100 without a GPU, in a process of its own: Triton's
interpreter compiles nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from te_compile.kernels import programmatic, skinny_gemm

ROOT = Path(__file__).parents[2]

COMPILE = """
import sys, torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from te_compile.kernels import programmatic
from te_compile.kernels.ahead import Notes
from te_compile.kernels.alone import quantize_alone
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.norm import norm_quantize
from te_compile.kernels.pointwise import fused_quantize
from te_compile.kernels.quantize import quantize
from te_compile.kernels.recording import rehearsing
from te_compile.kernels.tiles import alone
from te_compile.ops.norm import RMS
from te_compile.ops.norm_quantize import Norm, Wanted
from te_compile.ops.pointwise import Place, SpecBuilder
from te_compile.recipe import ScaleRule

capability, rows = (int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3])
programmatic._begins_early = lambda device: capability >= (9, 0)
builder = SpecBuilder()
x = builder.input(torch.bfloat16, Place.FULL)
square = builder.finish(builder.cast(builder.step("mul", x, x), torch.bfloat16), [], [])
e4m3, rule, notes = torch.float8_e4m3fn, ScaleRule(), Notes(missing=False)
with FakeTensorMode(), rehearsing(notes):
    x, wide = (torch.empty(rows, length, dtype=torch.bfloat16, device="cuda") for length in (256, 4096))
    weight, scale = torch.empty(256, dtype=torch.bfloat16, device="cuda"), torch.empty((), device="cuda")
    quantize_alone(x, None, e4m3, True, rule, alone(16, 256))
    quantize(x, scale, e4m3, True, False, rule, False)
    for each, by in ((x, weight), (wide, None)):
        norm_quantize(each, Norm(by, None, 1e-6, RMS), Wanted(scale, e4m3, True, False, False, rule), False)
    fused_quantize([x], scale, square, e4m3, True, False, rule, False)
    fused_quantize([x], None, square, e4m3, True, False, rule, True)
for launch in notes.launches:
    source, options = source_of(launch.kernel, launch.arguments, launch.constants, capability)
    asm = triton.compile(source, target=target_of(capability), options=options).asm["ptx"]
    print(launch.kernel.fn.__name__, "says" if "griddepcontrol.launch_dependents" in asm else "nothing")
"""


def said(capability: tuple[int, int], rows: int) -> list[str]:
    """Of each kernel its name and whether it lets the next begin."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, *map(str, (*capability, rows))]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.splitlines()


def test_each_kernel_before_a_product_of_few_rows_lets_it_begin() -> None:
    last = [f"{name} says" for name in ("_quantize_alone_kernel", "_quantize_kernel", "_norm_alone_kernel")]
    found = said((9, 0), 16)
    assert set(found) >= {*last, "_rows_kernel says", "produce says", "alone says"}, found
    assert not [line for line in found if line.endswith("nothing")], found


@pytest.mark.parametrize(("capability", "rows"), [((8, 9), 16), ((9, 0), 17)], ids=str)
def test_older_gpus_have_no_such_instruction_and_more_rows_no_such_product(
    capability: tuple[int, int], rows: int
) -> None:
    found = said(capability, rows)
    assert len(found) >= 5 and all(line.endswith("nothing") for line in found), found


def test_the_rows_are_those_of_the_products() -> None:
    assert programmatic.MOST_ROWS == skinny_gemm.MOST_ROWS


def test_where_there_is_no_gpu_nothing_begins_early() -> None:
    assert not programmatic.may_next_begin(torch.empty(4, 4), 4)
    if not torch.cuda.is_available():
        with FakeTensorMode():
            assert not programmatic.may_next_begin(torch.empty(4, 4, device="cuda"), 4)
