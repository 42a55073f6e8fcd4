"""Compiled code of the products in Triton: nothing reads an accumulator while a tensor core may be writing it.

It is compiled for an H100 without a GPU, in a process of its own: Triton's interpreter compiles nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PRODUCTS = ("grouped_gemm", "grouped_wgrad", "fp8_attention")

COMPILE = """
import sys, torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from te_compile.kernels.ahead import Notes
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.fp8_attention import WIDE as ATTENTION_TILE, fp8_attention
from te_compile.kernels.grouped_gemm import grouped_gemm, grouped_wgrad
from te_compile.kernels.recording import rehearsing

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
notes = Notes(missing=False)
with FakeTensorMode(), rehearsing(notes):
    def codes(*shape, dtype=E4M3):
        return torch.empty(shape, dtype=dtype, device="cuda")
    scale, ends = torch.empty((), device="cuda"), torch.empty(4, dtype=torch.int32, device="cuda")
    if sys.argv[1] == "grouped_gemm":
        grouped_gemm(codes(1024, 256), codes(4, 256, 256), scale, scale, ends, torch.bfloat16, "split")
    elif sys.argv[1] == "grouped_wgrad":
        grouped_wgrad(codes(256, 1024, dtype=E5M2), codes(256, 1024), scale, scale, ends, torch.bfloat16, "split")
    else:
        q, k, vt = codes(2, 256, 4, 128), codes(2, 256, 4, 128), codes(512, 512)
        fp8_attention(q, k, vt, scale, scale, scale, True, 0.1, torch.bfloat16, ATTENTION_TILE)
(launch,) = notes.launches
source, options = source_of(launch.kernel, launch.arguments, launch.constants, (9, 0))
print(triton.compile(source, target=target_of((9, 0)), options=options).asm["ptx"])
"""


def ptx_of(product: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, product]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def read_too_early(ptx: str) -> list[str]:
    """Instructions that read a register of an accumulator between its product and the wait for it."""
    writing: set[str] = set()
    found = []
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            writing.clear()
        elif "wgmma.mma_async" in line:
            writing |= set(re.findall(r"%\w+", line[line.index("{") : line.index("}")]))
        elif writing and re.match(r"\s+(@%\w+ )?[a-z]", line) and "wgmma" not in line:
            _, *read = re.findall(r"%\w+", line) or [""]
            if writing.intersection(read):
                found.append(line.strip())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
def test_no_sum_is_read_before_the_tensor_core_is_done(product: str) -> None:
    ptx = ptx_of(product)
    assert "wgmma.mma_async" in ptx
    assert read_too_early(ptx) == []


def test_a_read_too_early_is_found() -> None:
    product = "\twgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r1, %r2}, %rd1, %rd2;"
    wait, added = "\twgmma.wait_group.sync.aligned 0;", "\tadd.f32 %r9, %r9, %r2;"
    assert read_too_early("\n".join([product, added, wait])) == [added.strip()]
    assert read_too_early("\n".join([product, wait, added])) == []
