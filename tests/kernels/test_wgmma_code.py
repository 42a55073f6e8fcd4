"""Compiled code of the products in Triton: nothing reads an accumulator while a tensor core may be writing it, and
products are not made to wait for each other.

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

from benchmarks.instructions import DISASSEMBLER

ROOT = Path(__file__).parents[2]
PRODUCTS = ("grouped_gemm", "grouped_wgrad", "fp8_attention", "dropout_attention", "dropout_attention causal")

COMPILE = """
import sys, torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from te_compile.kernels.ahead import Notes
from te_compile.kernels.compile_worker import source_of, target_of
from te_compile.kernels.dropout_attention import forward
from te_compile.kernels.dropout_attention_backward import backward
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
    elif sys.argv[1].startswith("dropout"):
        for width in (64, 128):
            q, k, v, grad, out = (codes(2, 256, 4, width, dtype=torch.bfloat16) for _ in range(5))
            bits, sums = codes(8, 8, 256, dtype=torch.int32), codes(2, 4, 256, dtype=torch.float32)
            how = 0.1, sys.argv[1].endswith("causal"), 0.1
            forward(q, k, v, bits, *how)
            backward(grad, q, k, v, bits, out, sums, *how)
    else:
        q, k, vt = codes(2, 256, 4, 128), codes(2, 256, 4, 128), codes(512, 512)
        fp8_attention(q, k, vt, scale, scale, scale, True, 0.1, torch.bfloat16, ATTENTION_TILE)
for launch in notes.launches:
    source, options = source_of(launch.kernel, launch.arguments, launch.constants, (9, 0))
    compiled = triton.compile(source, target=target_of((9, 0)), options=options)
    print(compiled.asm["ptx"])
    if len(sys.argv) > 2:
        with open(f"{sys.argv[2]}/{len(compiled.asm['cubin'])}-{hash(launch.kernel)}.cubin", "wb") as file:
            file.write(compiled.asm["cubin"])
"""


def ptx_of(product: str, cubins: Path | None = None) -> str:
    """cubins: a folder that machine code is written to."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, product, *([] if cubins is None else [str(cubins)])]
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


@pytest.mark.slow
@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton brings no cuobjdump")
@pytest.mark.parametrize("product", ["dropout_attention", "dropout_attention causal"])
def test_products_of_attention_run_beside_each_other(product: str, tmp_path: Path) -> None:
    """Where ptxas gives that up it has every product waited for before the next one begins."""
    ptx_of(product, tmp_path)
    counted = 0
    for file in tmp_path.iterdir():
        code = subprocess.run([DISASSEMBLER, "-sass", file], capture_output=True, text=True, check=True).stdout
        products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
        assert products == 0 or waits < products / 2, f"{waits} waits for {products} products"
        counted += products > 0
    assert counted == 6, "three kernels, for heads of two sizes"
